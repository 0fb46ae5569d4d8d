import copy
import itertools
import random
from functools import partial
from typing import Any

import pytest
import torch
from settings import default_dtype
from sklearn.datasets import load_digits
from torch import Tensor
from torchvision import transforms
from torchvision.transforms import v2

import qconv
from qconv.data import (
    Cutout,
    DigitsDataModule,
    EpochOrder,
    Normalize,
    PerImage,
    PicturesDataModule,
    ProgressiveSize,
    RandomCrop,
    RandomFlip,
)
from qconv.data.augment import augmented, mean_and_std
from qconv.data.digits import split_digits
from qconv.data.large import random_box
from qconv.data.pictures import Pictures, share_out
from qconv.training import Classifier, make_trainer
from qconv.training.run import reestimate_batch_norm


def epoch_of(data: DigitsDataModule, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    images, labels = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(labels)


@pytest.fixture
def digits() -> DigitsDataModule:
    data = DigitsDataModule(seed=3, batch_size=64)
    data.setup("fit")
    return data


def test_splits_are_all_pictures_once_in_equal_shares_of_the_classes() -> None:
    splits = split_digits(0)
    assert {name: len(labels) for name, (_, labels) in splits.items()} == {"train": 1197, "val": 240, "test": 360}
    pixels, _ = load_digits(return_X_y=True)
    expected = sorted(map(bytes, (torch.as_tensor(pixels) / 16).float().numpy()))
    got = sorted(bytes(image.numpy()) for images, _ in splits.values() for image in images.flatten(1))
    assert got == expected
    for _, labels in splits.values():
        counts = torch.bincount(labels, minlength=10)
        assert (counts / len(labels) - 0.1).abs().max() < 0.01


def test_the_split_does_not_depend_on_the_seed() -> None:
    first, second = DigitsDataModule(seed=1), DigitsDataModule(seed=2)
    first.setup("fit")
    second.setup("test")
    for split in ("train", "val", "test"):
        assert torch.equal(first.splits[split][0], second.splits[split][0])
        assert torch.equal(first.splits[split][1], second.splits[split][1])
    assert not torch.equal(split_digits(0)["test"][0], split_digits(1)["test"][0])


def test_pictures_are_normalised_by_the_train_split(digits: DigitsDataModule) -> None:
    images, _ = digits.splits["train"]
    assert images.mean().abs() < 1e-5
    assert (images.std() - 1).abs() < 1e-5
    assert images.min().item() == pytest.approx(digits.background)
    assert digits.splits["val"][0].mean() != 0


def test_batches_keep_the_contract(digits: DigitsDataModule) -> None:
    for loader in (digits.train_dataloader(), digits.val_dataloader(), digits.test_dataloader()):
        batches = list(loader)
        assert len(batches) == len(loader)
        for images, labels in batches:
            assert images.shape[1:] == (digits.in_channels, *digits.image_size)
            assert images.dtype == torch.float32
            assert labels.dtype == torch.int64
            assert labels.max() < digits.num_classes
    sizes = {len(labels) for _, labels in digits.train_dataloader()}
    assert sizes == {63}


def test_an_epoch_goes_on_where_it_stopped(digits: DigitsDataModule) -> None:
    loader = digits.train_dataloader()
    loader.sampler.set_epoch(2)
    batches = list(loader)
    for stop in (0, 1, 7, len(batches)):
        loader = digits.train_dataloader()
        loader.sampler.set_epoch(2)
        given = list(itertools.islice(loader, stop))
        again = digits.train_dataloader()
        again.load_state_dict(loader.state_dict())
        assert len(list(again)) == len(batches)  # of epoch 0
        again.sampler.set_epoch(2)
        given += again
        for (images, labels), (expected, theirs) in zip(given, batches, strict=True):
            assert torch.equal(images, expected)
            assert torch.equal(labels, theirs)
        assert len(list(again)) == len(batches)  # the rest was given once: now for batch norms that are taken anew
        again.load_state_dict(loader.state_dict())
        assert len(list(itertools.islice(again, 2))) == min(2, len(batches) - stop)
        assert len(list(again)) == len(batches)


def test_evaluation_reads_every_picture_as_it_is(digits: DigitsDataModule) -> None:
    images, labels = (torch.cat(parts) for parts in zip(*digits.test_dataloader(), strict=True))
    assert torch.equal(images, digits.splits["test"][0])
    assert torch.equal(labels, digits.splits["test"][1])


def test_an_epoch_is_a_function_of_seed_and_epoch(digits: DigitsDataModule) -> None:
    first = epoch_of(digits, 5)
    torch.rand(3)  # the global generator has no say
    again = DigitsDataModule(seed=3, batch_size=64)
    again.setup("fit")
    second = epoch_of(again, 5)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[1], epoch_of(digits, 6)[1])
    other = DigitsDataModule(seed=4, batch_size=64)
    other.setup("fit")
    assert not torch.equal(first[1], epoch_of(other, 5)[1])


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("shuffle", [False, True])
def test_processes_share_an_epoch_without_loss_or_repetition(world_size: int, shuffle: bool) -> None:
    ranks = [
        list(EpochOrder(101, 8, shuffle=shuffle, seed=1, rank=rank, world_size=world_size))
        for rank in range(world_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    sizes = [len(batch) for batches in ranks for batch in batches]
    assert max(sizes) <= 8
    assert max(sizes) - min(sizes) <= 1
    assert sorted(int(i) for batches in ranks for batch in batches for i in batch) == list(range(101))
    assert all(map(len, EpochOrder(200, 1, shuffle=False, rank=1, world_size=2)))


def test_shift_moves_by_at_most_one_pixel_and_fills(digits: DigitsDataModule) -> None:
    assert digits.train_dataloader().augment == (RandomCrop(1, digits.background),)
    images = torch.zeros(200, 1, 8, 8)
    images[:, :, 3, 4] = 1
    shifted = RandomCrop(1, -2.0)(images, torch.Generator().manual_seed(0))
    rows, columns = (shifted == 1).flatten(1).float().argmax(1) // 8, (shifted == 1).flatten(1).float().argmax(1) % 8
    assert set(rows.tolist()) == {2, 3, 4}
    assert set(columns.tolist()) == {3, 4, 5}
    assert ((shifted == 1).flatten(1).sum(1) == 1).all()
    moved = (rows != 3) | (columns != 4)
    assert torch.equal((shifted == -2).flatten(1).any(1), moved)


def test_what_is_drawn_does_not_depend_on_the_defaults_of_torch(digits: DigitsDataModule) -> None:
    normal = [*digits.train_dataloader()]
    box, chosen = random_box(300, 400, torch.Generator().manual_seed(3)), share_out(digits.splits["train"][1], 0.2, 1)
    with default_dtype(torch.float64), torch.device("meta"):
        assert share_out(digits.splits["train"][1], 0.2, 1).equal(chosen)
        assert random_box(300, 400, torch.Generator("cpu").manual_seed(3)) == box
        for (images, labels), (expected, theirs) in zip(digits.train_dataloader(), normal, strict=True):
            assert images.equal(expected)
            assert labels.equal(theirs)


def test_constants_of_normalize_do_not_depend_on_the_first_call() -> None:
    images = torch.rand(2, 3, 4, 4)
    normalize = Normalize((0.123456, 0.2, 0.3), (0.56789, 0.2, 0.1))
    with default_dtype(torch.bfloat16), torch.inference_mode():
        normalize(images)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (normalize.mean, normalize.std))
    assert normalize(images).equal((images - mean) / std)
    normalize(images.requires_grad_()).sum().backward()
    torch.testing.assert_close(images.grad, (1 / std).expand_as(images))


# Augmentation, against torchvision's, image by image


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
    assert (found[~covered] == 1).all()
    for lines in (rows, columns):
        pixels = range(lines.shape[1])
        around = {tuple(-(size // 2) <= pixel - centre < (size + 1) // 2 for pixel in pixels) for centre in pixels}
        assert set(map(tuple, lines.tolist())) == around


def test_the_originals_stay() -> None:
    images = torch.randint(0, 256, (8, 3, 4, 4), dtype=torch.uint8)
    before = images.clone()
    for augment in (RandomCrop(1), RandomFlip(), Cutout(2), lambda x, _: Normalize([1.0] * 3, [2.0] * 3)(x)):
        augment(images, torch.Generator())
        assert images.equal(before)


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


@pytest.mark.parametrize(
    "transform",
    [
        v2.Compose([v2.RandAugment(), v2.RandomErasing(0.5), v2.ColorJitter(0.3)]),
        transforms.RandomChoice([transforms.RandomVerticalFlip(1), transforms.RandomHorizontalFlip(1)]),
    ],
    ids=["of torch", "of Python"],
)
def test_transforms_of_torchvision_follow_the_generator_alone(transform: Any) -> None:
    images, change = torch.randint(0, 256, (32, 3, 8, 8), dtype=torch.uint8), PerImage(transform)
    torch.manual_seed(1)
    first = change(images, torch.Generator().manual_seed(0))
    torch.manual_seed(2)
    before = torch.get_rng_state(), random.getstate()
    assert change(images, torch.Generator().manual_seed(0)).equal(first)
    assert torch.get_rng_state().equal(before[0])
    assert random.getstate() == before[1]
    assert not change(images, torch.Generator().manual_seed(3)).equal(first)
    assert change(images[:0], torch.Generator()).shape == (0, 3, 8, 8)


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


# Training on small images first


class Noise(PicturesDataModule):
    num_classes, in_channels, image_size, classes = 2, 3, (32, 24), ("a", "b")

    def read(self) -> dict[str, Pictures]:
        images = torch.randint(256, (20, 3, 32, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        return {name: Pictures(images, torch.arange(20) % 2) for name in ("train", "val", "test")}


class Epochs:
    """What the data ask of a trainer."""

    def __init__(self, max_epochs: int) -> None:
        self.max_epochs, self.global_rank, self.world_size, self.training = max_epochs, 0, 1, True
        self.strategy: Any = type("Strategy", (), {"root_device": torch.device("cpu")})


def test_sides() -> None:
    size = ProgressiveSize(start=0.5, grow_from=0.25, full_from=0.75)
    assert [size.side(32, p / 8) for p in range(9)] == [16, 16, 16, 20, 24, 28, 32, 32, 32]
    assert size.smallest((32, 24)) == (16, 12)
    assert ProgressiveSize(0.5, 0.5, 0.5).side(32, 0.49) == 16  # at once
    assert ProgressiveSize(0.5, 0.5, 0.5).side(32, 0.5) == 32
    assert ProgressiveSize(1.0).side(30, 0.0) == 30  # not a multiple of 4
    assert ProgressiveSize(0.01).side(32, 0.0) == 4
    assert ProgressiveSize(0.9, multiple=64).side(32, 0.0) == 32
    assert ProgressiveSize(0.5, 0.0, 1.0).side(32, 1.0) == 32


def test_the_mean_of_a_picture_stays() -> None:
    images = torch.rand(2, 3, 32, 32)
    small = ProgressiveSize()(images, 0.0)
    assert small.shape == (2, 3, 16, 16)
    torch.testing.assert_close(small.mean((2, 3)), images.mean((2, 3)), rtol=0, atol=0.01)
    assert ProgressiveSize()(images, 0.9) is images


def test_only_training_pictures_grow() -> None:
    data: Any = Noise(batch_size=10, progressive_size=ProgressiveSize(0.5, 0.25, 0.75), augment=())
    data.trainer = Epochs(8)
    data.setup("fit")
    loader = data.train_dataloader()
    for epochs, epoch, size in ((8, 0, (16, 12)), (8, 3, (20, 16)), (8, 6, (32, 24)), (3, 2, (32, 24))):
        data.trainer.max_epochs = epochs
        loader.sampler.set_epoch(epoch)
        assert {tuple(images.shape[2:]) for images, _ in loader} == {size}
    assert {tuple(images.shape[2:]) for images, _ in data.val_dataloader()} == {(32, 24)}
    loader.sampler.set_epoch(0)
    data.trainer.training = False  # batch norms are taken anew
    assert {tuple(images.shape[2:]) for images, _ in loader} == {(32, 24)}
    data.trainer = None
    assert {tuple(images.shape[2:]) for images, _ in loader} == {(32, 24)}


def fitted(model: torch.nn.Module, data: PicturesDataModule, epochs: int = 1) -> tuple[Classifier, Any]:
    trainer = make_trainer(accelerator="cpu", max_epochs=epochs, logger=False, enable_progress_bar=False)
    classifier = Classifier(model, partial(torch.optim.SGD, lr=0.0))
    trainer.fit(classifier, datamodule=data)
    return classifier, trainer


def test_batch_norms_are_taken_anew_from_pictures_of_the_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Noise(batch_size=10, progressive_size=ProgressiveSize(), seed=1)
    model = qconv.models.resnet20()
    sizes: list[tuple[bool, int]] = []
    model.register_forward_pre_hook(lambda module, args: sizes.append((module.training, args[0].shape[2])))
    classifier, trainer = fitted(model, data, 2)
    assert [size for training, size in sizes if training] == [16, 16, 32, 32]
    sizes.clear()
    moved: list[Any] = []
    monkeypatch.setattr(classifier, "to", moved.append)
    reestimate_batch_norm(classifier, data, trainer)
    assert [size for _, size in sizes] == [32, 32]
    assert moved == [trainer.strategy.root_device]  # a training on a GPU leaves the network on the CPU


def test_batch_norms_are_taken_anew_as_in_the_test() -> None:
    """Signs are not drawn at random, and nothing is dropped."""
    data = Noise(batch_size=10, seed=1)
    stem = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Dropout(0.5))
    signs = qconv.QConv2d(4, 4, 3, scheme=qconv.schemes.bnn(stochastic=True))
    model = torch.nn.Sequential(
        *stem, signs, torch.nn.BatchNorm2d(4), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    )
    classifier, trainer = fitted(model, data)
    seen: list[torch.Tensor] = []
    modes: set[bool] = set()

    def note(module: Any, args: Any, output: torch.Tensor) -> None:
        seen.append(output.mean((0, 2, 3)))
        modes.update((model[2].training, module.input_quantizer.training))

    signs.register_forward_hook(note)
    model.train()[4].eval()
    reestimate_batch_norm(classifier, data, trainer)
    assert modes == {False}
    assert [model[0].training, model[4].training, signs.input_quantizer.training] == [True, False, True]
    assert {model[1].momentum, model[4].momentum} == {0.1}
    torch.testing.assert_close(model[4].running_mean, torch.stack(seen).mean(0))


class WithAuxiliary(torch.nn.Module):
    """Its second head is for training alone, as that of GoogLeNet."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
        self.auxiliary = torch.nn.BatchNorm2d(4)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(input)
        return (hidden + self.auxiliary(hidden) if self.training else hidden).mean((2, 3))


def test_batch_norms_that_the_test_does_not_call_are_left_alone() -> None:
    data, model = Noise(batch_size=10, seed=1), WithAuxiliary()
    norm: Any = model.stem[1]
    classifier, trainer = fitted(model, data)
    trained, called = copy.deepcopy(dict(model.auxiliary.named_buffers())), norm.running_mean.clone()
    assert trained["num_batches_tracked"] > 0
    reestimate_batch_norm(classifier, data, trainer)
    assert not torch.equal(norm.running_mean, called)
    for name, buffer in model.auxiliary.named_buffers():
        assert torch.equal(buffer, trained[name]), name
