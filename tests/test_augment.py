"""Batched augmentation against torchvision's, image by image."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision import transforms
from torchvision.transforms import v2

from qconv.data import Cutout, Normalize, PerImage, RandomCrop, RandomFlip
from qconv.data.augment import augmented, check_augment, mean_and_std


def outputs(images: Tensor) -> set[bytes]:
    return {bytes(image.contiguous().numpy()) for image in images}


def drawn(augment: list[Any], count: int = 4000) -> Tensor:
    """Many augmentations of one image whose pixels are all different."""
    generator = torch.Generator().manual_seed(0)
    images = torch.arange(1, 49, dtype=torch.uint8).view(1, 3, 4, 4).expand(count, -1, -1, -1)
    for each in augment:
        images = each(images, generator)
    return images


@pytest.mark.parametrize("padding", [0, 1, 2])
def test_crop_and_flip_give_torchvisions_pictures(padding: int) -> None:
    picture = torch.arange(1, 49, dtype=torch.uint8).view(3, 4, 4)
    theirs = v2.Compose([v2.RandomCrop(4, padding), v2.RandomHorizontalFlip()])
    expected = outputs(torch.stack([theirs(picture) for _ in range(4000)]))
    found = drawn([RandomCrop(padding), RandomFlip()])
    assert outputs(found) == expected
    assert len(expected) == 2 * (2 * padding + 1) ** 2
    counts = torch.tensor([sum(bytes(image.contiguous().numpy()) == one for image in found) for one in expected])
    assert counts.sum() == 4000
    mean = 4000 / len(expected)
    assert ((counts - mean).square() / mean).sum() < 3 * len(expected) + 10  # chi-squared: every one as likely


def test_flip_never_and_always() -> None:
    images = torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8)
    generator = torch.Generator()
    assert RandomFlip(0.0)(images, generator).equal(images)
    assert RandomFlip(1.0)(images, generator).equal(images.flip(3))


@pytest.mark.parametrize("size", [1, 2, 3, 9])
def test_cutout_covers_one_square(size: int) -> None:
    images = torch.ones(2000, 2, 5, 6, dtype=torch.uint8)
    found = Cutout(size, 7)(images, torch.Generator().manual_seed(0))
    covered = found == 7
    assert covered[:, 0].equal(covered[:, 1])
    rows, columns = covered[:, 0].any(2), covered[:, 0].any(1)
    assert covered[:, 0].equal(rows[:, :, None] & columns[:, None])
    assert rows.sum(1).max() == min(size, 5)
    assert (found[~covered] == 1).all()
    for lines in (rows, columns):  # each is one run of pixels
        assert all((line.int().diff().abs().sum() <= 2).item() for line in lines[:100])


def test_the_originals_stay() -> None:
    images = torch.randint(0, 256, (8, 3, 4, 4), dtype=torch.uint8)
    before = images.clone()
    for augment in (RandomCrop(1), RandomFlip(), Cutout(2), lambda x, _: Normalize([1.0] * 3, [2.0] * 3)(x)):
        augment(images, torch.Generator())
        assert images.equal(before)


def test_one_generator_one_result() -> None:
    first, again, other = (
        RandomCrop(2)(torch.arange(320, dtype=torch.int16).view(20, 1, 4, 4), torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert first.equal(again)
    assert not first.equal(other)


def test_normalized_by_exact_figures() -> None:
    images = torch.randint(0, 256, (9000, 3, 4, 5), dtype=torch.uint8)
    images[:, 2] = 17
    mean, std = mean_and_std(images)
    exact = images.double()
    torch.testing.assert_close(torch.tensor(mean, dtype=torch.float64), exact.mean((0, 2, 3)), rtol=1e-12, atol=0)
    expected = exact.std((0, 2, 3), unbiased=False)
    expected[2] = 1  # a constant channel is not divided by 0
    torch.testing.assert_close(torch.tensor(std, dtype=torch.float64), expected, rtol=1e-12, atol=0)
    normalized = Normalize(mean, std)(images)
    assert normalized.dtype == torch.float32
    assert normalized.mean((0, 2, 3)).abs().max() < 1e-5
    assert normalized[:, 2].eq(0).all()


def test_normalized_in_any_memory_format() -> None:
    images = torch.randint(0, 256, (3, 3, 5, 4), dtype=torch.uint8)
    normalize = Normalize([100.0, 110.0, 120.0], [50.0, 60.0, 70.0])
    expected, channels_last = normalize(images), images.contiguous(memory_format=torch.channels_last)
    found = normalize(channels_last)
    assert found.equal(expected)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert normalize(images[0]).equal(expected[0])
    assert normalize(channels_last[:, :, ::2]).equal(expected[:, :, ::2])
    floats = images.float()
    assert normalize(floats).equal(expected)
    assert floats.equal(images.float())  # what was given stays


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RandomCrop(-1), r"padding \(=-1\) must be at least 0"),
        (lambda: RandomFlip(1.5), r"p \(=1.5\) must be from 0 to 1"),
        (lambda: Cutout(0), r"size \(=0\) must be at least 1"),
    ],
)
def test_wrong_arguments(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_cutout_with_a_value_for_each_channel() -> None:
    images = torch.zeros(3, 3, 8, 8, dtype=torch.uint8)
    covered = Cutout(4, fill=[125, 123, 114])(images, torch.Generator().manual_seed(0))
    assert covered.dtype == torch.uint8
    for channel, value in enumerate((125, 123, 114)):
        assert set(covered[:, channel].unique().tolist()) == {0, value}
    same = Cutout(4, fill=7)(images, torch.Generator().manual_seed(0))
    assert (same[:, 0] == 7).equal(covered[:, 0] == 125)


def test_transforms_of_torchvision_draw_for_each_image() -> None:
    images = torch.randint(0, 256, (64, 3, 8, 8), dtype=torch.uint8)
    flip = PerImage(v2.RandomHorizontalFlip())
    found = flip(images, torch.Generator().manual_seed(0))
    mirrored = torch.tensor([one.equal(other.flip(2)) for one, other in zip(found, images, strict=True)])
    kept = torch.tensor([one.equal(other) for one, other in zip(found, images, strict=True)])
    assert (mirrored | kept).all()
    assert 15 < mirrored.sum() < 49  # the flip of a batch mirrors all or none


def test_transforms_that_draw_from_python_follow_the_generator() -> None:
    images = torch.randint(0, 256, (32, 3, 8, 8), dtype=torch.uint8)
    change = PerImage(transforms.RandomChoice([transforms.RandomVerticalFlip(1), transforms.RandomHorizontalFlip(1)]))
    state = random.getstate()
    first, again = (change(images, torch.Generator().manual_seed(0)) for _ in range(2))
    assert first.equal(again)
    assert random.getstate() == state


def test_transforms_of_torchvision_follow_the_generator_alone() -> None:
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    change = PerImage(v2.Compose([v2.RandAugment(), v2.RandomErasing(0.5), v2.ColorJitter(0.3)]))
    torch.manual_seed(1)
    first = change(images, torch.Generator().manual_seed(0))
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert change(images, torch.Generator().manual_seed(0)).equal(first)
    assert torch.get_rng_state().equal(before)
    assert not change(images, torch.Generator().manual_seed(3)).equal(first)
    assert change(images[:0], torch.Generator()).shape == (0, 3, 8, 8)


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        (RandomFlip(), r"augment \(=RandomFlip\(p=0.5\)\) must be a list"),
        ("flip", r"augment \(='flip'\) must be a list"),
        ([RandomFlip(), v2.RandAugment()], r"RandAugment would draw once for a whole batch: use qconv.data.PerImage"),
        ([v2.Compose([v2.RandomHorizontalFlip()])], r"Compose would draw once"),
        ([RandomFlip(), 3], r"augment: 3 must be a function of images"),
    ],
    ids=["one", "word", "torchvision", "composed", "number"],
)
def test_refused_augmentations(augment: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        check_augment(augment)


@pytest.mark.parametrize(
    "change",
    [lambda images, _: (images, 1), lambda images, _: images / 255, lambda images, _: images[1:]],
    ids=["tuple", "floats", "fewer"],
)
def test_what_an_augmentation_returns(change: Any) -> None:
    images = torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"must return 4 images of torch.uint8 and 3 channels, as it gets them, not"):
        augmented(images, [RandomFlip(), change], torch.Generator())
    assert augmented(images, [], torch.Generator()) is images


def test_one_value_fills_the_border() -> None:
    with pytest.raises(TypeError, match=r"fill \(=\(125, 123, 114\)\) must be a number"):
        RandomCrop(4, fill=(125, 123, 114))  # pyright: ignore[reportArgumentType]
