import itertools

import pytest
import torch
from sklearn.datasets import load_digits

from qconv.data import DigitsDataModule, EpochOrder, RandomCrop
from qconv.data.digits import split_digits
from qconv.data.large import random_box
from qconv.data.pictures import share_out
from qconv.images import Normalize


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
        assert len(given) == len(batches)
        for (images, labels), (expected, theirs) in zip(given, batches, strict=True):
            assert torch.equal(images, expected)
            assert torch.equal(labels, theirs)


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


def test_shift_moves_by_at_most_one_pixel_and_fills() -> None:
    images = torch.zeros(200, 1, 8, 8)
    images[:, :, 3, 4] = 1
    shifted = RandomCrop(1, -2.0)(images, torch.Generator().manual_seed(0))
    rows, columns = (shifted == 1).flatten(1).float().argmax(1) // 8, (shifted == 1).flatten(1).float().argmax(1) % 8
    assert set(rows.tolist()) == {2, 3, 4}
    assert set(columns.tolist()) == {3, 4, 5}
    assert ((shifted == 1).flatten(1).sum(1) == 1).all()
    moved = (rows != 3) | (columns != 4)
    assert torch.equal((shifted == -2).flatten(1).any(1), moved)


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"batch_size \(=0\) must be at least 1"):
        DigitsDataModule(batch_size=0)
    with pytest.raises(ValueError, match=r"shift \(=-1\) must be at least 0"):
        DigitsDataModule(shift=-1)
    with pytest.raises(ValueError, match=r"size \(=2\) must be at least world_size \(=3\)"):
        EpochOrder(2, 1, shuffle=False, world_size=3)
    with pytest.raises(
        ValueError, match=r"batch_size \(=1\) must be at least 2 for size \(=199\) on world_size \(=2\)"
    ):
        EpochOrder(199, 1, shuffle=False, world_size=2)
    assert all(map(len, EpochOrder(200, 1, shuffle=False, rank=1, world_size=2)))


def test_the_rest_of_an_epoch_is_given_once(digits: DigitsDataModule) -> None:
    loader = digits.train_dataloader()
    some = list(itertools.islice(loader, 7))
    again = digits.train_dataloader()
    again.load_state_dict(loader.state_dict())
    assert len(list(again)) == len(loader) - len(some)
    assert len(list(again)) == len(loader)  # such as for batch norms that are taken anew
    again.load_state_dict(loader.state_dict())
    assert len(list(itertools.islice(again, 2))) == 2
    assert len(list(again)) == len(loader)


def test_what_is_drawn_does_not_depend_on_the_defaults_of_torch(digits: DigitsDataModule) -> None:
    normal = [*digits.train_dataloader()]
    box, chosen = random_box(300, 400, torch.Generator().manual_seed(3)), share_out(digits.splits["train"][1], 0.2, 1)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        assert share_out(digits.splits["train"][1], 0.2, 1).equal(chosen)
        assert random_box(300, 400, torch.Generator("cpu").manual_seed(3)) == box
        for (images, labels), (expected, theirs) in zip(digits.train_dataloader(), normal, strict=True):
            assert images.equal(expected)
            assert labels.equal(theirs)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def test_constants_of_normalize_do_not_depend_on_the_first_call() -> None:
    images = torch.rand(2, 3, 4, 4)
    normalize = Normalize((0.123456, 0.2, 0.3), (0.56789, 0.2, 0.1))
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.inference_mode():
            normalize(images)
    finally:
        torch.set_default_dtype(torch.float32)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (normalize.mean, normalize.std))
    assert normalize(images).equal((images - mean) / std)
    normalize(images.requires_grad_()).sum().backward()
    torch.testing.assert_close(images.grad, (1 / std).expand_as(images))


def test_images_before_setup() -> None:
    with pytest.raises(RuntimeError, match=r"there are no train images yet: call setup\('fit'\) first"):
        DigitsDataModule().train_dataloader()
