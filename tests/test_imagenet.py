"""Large images, decoded while a network trains."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import draw_tree, smooth
from PIL import Image
from runs import config
from torch import Tensor, nn
from torchvision.transforms import v2

from qconv.data import BrokenPictureError, ImageNetDataModule
from qconv.data.large import MEAN, STD, Crop
from qconv.images import centre_crop
from qconv.training import Classifier, make_trainer
from qconv.training.assemble import build
from qconv.training.run import reestimate_batch_norm, train


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return draw_tree(
        tmp_path / "tree", {"train": 10, "val": 3}, lambda seed, _: smooth(seed), ("n01", "n02"), "JPEG", quality=95
    )


def made(tree: Path, **options: Any) -> ImageNetDataModule:
    small = {"image_size": 16, "resize": 20, "val_size": 4, "batch_size": 5, "workers": 0}
    data = ImageNetDataModule(str(tree), **{**small, **options})
    data.setup("fit")
    return data


def batches(data: ImageNetDataModule, loader: Any) -> list[tuple[Tensor, Tensor]]:
    """As Lightning hands them to the network."""
    return [data.on_after_batch_transfer(data.on_before_batch_transfer(batch, 0), 0) for batch in loader]


def test_splits_and_batches(tree: Path) -> None:
    data = made(tree)
    assert (data.classes, data.num_classes, data.image_size, data.in_channels) == (["n01", "n02"], 2, (16, 16), 3)
    assert {name: len(files) for name, files in data.splits.items()} == {"train": 16, "val": 4, "test": 6}
    files = [path for name in ("train", "val") for path, _ in data.splits[name]]
    assert sorted(files) == sorted((tree / "train").rglob("*.JPEG"))
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        assert len(batches(data, loader)) == len(loader)
        for images, labels in batches(data, loader):
            assert images.shape == (len(labels), 3, 16, 16)
            assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
    assert 1 <= made(tree, workers=10_000).workers < 10_000  # no more than cores
    assert sum(len(labels) for _, labels in batches(data, data.test_dataloader())) == 6


def epoch_of(data: ImageNetDataModule, epoch: int) -> tuple[Tensor, Tensor]:
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    images, labels = zip(*batches(data, loader), strict=True)
    return torch.cat(images), torch.cat(labels)


def test_pictures_are_a_function_of_seed_and_epoch(tree: Path) -> None:
    first = epoch_of(made(tree), 3)
    for other in (epoch_of(made(tree), 3), epoch_of(made(tree, workers=2), 3)):
        assert all(one.equal(another) for one, another in zip(first, other, strict=True))
    assert not first[0].equal(epoch_of(made(tree), 4)[0])
    assert not first[0].equal(epoch_of(made(tree, seed=1), 3)[0])


def test_no_number_is_taken_from_dropout(tree: Path) -> None:
    state = torch.get_rng_state()
    list(made(tree, workers=1).train_dataloader())
    assert torch.get_rng_state().equal(state)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_epoch_has_the_pictures_of_its_own(workers: int, tree: Path) -> None:
    data = made(tree, workers=workers, batch_size=2)
    whole = data.train_dataloader()
    whole.sampler.set_epoch(3)
    expected = [images for images, _, _ in whole]
    resumed = data.train_dataloader()
    resumed.load_state_dict({"epoch": 3, "batch": 2})
    batches = iter(resumed)  # Lightning makes the iterator first
    resumed.sampler.set_epoch(3)
    got = [images for images, _, _ in batches]
    assert len(got) == len(expected) - 2 > 0
    assert all(torch.equal(a, b) for a, b in zip(got, expected[2:], strict=True))
    assert resumed.state_dict() == {"epoch": 3, "batch": len(expected), "batches": len(expected), "pictures": 16}


def test_test_pictures_are_torchvisions(tree: Path) -> None:
    transform = v2.Compose([v2.Resize(20), v2.CenterCrop(16), v2.ToDtype(torch.float32), v2.Normalize(MEAN, STD)])
    data = made(tree)
    found = torch.cat([images for images, _ in batches(data, data.test_dataloader())])
    for image, (path, _) in zip(found, data.splits["test"], strict=True):
        with Image.open(path) as opened:
            expected = transform(v2.functional.pil_to_tensor(opened))
        torch.testing.assert_close(image, expected, rtol=0, atol=2 / min(STD))  # two decoders of JPEG


def test_random_crops_are_torchvisions_in_distribution() -> None:
    # Each pixel of the image tells its place, so that a crop's corners tell where it was taken.
    rows, columns = torch.meshgrid(torch.arange(120), torch.arange(160), indexing="ij")
    image = torch.stack([rows, columns, torch.zeros_like(rows)]).to(torch.uint8)

    def corners(crop: Tensor) -> list[float]:
        y, x = crop[0].float(), crop[1].float()
        return [float(y.min()), float(y.max()), float(x.min()), float(x.max()), float(x[0, 0] > x[0, -1])]

    found = torch.tensor([corners(Crop(32, 32, seed)(image, 0, 0)) for seed in range(1500)])
    theirs = v2.Compose([v2.RandomResizedCrop(32, antialias=True), v2.RandomHorizontalFlip()])
    expected = torch.tensor([corners(theirs(image)) for _ in range(1500)])
    for ours, other in zip(found.T, expected.T, strict=True):
        spread = (ours.var() / 1500 + other.var() / 1500).sqrt()
        assert (ours.mean() - other.mean()).abs() < 4 * spread
        assert 0.85 < ours.std() / other.std() < 1.18


@pytest.mark.parametrize("asked", [False, True])
def test_the_network_gets_the_memory_format_that_was_asked_for(asked: bool, tree: Path) -> None:
    data = made(tree)
    images, _ = next(iter(batches(data, data.train_dataloader())))
    assert images.is_contiguous(memory_format=torch.channels_last)  # as the crops are
    given: list[Tensor] = []
    model = nn.Sequential(nn.Conv2d(3, 2, 3))
    model.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    Classifier(model, partial(torch.optim.SGD, lr=0.1), channels_last=asked)(images)
    assert given[0].is_contiguous(memory_format=torch.channels_last if asked else torch.contiguous_format)


@pytest.mark.parametrize("size", [(1, 200), (200, 1), (3, 3)])
def test_pictures_of_any_shape(size: tuple[int, int]) -> None:
    image = torch.randint(0, 256, (3, *size), dtype=torch.uint8)
    for seed in range(20):
        assert Crop(8, 10, seed)(image, 0, 0).shape == (3, 8, 8)
    assert centre_crop(image, 8, 10).shape == (3, 8, 8)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-50])


@pytest.mark.parametrize("breaking", [truncate, lambda p: p.write_bytes(b""), lambda p: p.write_text("no image " * 9)])
def test_broken_files_are_named_and_counted(breaking: Any, tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = made(tree)
    broken = data.splits["train"][3][0]
    breaking(broken)
    with pytest.raises(BrokenPictureError, match=rf"{broken} cannot be decoded \(.+\); repair or remove it, or leave"):
        epoch_of(data, 0)
    data = made(tree, broken="skip")
    assert len(epoch_of(data, 0)[1]) == 15
    assert len(epoch_of(data, 1)[1]) == 15
    told = capsys.readouterr().err.replace("\n", "")
    assert told.count("left out (1 so far)") == 1
    assert str(broken) in told
    for path, _ in data.splits["train"]:
        breaking(path)
    with pytest.raises(BrokenPictureError, match=r"no image of a batch of \d could be decoded"):
        epoch_of(data, 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"image_size": 0}, r"image_size \(=0\) must be at least 1"),
        ({"batch_size": 0}, r"batch_size \(=0\) must be at least 1"),
        ({"resize": 10}, r"resize \(=10\) must be at least image_size \(=16\)"),
        ({"workers": -1}, r"workers \(=-1\) must be at least 0"),
        ({"broken": "hide"}, r"broken \(='hide'\) must be 'fatal' or 'skip'"),
        ({"val_size": 20}, r"val_size \(=20\) must take at least one of the 20"),
    ],
)
def test_arguments_out_of_range(options: dict[str, Any], message: str, tree: Path) -> None:
    with pytest.raises(ValueError, match=message):
        made(tree, **options)


@pytest.mark.nightly
def test_a_run_with_new_batch_norm_statistics(tree: Path, tmp_path: Path) -> None:
    small = ("data.image_size=16", "data.resize=20", "data.batch_size=5", "data.val_size=4", "data.workers=0")
    network = ("model=resnet20", "trainer=cpu", "trainer.max_epochs=1", "reestimate_bn=true")
    run = config("data=imagenet", f"data.root={tree}", *small, *network, f"run_dir={tmp_path / 'run'}")
    assert train(run).epochs == 1
    data = made(tree)
    classifier = build(run)[1].eval()
    first = next(module for module in classifier.modules() if isinstance(module, nn.BatchNorm2d))
    seen: list[Tensor] = []
    first.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    reestimate_batch_norm(classifier, data, make_trainer(accelerator="cpu"))
    means = torch.stack([input.mean((0, 2, 3)) for input in seen])
    assert first.running_mean is not None
    torch.testing.assert_close(first.running_mean, means.mean(0))  # over normalized images, each batch once
