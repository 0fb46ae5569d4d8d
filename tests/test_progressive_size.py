"""Training on small images first."""

import copy
from functools import partial
from typing import Any

import pytest
import torch

import qconv
from qconv.data import PicturesDataModule, ProgressiveSize
from qconv.data.pictures import Pictures
from qconv.training import Classifier, make_trainer
from qconv.training.assemble import check_sizes
from qconv.training.run import reestimate_batch_norm


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
    for epoch, size in ((0, (16, 12)), (3, (20, 16)), (6, (32, 24))):
        loader.sampler.set_epoch(epoch)
        assert {tuple(images.shape[2:]) for images, _ in loader} == {size}
    assert {tuple(images.shape[2:]) for images, _ in data.val_dataloader()} == {(32, 24)}
    loader.sampler.set_epoch(0)
    data.trainer.training = False  # batch norms are taken anew
    assert {tuple(images.shape[2:]) for images, _ in loader} == {(32, 24)}
    data.trainer = None
    assert {tuple(images.shape[2:]) for images, _ in loader} == {(32, 24)}


def test_the_last_epoch_has_the_full_size() -> None:
    data: Any = Noise(batch_size=10, progressive_size=ProgressiveSize(), augment=())
    data.trainer = Epochs(3)
    data.setup("fit")
    loader = data.train_dataloader()
    sizes = []
    for epoch in range(3):
        loader.sampler.set_epoch(epoch)
        sizes.append(next(iter(loader))[0].shape[2])
    assert sizes == [16, 16, 32]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": 0.0}, r"start \(=0.0\) must be a share"),
        ({"start": float("nan")}, r"start \(=nan\)"),
        ({"grow_from": 0.9}, r"grow_from \(=0.9\) and full_from \(=0.8\) must be"),
        ({"full_from": 1.1}, "full_from"),
        ({"multiple": 0}, r"multiple \(=0\) must be at least 1"),
        ({"multiple": 2.5}, r"multiple \(=2.5\) must be a whole number"),
    ],
)
def test_sizes_that_are_none(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProgressiveSize(**arguments)


def test_a_network_for_one_size_is_refused() -> None:
    data = Noise(progressive_size=ProgressiveSize())
    data.image_size = (32, 32)
    with pytest.raises(ValueError, match=r"start \(=0.5\): the network takes no images of 16×16 pixels"):
        check_sizes(qconv.models.vgg_small(), data)
    check_sizes(qconv.models.resnet20(), data)


def test_a_size_that_is_no_number() -> None:
    with pytest.raises(TypeError, match=r"start \(='a'\) must be a number"):
        ProgressiveSize(start="a")  # pyright: ignore


def test_batch_norms_are_taken_anew_from_pictures_of_the_full_size(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Noise(batch_size=10, progressive_size=ProgressiveSize(), seed=1)
    model = qconv.models.resnet20()
    sizes: list[tuple[bool, int]] = []
    model.register_forward_pre_hook(lambda module, args: sizes.append((module.training, args[0].shape[2])))
    trainer = make_trainer(accelerator="cpu", max_epochs=2, logger=False, enable_progress_bar=False)
    classifier = Classifier(model, partial(torch.optim.SGD, lr=0.01))
    trainer.fit(classifier, datamodule=data)
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
    trainer = make_trainer(accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False)
    classifier = Classifier(model, partial(torch.optim.SGD, lr=0.0))
    trainer.fit(classifier, datamodule=data)
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
    trainer = make_trainer(accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False)
    classifier = Classifier(model, partial(torch.optim.SGD, lr=0.0))
    trainer.fit(classifier, datamodule=data)
    trained, called = copy.deepcopy(dict(model.auxiliary.named_buffers())), norm.running_mean.clone()
    assert trained["num_batches_tracked"] > 0
    reestimate_batch_norm(classifier, data, trainer)
    assert not torch.equal(norm.running_mean, called)
    for name, buffer in model.auxiliary.named_buffers():
        assert torch.equal(buffer, trained[name]), name
