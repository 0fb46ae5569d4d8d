"""Freezing where `torch.fx` would be silent: forwards that look at more than their tensors."""

import importlib.util
import random
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from settings import mostly_nightly
from test_freeze import trained as converted_and_trained
from torch import Tensor, fx, nn
from torchvision.models.feature_extraction import create_feature_extractor

import qconv
from qconv import schemes
from qconv.inference import freeze, verify
from qconv.inference.build import build
from qconv.quantizers import DoReFaInput, DoReFaWeight, Sign, Stages
from qconv.scheme import Scheme

BNN, LSQ = schemes.bnn(), schemes.lsq(4, 4, signed_input=False)


def trained(model: nn.Module, scheme: Scheme, x: Tensor) -> nn.Module:
    """A trained model, whose layers are quantized but for those that it does not call."""
    called = set()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: called.add(name))
    model.eval()(x)
    for module in model.modules():
        module._forward_hooks.clear()
    skip = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d) and name not in called]
    return converted_and_trained(model, scheme, x, skip=skip)


def conv(**options: Any) -> nn.Conv2d:
    return nn.Conv2d(8, 8, 3, padding=1, **options)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = conv(), nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)))


class Base(nn.Module):
    """A block and a layer behind it, in a forward of a test's own."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.block, self.tail = Block(), conv()
        self.register_buffer("count", torch.zeros(()))


class Optional(Base):
    def forward(self, x: Tensor, temperature: float | None = None, *, gain: float = 2.0) -> Tensor:
        x = self.tail(self.block(x)) * gain
        return x if temperature is None else x / 3


class Keywords(Base):
    def forward(self, *inputs: Tensor, **options: Any) -> Tensor:
        x = self.tail(self.block(inputs[0]))
        return x if options.get("scale") is None else 3 * x


class OfType(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.tail(self.block(x))
        return 2 * x if isinstance(x, Tensor) else x


class OfWeightType(Base):
    """As timm's EdgeNeXt does it."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        return self.tail(x.to(self.tail.weight.dtype)) + x.to(self.tail.weight.dtype) / 4


class OfWeight(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.block(x)) + F.conv2d(x, self.tail.weight)[..., :1, :1]


class OfQuantizer(Base):
    def forward(self, x: Tensor) -> Tensor:
        layer: Any = self.tail
        return layer(self.block(x)) + getattr(layer, "input_quantizer", layer)(x)


class OfShape(Base):
    """As EdgeNeXt's positions: made by C code of a size, of which a trace has none."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.tail(self.block(x))
        there = ~torch.zeros(x.shape).to(self.tail.weight.device, dtype=torch.bool)
        return torch.where(there.cumsum(2, dtype=torch.float32) > 2, x, 0)


class Flattened(Base):
    def forward(self, x: Tensor) -> Tensor:
        x = self.tail(self.block(x))
        return x.view(x.size(0), -1)


class ViewModule(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.size(0), -1)


class FlattenedByModule(Base):
    def __init__(self) -> None:
        super().__init__()
        self.view = ViewModule()

    def forward(self, x: Tensor) -> Tensor:
        return self.view(self.tail(self.block(x)))


class Keeping(Base):
    outputs: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x)
        self.outputs = (x,)
        return self.tail(x)


class InBfloat16(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = torch.matmul(x, torch.full((6, 6), 0.3))
        return self.tail(self.block(x.float()))


class OfSeveralResults(Base):
    """As timm's weight standardization: a function of weights alone gives several tensors."""

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.block(x)) * torch.var_mean(self.block.bn.weight + 1)[1]


class AtRandom(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.block(x)) + 0 * torch.rand(1) + 0 * random.random()


class AtRandomOfLayer(AtRandom):
    """Its layers are frozen one by one, but for the last, of which it reads more than the output."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.tail.weight.device)) / self.tail.in_channels


def test_a_decorated_forward_is_the_one_that_is_traced() -> None:
    x = torch.randn(2, 8, 6, 6)
    model: Any = trained(Block(), LSQ, x)
    model.forward = MethodType(lambda self, x: 3 * Block.forward(self, x), model)
    frozen = freeze(model)
    expected = frozen(x)
    assert verify(model, frozen, x).equal
    model.conv.weight.data.neg_()
    assert torch.equal(frozen(x), expected)


KINDS = [Optional, Keywords, OfType, OfWeightType, OfWeight, OfQuantizer, OfShape, Flattened, FlattenedByModule]


@pytest.mark.parametrize(
    "kind",
    [*KINDS, Keeping, InBfloat16, OfSeveralResults, AtRandom, AtRandomOfLayer],
    ids=lambda kind: kind.__name__,
)
def test_forwards_of_every_kind(kind: type[nn.Module]) -> None:
    x = torch.randn(2, 8, 6, 6)
    model = trained(kind(), LSQ, x)
    frozen = freeze(model) if kind in (Optional, Flattened) else build(model, x)
    torch.testing.assert_close(frozen(x), model(x), rtol=1e-4, atol=1e-5)
    assert frozen.untraced == ("its forward draws random numbers" if issubclass(kind, AtRandom) else "")
    floats = [told for told in frozen.layers if told.arithmetic == "float"]
    assert [told.name for told in floats] == (["tail"] if kind is AtRandomOfLayer else [])


class Python(Base):
    """Can't be traced, as it asks for a size."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Sequential(conv(), nn.BatchNorm2d(8), nn.ReLU(), conv(), nn.BatchNorm2d(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.then(x) if x.shape[2] < 1000 else x

    def then(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class CallsOnly(Python):
    def then(self, x: Tensor) -> Tensor:
        return self.tail(self.parts(self.block(x))).view(len(x), -1)


class CallsBeside(Python):
    def then(self, x: Tensor) -> Tensor:
        return self.block(x) + self.block.conv(x)


class Indexes(Python):
    def then(self, x: Tensor) -> Tensor:
        middle = self.parts[1](self.parts[0](x))
        return self.parts[len(self.parts) - 1](middle) + self.block(x)


class Iterates(Python):
    def then(self, x: Tensor) -> Tensor:
        means = []
        for module in self.parts:
            x = module(x)
            means.append(x.mean((2, 3)))
        return torch.cat(means, 1)


class ReadsWeight(Python):
    def then(self, x: Tensor) -> Tensor:
        return self.tail(self.block(x)) * self.tail.weight.mean() + self.tail.out_channels


class LooksAtTypes(Python):
    def then(self, x: Tensor) -> Tensor:
        return self.block(x) if isinstance(self.block, Block) else x


class LooksForAttributes(Python):
    def then(self, x: Tensor) -> Tensor:
        x = self.block.bn(x) if hasattr(self.block, "bn") and not hasattr(self.block, "norm") else self.block(x)
        return self.tail(x)


class CallsTwice(Python):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.block

    def then(self, x: Tensor) -> Tensor:
        return self.tail(self.again(self.block(x)))


class SetsAttribute(Python):
    """Tells a module the size of the image, as decoders of segmentation networks do."""

    def __init__(self) -> None:
        super().__init__()
        self.tail = Resizes()

    def then(self, x: Tensor) -> Tensor:
        self.tail.size = x.shape[2]
        return self.tail(self.block(x))


class Resizes(nn.Module):
    size: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv(stride=2)

    def forward(self, x: Tensor) -> Tensor:
        size = self.size["now"] if isinstance(self.size, dict) else self.size
        return F.interpolate(self.conv(x), size=(size, size))


class SharesDictionary(SetsAttribute):
    def __init__(self) -> None:
        super().__init__()
        self.tail.size = {}

    def then(self, x: Tensor) -> Tensor:
        self.tail.size["now"] = x.shape[2]
        return self.tail(self.block(x))


class ChoosesBySize(Python):
    """Calls one module for small images, another for large ones."""

    def then(self, x: Tensor) -> Tensor:
        return self.tail(self.block(x) if x.shape[2] < 10 else self.parts(x))


PYTHON = [ChoosesBySize, SetsAttribute, SharesDictionary, CallsOnly, CallsBeside, Indexes, Iterates, ReadsWeight]
PYTHON += [LooksAtTypes, LooksForAttributes, CallsTwice]


@pytest.mark.parametrize("kind", PYTHON, ids=lambda kind: kind.__name__)
def test_parents_that_are_not_traced(kind: type[nn.Module]) -> None:
    x = torch.randn(2, 8, 6, 6)
    model = trained(kind(), LSQ, x)
    frozen = build(model, x)
    assert not frozen.untraced
    other = torch.randn(1, 8, 9, 9)
    for input in (x, other):
        torch.testing.assert_close(frozen(input), model(input), rtol=1e-4, atol=1e-5)


class OfWindows(Base):
    """As Swin's and MobileViT's attention: there are several windows for each image."""

    def forward(self, x: Tensor) -> Tensor:
        images, channels, height, width = self.block(x).shape
        rows, columns = height // 3, width // 3
        windows = self.block(x).view(images, channels, rows, 3, columns, 3).permute(0, 2, 4, 3, 5, 1)
        windows = windows.reshape(images * rows * columns, 9, channels).softmax(1)
        windows = windows.view(images, -1, columns, 3, 3, channels).permute(0, 5, 1, 3, 2, 4)
        return self.tail(windows.reshape(x.shape))


def test_images_are_counted_behind_windows(tmp_path: Path) -> None:
    model = trained(OfWindows(), LSQ, x := torch.randn(4, 8, 6, 6))
    frozen = freeze(model, example=x)
    assert not frozen.untraced
    for input in (x[:1], x, torch.randn(5, 8, 9, 12)):
        torch.testing.assert_close(frozen(input), model(input), rtol=1e-4, atol=1e-5)
    qconv.export(model, path := tmp_path / "windows.pt2", to="pt2", images=x)
    assert qconv.verify_export(model, path, x).agrees
    if importlib.util.find_spec("onnx") is not None:
        assert qconv.export_onnx(model, tmp_path / "windows.onnx", x).close == 4


class InWindows(nn.Module):
    """A layer that reads windows, or rows, as samples."""

    def __init__(self, height: int) -> None:
        super().__init__()
        self.stem, self.norm, self.height = nn.Conv2d(3, 8, 1), nn.LayerNorm(8), height
        self.layer, self.head = nn.Linear(8, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        count, channels, height, width = (x := self.stem(x)).shape
        x = x.view(count, channels, height // self.height, self.height, -1, width // 2).permute(0, 2, 4, 3, 5, 1)
        x = self.layer(self.norm(x.reshape(-1, self.height * (width // 2), channels)))
        return self.head(x.reshape(count, height * width, -1).amax(1))


@pytest.mark.parametrize("scheme", [schemes.bwn(), schemes.shift_q(), schemes.reactnet(), LSQ])
@pytest.mark.parametrize("height", [1, 4])
def test_a_layer_of_windows(scheme: Scheme, height: int) -> None:
    model = trained(InWindows(height), scheme, x := torch.randn(4, 3, 8, 8))
    frozen = freeze(model, example=x)
    assert not frozen.untraced
    assert verify(model, frozen, x).equal
    for input in (x[:1], x[:3]):
        torch.testing.assert_close(frozen(input), model(input), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 4])
@pytest.mark.parametrize("dims", [1, 2])
def test_thresholds_of_flattened_images(channels: int, dims: int) -> None:
    """A quantizer of rows has one for each feature, of which an image has several in a channel."""
    conv: Any = (nn.Conv1d, nn.Conv2d)[dims - 1]
    layers = conv(3, channels, 3), nn.Flatten(), nn.Linear(channels * 4**dims, 8), nn.Linear(8, 5), nn.Linear(5, 4)
    model: Any = trained(nn.Sequential(*layers), schemes.reactnet(), x := torch.randn(8, 3, *[6] * dims))
    with torch.no_grad():
        model[2].input_quantizer.bias.normal_()
    assert verify(model, freeze(model, example=x), x).equal


class OfHeads(nn.Module):
    """Attention, whose layers before it are convolutions in the program: the numbers of a head lie apart there."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm, self.parts = nn.Conv2d(1, 16, 4, 4), nn.LayerNorm(16), nn.Linear(16, 48)
        self.tail = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(self.patches(x).flatten(2).transpose(1, 2))
        parts = self.parts(tokens).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return self.tail(F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2).mean(1))


def test_attention_of_numbers_that_lie_apart(tmp_path: Path) -> None:
    """torch's kernel for CPUs computes other numbers of them, without a word."""
    model = trained(OfHeads(), schemes.bwn(), x := torch.randn(4, 1, 16, 16))
    frozen = freeze(model, example=x)
    assert not frozen.untraced
    torch.testing.assert_close(frozen(x), model(x), rtol=1e-4, atol=1e-5)
    program = qconv.export(model, path := tmp_path / "heads.pt2", to="pt2", images=x)
    assert program is not None
    assert program.size == (16, 16)  # torch runs it, and its file takes images of one size
    assert qconv.verify_export(model, path, x).difference < 1e-5


ROWS = torch.linspace(0.5, 2, 8).view(8, 1, 1)
OF_PIXELS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm of columns": lambda x: F.layer_norm(x.transpose(2, 3), (8,)).transpose(2, 3),
    "norm of rolled pixels": lambda x: F.layer_norm(x.roll(1, 1), (8,)),
    "norm of columns of images": lambda x: F.layer_norm(x.movedim(-1, 1), (8,)).movedim(1, -1),
    "less rows": lambda x: x - ROWS,
    "clamped by rows": lambda x: x.clamp(min=ROWS, max=1.5 * ROWS),
    "smaller": lambda x: F.interpolate(x.movedim(-1, 1), (4, 1), mode="bilinear", antialias=True).movedim(1, -1),
    "rounded": lambda x: torch.div(x, 0.3, rounding_mode="floor"),
}


class OfPixels(Base):
    """A function of pixels with channels last."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = OF_PIXELS[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.function(self.block(x).movedim(1, -1)).movedim(-1, 1))


@pytest.mark.parametrize("name", OF_PIXELS)
def test_channels_last_are_no_rows_or_columns(name: str) -> None:
    model = trained(OfPixels(name), LSQ, x := torch.randn(4, 8, 8, 8))
    frozen = freeze(model, example=x)
    assert not frozen.untraced
    torch.testing.assert_close(frozen(x[:1]), model(x[:1]), rtol=1e-4, atol=1e-5)


def test_results_that_a_network_keeps_do_not_matter() -> None:
    model = trained(Keeping(), LSQ, x := torch.randn(2, 8, 6, 6))
    output = model(x)
    assert not model.outputs[0].is_leaf  # pyright: ignore  # deepcopy refuses it
    torch.testing.assert_close(freeze(model, example=x)(x), output, rtol=1e-4, atol=1e-5)
    assert qconv.summarize(model, (8, 6, 6)).parameters


class KeepsGrid(Base):
    """As YOLO's head: a grid for the last shape, made of numbers that it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.strides, self.shape, self.grid = torch.tensor([8.0, 16.0]), torch.Size(), torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tail(self.block(x))
        if self.shape != x.shape:
            first, second = (int(stride) for stride in self.strides.sqrt().square() * torch.arange(2)[1])
            self.shape, self.grid = x.shape, torch.full(x.shape, first) + x.new_full(x.shape[2:], second)
        return x * self.grid


@pytest.mark.parametrize("images", [1, 2, 3])
def test_numbers_that_a_network_holds(images: int) -> None:
    x = torch.randn(4, 8, 6, 6)
    model = trained(KeepsGrid(), LSQ, x)
    model(x[:images])
    frozen = freeze(model, example=x)
    assert not frozen.untraced
    assert not any("new_full" in operation.origin for operation in frozen.program(x).operations)  # ONNX has no such
    for input in (x[:1], x, torch.randn(2, 8, 9, 9)):
        torch.testing.assert_close(frozen(input), model(input), rtol=1e-4, atol=1e-4)


class ReadsInput(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.block(x)) * (2 if x.exp().sum() > 0 else 3)


def test_numbers_of_the_input_are_not_written_down() -> None:
    model = trained(ReadsInput(), LSQ, x := torch.randn(2, 8, 6, 6))
    assert build(model, x).untraced == "its forward reads numbers of its input, as in an if or by item()"


OF_IMAGES: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda x: x * len(x),
    "mean": lambda x: x - x.sum(0, keepdim=True) / len(x),
    "float": lambda x: x + 1 / len(x),
    "tensor": lambda x: x * torch.tensor(1.0 * len(x)),
    "item": lambda x: x * torch.tensor([1.0 * len(x)]).sum().item(),
    "behind two channels": lambda x: x[:, :2].transpose(0, 1).cos().view(2, len(x), -1).transpose(0, 1),
}


class OfImages(Base):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.function = OF_IMAGES[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.tail(self.block(x)))


@pytest.mark.parametrize("name", OF_IMAGES)
def test_numbers_of_images_are_not_written_down(name: str) -> None:
    model = trained(OfImages(name), LSQ, x := torch.randn(4, 8, 6, 6))
    frozen = freeze(model, example=x[:2])
    for input in (x[:1], x[:3], x):
        torch.testing.assert_close(frozen(input), model(input), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_python", [False, True])
@pytest.mark.parametrize("place", ["block", "block.bn", "tail"])
def test_hooks_are_a_part_of_the_forward(place: str, is_python: bool) -> None:
    x = torch.randn(2, 8, 6, 6)
    model = trained(ReadsInput() if is_python else FlattenedByModule(), LSQ, x)
    plain, module = model(x), model.get_submodule(place)
    module.register_forward_pre_hook(lambda _, given: (given[0] + 1,))
    module.register_forward_hook(lambda *given: 2 * given[-1])
    frozen = freeze(model, example=x)
    assert bool(frozen.untraced) == is_python
    assert not torch.allclose(model(x), plain)
    torch.testing.assert_close(frozen(x), model(x), rtol=1e-4, atol=1e-4)


class ReadsItem(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.block(x) * x.abs().mean().item())


@pytest.mark.parametrize("kind", [FlattenedByModule, ReadsItem])
def test_a_graph_whose_copies_train(kind: type[nn.Module]) -> None:
    """As torchvision's feature extractors: a copy is in training, whatever the mode."""
    model = trained(kind(), LSQ, x := torch.randn(2, 8, 6, 6))
    extractor: Any = create_feature_extractor(model, {"tail": "x"})
    frozen = freeze(extractor, example=x)
    assert bool(frozen.untraced) == (kind is ReadsItem)
    torch.testing.assert_close(frozen(x)["x"], extractor(x)["x"], rtol=1e-4, atol=1e-5)


class ByName(Python):
    """Names its outputs by attributes that a frozen part has for itself."""

    def __init__(self) -> None:
        super().__init__()
        vars(self.block).update(name="low", plain=1, known=2)

    def forward(self, x: Tensor) -> Any:
        x = self.block(x) if x.mean() < 1e9 else x
        return {self.block.name: x, "known": self.block.known, f"high {self.block.plain}": self.tail(x)}


def test_attributes_of_parts_are_the_models() -> None:
    x = torch.randn(2, 8, 6, 6)
    model = trained(ByName(), LSQ, x)
    found = freeze(model)(x)
    assert list(found) == list(model(x)) == ["low", "known", "high 1"]
    assert found["known"] == 2


@pytest.mark.parametrize("name", ["reactnet", "lsq", "n2uq"])
def test_hidden_linear_layers_with_trained_shifts(name: str) -> None:
    x = torch.randn(6, 20)
    model: Any = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 30), nn.Linear(30, 5))
    qconv.convert(model, getattr(schemes, name)(), skip=())
    for layer in (model[0], model[2], model[3]):
        for parameter in layer.input_quantizer.parameters():
            nn.init.uniform_(parameter, 0.2, 0.9)
    qconv.calibrate(model, [x])
    model.train()(x)
    freeze(model.eval(), example=x)  # which verifies it


def test_a_layer_in_two_parts() -> None:
    class Two(Python):
        def __init__(self) -> None:
            super().__init__()
            self.other = Block()
            self.other.conv = self.block.conv

        def then(self, x: Tensor) -> Tensor:
            return self.other(self.block(x))

    x = torch.randn(2, 8, 6, 6)
    frozen = freeze(trained(Two(), LSQ, x), example=x)
    assert [each.name for each in frozen.layers] == ["block.conv"]


def test_an_example_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 8, 6, 6)
    model = trained(CallsOnly(), LSQ, x)

    def planted(self: Any, *args: Any) -> Any:
        return original(self, *args)._replace(scale=original(self, *args).scale * 1.01)

    lowering: Any = importlib.import_module("qconv.inference.lower")
    original = lowering.arithmetic
    monkeypatch.setattr(lowering, "arithmetic", planted)
    with pytest.raises(ValueError, match=r"does not compute what the trained one does:(?s:.*)not equal"):
        freeze(model, example=x)


@pytest.mark.parametrize("name", ["bnn", "lsq", "n2uq", "bwn"])
def test_a_sample_with_nan_gives_nan(name: str) -> None:
    x = torch.randn(3, 8, 6, 6)
    parts = conv(), nn.BatchNorm2d(8), conv(), nn.BatchNorm2d(8), nn.Flatten()
    model = trained(nn.Sequential(*parts), getattr(schemes, name)(), x)
    frozen = build(model, x)
    for bad in (torch.nan, torch.inf):
        x[1, 2, 3, 3] = bad
        assert frozen(x).isnan().any(1).tolist() == [False, True, False]
    assert frozen(x[:1]).isfinite().all()


def test_samples_with_nan_are_refused() -> None:
    x = torch.randn(3, 8, 6, 6).index_fill(0, torch.tensor(1), torch.nan)
    model = qconv.convert(nn.Sequential(conv()), schemes.bnn(), skip=()).eval()
    with pytest.raises(ValueError, match="input has NaN or inf in 1 of 3 samples"):
        freeze(model, nan="refuse")(x)
    with pytest.raises(ValueError, match=r"nan \(='ignore'\) must be 'pass' or 'refuse'"):
        freeze(model, nan="ignore")  # pyright: ignore[reportArgumentType]


def test_inf_of_which_a_float_layer_makes_nan() -> None:
    x = torch.randn(3, 8, 6, 6)
    model = qconv.convert(nn.Sequential(nn.Conv2d(8, 8, 3), conv(), nn.Flatten()), LSQ, skip=["0"])
    qconv.calibrate(model, [x])
    model.eval()
    x[1, 2, 3, 3], x[1, 2, 4, 3] = torch.inf, -torch.inf
    wanted, got = model(x), build(model, x[:1])(x)
    assert wanted.isnan().any(1).tolist() == got.isnan().any(1).tolist() == [False, True, False]


def test_other_inputs_than_one_tensor_by_position_are_refused() -> None:
    class ByName(nn.Module):
        def forward(self, *, image: Tensor) -> Tensor:
            return image

    with pytest.raises(ValueError, match=r"model \(ByName\) takes image only by name"):
        freeze(ByName())
    with pytest.raises(ValueError, match=r"model \(Bilinear\) takes input1, input2: a frozen model takes one tensor"):
        freeze(nn.Bilinear(2, 2, 2))


def test_an_onnx_file_is_compared_with_the_trained_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    x = torch.randn(4, 8, 6, 6)
    model = trained(Flattened(), LSQ, x)
    right = qconv.export_onnx(model, tmp_path / "right.onnx", x)
    assert (right.close, right.decisions) == (4, 0)
    lowering: Any = importlib.import_module("qconv.inference.lower")
    original = lowering.arithmetic
    monkeypatch.setattr(lowering, "arithmetic", lambda layer: original(layer)._replace(scale=original(layer).scale * 2))
    wrong = qconv.export_onnx(model, tmp_path / "wrong.onnx", x)
    assert wrong.close == 0
    assert wrong == qconv.onnx.compare_onnx(model, tmp_path / "wrong.onnx", x)


def test_examples_that_can_not_be_used() -> None:
    model = trained(Flattened(), LSQ, torch.randn(2, 8, 6, 6))
    for example, kind, words in (
        (torch.randn(3, 7, 6, 6), ValueError, r"example \(of shape \(3, 7, 6, 6\)\) does not suit the model: .*7"),
        (torch.randn(0, 8, 6, 6), ValueError, r"example \(of shape \(0, 8, 6, 6\)\) must hold at least one sample"),
        (torch.full((3, 8, 6, 6), torch.nan), ValueError, "example has NaN or inf: pass typical inputs"),
        ([1.0], TypeError, r"example \(list\) must be a tensor of inputs"),
    ):
        with pytest.raises(kind, match=words):
            freeze(model, example=example)  # pyright: ignore[reportArgumentType]


PLACES = product(["", "0", "0.1", "0.2", "0.3", "2", "3", "4"], [BNN, LSQ])


@pytest.mark.parametrize(("place", "scheme"), mostly_nightly(PLACES, [("", BNN), ("0.2", LSQ), ("3", BNN)]))
def test_a_forward_that_is_replaced_on_a_module(place: str, scheme: Scheme) -> None:
    """Its class does not say what it computes then, so it is not folded into the layer before it."""
    x = torch.randn(4, 8, 6, 6)
    block = nn.Sequential(conv(bias=False), nn.BatchNorm2d(8), nn.ReLU() if scheme is LSQ else nn.Hardtanh())
    block.append(nn.MaxPool2d(2))
    model = nn.Sequential(block, conv(bias=False), nn.BatchNorm2d(8), conv(bias=False), nn.BatchNorm2d(8))
    model = converted_and_trained(model, scheme, x, skip=["3"])
    module: Any = model.get_submodule(place)
    of_class = type(module).forward
    module.forward = MethodType(lambda self, x: 2 * of_class(self, x).flip(1), module)
    frozen = build(model, x)
    torch.testing.assert_close(frozen(x), model(x), rtol=1e-4, atol=1e-4)
    assert verify(model, frozen, x).equal


@fx.wrap
def activated(x: Tensor, inplace: bool = True) -> Tensor:
    """A call that `torch.fx` does not look into."""
    return nn.functional.relu(x, inplace)


@fx.wrap
def activated_as(x: Tensor, **options: bool) -> Tensor:
    """Its argument has a name, but no place."""
    return activated(x, **options)


class FlattensAndWrites(nn.Module):
    """Its values are written in place while they are read in another shape, which shares their memory in training."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.second, self.relu = how, conv(), conv(), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.how == "module":
            aside = self.relu(h.flatten(1))
        elif self.how == "function":
            aside = nn.functional.relu(h.flatten(1), True)  # as others write it
        elif self.how == "default":
            aside = activated(h.flatten(1))
        elif self.how == "options":
            aside = activated_as(h.flatten(1), inplace=True)
        elif self.how == "method":
            aside = h.flatten(1).sub_(0.1).mul_(3)
        elif self.how == "source":
            aside = torch.flatten(h, 1)
            h += 1
        else:  # no other value sees it
            return self.second(self.relu(h)).flatten(1).mul_(2)
        return self.second(h).flatten(1) + aside


HOWS = product(["module", "function", "default", "options", "method", "source", "alone"], [BNN, LSQ])


@pytest.mark.parametrize(("how", "scheme"), mostly_nightly(HOWS, [("module", BNN), ("method", LSQ), ("source", LSQ)]))
def test_memory_that_is_shared_in_one_format_alone(how: str, scheme: Scheme) -> None:
    x = torch.randn(4, 8, 6, 6)
    model = qconv.convert(FlattensAndWrites(how), scheme, skip=(), before_sign="keep")
    qconv.calibrate(model, [x])
    model.eval()
    frozen = build(model, x)
    torch.testing.assert_close(frozen(x), model(x), rtol=1e-4, atol=1e-4)


def test_pooled_sums_of_negative_scales() -> None:
    """XNOR-Net++ may learn them; the largest sum is then the smallest value."""
    block = nn.Sequential(conv(bias=False), nn.MaxPool2d(2), nn.BatchNorm2d(8), nn.Hardtanh(), conv(bias=False))
    x = torch.randn(4, 8, 12, 12)
    model: Any = converted_and_trained(block, schemes.xnorpp(), x, skip=())
    with torch.no_grad():
        model[0].weight_quantizer.gamma[::2].neg_()
    frozen = freeze(model)
    assert verify(model, frozen, x).equal
    torch.testing.assert_close(frozen(x), model(x), rtol=1e-4, atol=1e-4)


class OfMeans(nn.MaxPool2d):
    def forward(self, input: Tensor) -> Any:
        return F.max_pool2d(input, 2) + F.avg_pool2d(input, 2)


class PadsZeros(nn.MaxPool2d):
    def forward(self, input: Tensor) -> Any:
        return super().forward(F.pad(input, (1, 1, 1, 1)))


@pytest.mark.parametrize("pool", [OfMeans, PadsZeros])
def test_a_pooling_of_ones_own_is_no_maximum(pool: type[nn.MaxPool2d]) -> None:
    norm = nn.BatchNorm2d(8)
    nn.init.normal_(norm.bias)
    block = nn.Sequential(conv(bias=False), norm, nn.Hardtanh(), pool(2), conv(bias=False))
    x = torch.randn(4, 8, 12, 12)
    model = converted_and_trained(block, schemes.bnn(), x, skip=())
    frozen = build(model, x)
    torch.testing.assert_close(frozen(x), model(x), rtol=1e-4, atol=1e-4)


def test_a_softplus_that_falls_is_not_folded() -> None:
    parts = [conv(), nn.BatchNorm2d(8), nn.Softplus(threshold=-1), nn.BatchNorm2d(8), conv()]
    x = torch.randn(4, 8, 6, 6)
    model = converted_and_trained(nn.Sequential(*parts), schemes.bnn(), x, skip=())
    torch.testing.assert_close(build(model, x)(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d])
def test_sums_of_floats_are_0_where_codes_cancel_out(kind: type[nn.Conv3d]) -> None:
    """A layer of signs follows, and takes the sign of any residue."""
    ndim = int(kind.__name__[-2])
    conv: Any = getattr(nn, f"Conv{ndim}d")
    layer, x = kind(8, 8, 3, stride=2, bias=False), torch.randn(64, 3, *[9] * ndim)
    model = nn.Sequential(conv(3, 8, 3), layer, conv(8, 8, 3))
    qconv.convert(model, schemes.lsq(4, 4), skip=("first",), overrides={"2": BNN}, check=False)
    qconv.calibrate(model, [x])
    torch.testing.assert_close(build(model.eval(), x)(x), model(x), rtol=0, atol=1e-4)
    assert (layer(model[0](x)) == 0).any()


def test_inputs_of_few_bits_with_float_weights() -> None:
    """As in the first run of a network in two stages, whose weights come last."""
    x = torch.randn(4, 8, 6, 6)
    block = nn.Sequential(conv(), nn.BatchNorm2d(8), nn.Hardtanh(), conv())
    model = converted_and_trained(block, schemes.two_stage(schemes.bnn(), start=1), x, skip=())
    frozen = build(model, x)
    assert [(told.arithmetic, "no integer codes" in told.reason) for told in frozen.layers] == [("float", True)] * 2
    assert verify(model, frozen, x).equal


@pytest.mark.parametrize("option", [{"padding_value": 1}, {"scale_map": True}], ids=lambda option: next(iter(option)))
def test_options_of_signs_in_a_stage_without_signs(option: dict[str, Any], tmp_path: Path) -> None:
    """They apply only as long as the input is signs, in what ships, too."""
    stages = partial(Stages, [(0, Sign), (0.5, partial(DoReFaInput, 4))])
    scheme = Scheme(name="mixed", input=stages, weight=partial(DoReFaWeight, 4), **option)
    x = torch.rand(4, 8, 6, 6)
    model = qconv.convert(nn.Sequential(conv(), nn.BatchNorm2d(8), conv()), scheme, skip=())
    model(x)
    qconv.set_progress(model, 1.0)
    model.eval()
    frozen = build(model, x)
    torch.testing.assert_close(frozen(x), model(x), rtol=1e-4, atol=1e-4)
    assert verify(model, frozen, x).equal
    qconv.save_packed(model, tmp_path / "model.safetensors")
    loaded = qconv.load_packed(tmp_path / "model.safetensors", nn.Sequential(conv(), nn.BatchNorm2d(8), conv()))
    assert torch.equal(loaded(x), model(x))
