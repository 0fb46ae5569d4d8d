"""Subclasses of convolutions that `convert` knows, those that a caller adds, and what it says where most stay."""

import copy
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from settings import mostly_nightly
from timm.layers.conv2d_same import Conv2dSame
from timm.layers.linear import Linear
from timm.layers.std_conv import ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d, StdConv2dSame
from torch import Tensor, nn

import qconv
from qconv import layers, schemes
from qconv.inference.build import build as build_frozen
from qconv.layers import ComputedFilters, QConv2d

LAYERS: dict[str, Any] = {
    "Conv2dSame": lambda **kw: Conv2dSame(4, 6, (3, 2), stride=(2, 1), dilation=(1, 3), groups=2, **kw),
    "Conv2dSame/3": lambda **kw: Conv2dSame(4, 6, 2, stride=3, **kw),
    "StdConv2d": lambda **kw: StdConv2d(4, 6, 3, stride=2, groups=2, bias=True, eps=1e-3, **kw),
    "StdConv2dSame": lambda **kw: StdConv2dSame(4, 6, 3, stride=2, **kw),
    "StdConv2dSame/1": lambda **kw: StdConv2dSame(4, 6, 3, padding="same", **kw),
    "ScaledStdConv2d": lambda **kw: ScaledStdConv2d(4, 6, 3, gamma=1.7, gain_init=0.8, **kw),
    "ScaledStdConv2dSame": lambda **kw: ScaledStdConv2dSame(4, 6, 3, stride=2, gamma=1.7, **kw),
}
builders = pytest.mark.parametrize("build", LAYERS.values(), ids=LAYERS.keys())


def expected_filters(layer: Any) -> Any:
    """The standardized weight, filter by filter, from its formula."""
    if type(layer) is Conv2dSame:
        return layer.weight
    rows = []
    for number, row in enumerate(layer.weight):
        centred = row - row.sum() / row.numel()
        row = centred / ((centred * centred).sum() / row.numel() + layer.eps).sqrt()
        rows.append(row * layer.gain[number] * layer.scale if hasattr(layer, "gain") else row)
    return torch.stack(rows)


def expected_output(layer: Any, input: Tensor, input_quantizer: nn.Module, weight_quantizer: nn.Module) -> Tensor:
    """What the layer computes, from the stand-alone quantizers and a sum over the taps of the kernel."""
    weight, input = weight_quantizer(expected_filters(layer)), input_quantizer(input)
    sides = []
    for size, kernel, stride, dilation, own in zip(
        input.shape[2:], layer.kernel_size, layer.stride, layer.dilation, layer.padding, strict=True
    ):
        reach = dilation * (kernel - 1) + 1
        total = max((math.ceil(size / stride) - 1) * stride + reach - size, 0)
        is_same = "Same" in type(layer).__name__ and getattr(layer, "same_pad", True)
        sides = [*((total // 2, total - total // 2) if is_same else (own, own)), *sides]
    patches = F.unfold(F.pad(input, sides), layer.kernel_size, layer.dilation, 0, layer.stride)
    groups = patches.view(len(input), layer.groups, -1, patches.shape[-1])
    rows = weight.reshape(layer.groups, len(weight) // layer.groups, -1)
    output = torch.einsum("ngkp,gok->ngop", groups, rows).reshape(len(input), len(weight), -1)
    height = (
        input.shape[2] + sides[2] + sides[3] - layer.dilation[0] * (layer.kernel_size[0] - 1) - 1
    ) // layer.stride[0]
    return output.view(*output.shape[:2], height + 1, -1) + (0 if layer.bias is None else layer.bias.view(-1, 1, 1))


@builders
@pytest.mark.parametrize("scheme", [schemes.identity(), schemes.xnor(), schemes.dorefa(3, 3)], ids=str)
def test_forward_and_gradients_are_those_of_the_formula(build: Any, scheme: qconv.Scheme) -> None:
    layer = build(dtype=torch.float64)
    twin = copy.deepcopy(layer)
    layer = qconv.convert(nn.Sequential(layer), scheme, skip=())[0]
    assert isinstance(layer, qconv.QuantizedLayer)
    assert isinstance(layer, type(twin))
    for size in ((9, 8), (6, 7)):
        input = torch.randn(2, 4, *size, dtype=torch.float64, requires_grad=True)
        output = layer(input)
        expected = expected_output(twin, input, scheme.input(), scheme.weight())
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
        weights = torch.randn_like(output)
        own = torch.autograd.grad((output * weights).sum(), [input, *layer.parameters()])
        its = torch.autograd.grad((expected * weights).sum(), [input, *twin.parameters()])
        torch.testing.assert_close(own, its, rtol=1e-10, atol=1e-10)
        if scheme.name == "identity()":
            torch.testing.assert_close(output, twin(input), rtol=1e-12, atol=1e-12)


@builders
def test_to_float_gives_the_class_back(build: Any) -> None:
    model = nn.Sequential(build(), nn.ReLU())
    input = torch.randn(2, 4, 9, 9)
    expected, kind = model(input), type(model[0])
    qconv.convert(model, schemes.bnn(padding_value=1), skip=(), before_sign="keep")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    handle = qconv.after_every_step(optimizer, model)
    assert not model(input).equal(expected)
    optimizer.step()
    handle.remove()
    qconv.to_float(model)
    assert type(model[0]) is kind
    assert model(input).equal(expected)


SIGNED = schemes.lsq(4, 4, signed_input=True)
ON_INTEGERS = schemes.bnn(padding_value=1), SIGNED, schemes.shift_q(5, fixed_point=(16, 16))
PADDED_AND_STANDARDIZED = LAYERS["Conv2dSame"], LAYERS["ScaledStdConv2dSame"]


@pytest.mark.parametrize(
    ("build", "scheme"),
    mostly_nightly(
        product(LAYERS.values(), (*ON_INTEGERS, schemes.bnn(), schemes.bwn(), schemes.identity())),
        [*product(PADDED_AND_STANDARDIZED, (SIGNED, ON_INTEGERS[0])), (LAYERS["StdConv2d"], ON_INTEGERS[2])],
    ),
)
def test_packed_and_frozen(build: Any, scheme: qconv.Scheme, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(build(), nn.BatchNorm2d(6))
    float_model = copy.deepcopy(model)
    qconv.convert(model, scheme, skip=())
    input = torch.randn(2, 4, 9, 9)
    model(input)
    expected = model.eval()(input)
    qconv.save_packed(model, tmp_path / "model.safetensors")
    loaded: Any = qconv.load_packed(tmp_path / "model.safetensors", float_model)
    assert loaded.eval()(input).equal(expected)
    frozen = build_frozen(model, input)
    for size in ((9, 9), (8, 12), (11, 7), (12, 8), (7, 7), (8, 8)):  # padding may depend on the size
        images = torch.randn(2, 4, *size)
        torch.testing.assert_close(frozen(images), model(images), rtol=1e-4, atol=1e-5)
    assert frozen.layers[0].arithmetic != "float" or scheme not in ON_INTEGERS
    qconv.to_float(loaded)
    assert type(loaded[0]) is type(build())


def test_schemes_that_change_the_weight_itself_are_refused() -> None:
    for scheme in (schemes.shift_ps(), schemes.inq(), schemes.staged([(0, schemes.lsq()), (0.5, schemes.inq())])):
        model = nn.Sequential(nn.Conv2d(4, 4, 3), StdConv2d(4, 4, 3))
        with pytest.raises(ValueError, match=r"layer '1' \(StdConv2d\): .* changes the weight itself, and QStdConv2d"):
            qconv.convert(model, scheme, skip=())
        assert type(model[0]) is nn.Conv2d


def test_layers_of_timm_are_built_as_timm_builds_them() -> None:
    layer = layers.QScaledStdConv2d(4, 6, 3, gamma=1.7, scheme=schemes.bnn())
    assert (layer.scale, layer.padding, layer.scheme.name) == (1.7 * 36**-0.5, (1, 1), "bnn()")
    linear: Any = qconv.convert(nn.Sequential(Linear(4, 4)), schemes.bnn(), skip=())[0]
    assert type(linear) is layers.QTimmLinear
    assert linear(torch.randn(2, 4)).shape == (2, 4)


class Same(nn.Conv2d):
    """Computes what its parent computes."""


class Pads(nn.Conv2d):
    """Pads by itself."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(F.pad(input, (0, 1, 0, 1)))


class UnitConv2d(nn.Conv2d):
    """Divides its weight by its norm."""

    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.weight / self.weight.norm(), self.bias)


class Padless(nn.Conv2d):
    """Computes without its parent."""

    def forward(self, input: Tensor) -> Tensor:
        return F.conv2d(F.pad(input, (0, 1, 0, 1)), self.weight, self.bias)


class QUnitConv2d(ComputedFilters, QConv2d, UnitConv2d):
    """`UnitConv2d`, quantized."""

    float_type = UnitConv2d

    def filters(self) -> Tensor:
        return self.weight / self.weight.norm()


def test_a_callers_own_subclasses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Same(4, 4, 3), UnitConv2d(4, 4, 3))
    input = torch.randn(1, 3, 9, 9)
    expected = model(input)
    table = {Same: QConv2d, UnitConv2d: QUnitConv2d}
    qconv.plan(model, schemes.identity(), skip=(), subclasses=table)
    assert "UnitConv2d → QUnitConv2d identity()" in capsys.readouterr().out
    qconv.convert(model, schemes.identity(), skip=(), subclasses=table)
    assert [type(layer) for layer in model] == [QConv2d, QConv2d, QUnitConv2d]
    assert model(input).equal(expected)
    with pytest.raises(ValueError, match=r"layer '1' \(QConv2d, .*\): type \(=QConv2d\), made of a Same, must"):
        qconv.save_packed(model, tmp_path / "model.safetensors")
    qconv.to_float(copy.deepcopy(model))
    qconv.to_float(model)
    assert [type(layer) for layer in model] == [nn.Conv2d, Same, UnitConv2d]
    assert model(input).equal(expected)


def test_a_subclass_that_pads_by_itself_still_does(capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 1), Pads(4, 4, 2), nn.Conv2d(4, 4, 1)).eval()
    input = torch.randn(2, 3, 6, 6)
    expected = model(input)
    qconv.plan(nn.Sequential(Pads(4, 4, 2)), schemes.bwn())
    assert "Pads stays: a subclass of Conv2d, see subclasses={Pads: qconv.QConv2d}" in capsys.readouterr().out
    qconv.convert(model, schemes.minmax(8, None), subclasses={Pads: QConv2d})
    torch.testing.assert_close(model(input), expected, rtol=0.1, atol=0.02)
    assert not model(input).equal(expected)
    assert model[1](input[0, [0, 0, 0, 0]]).equal(model[1](input[:1, [0, 0, 0, 0]])[0])
    assert 0 < qconv.sensitivity(model, input).rows[0].error < 0.01
    qconv.to_float(model)
    assert type(model[1]) is Pads
    assert model(input).equal(expected)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({Same: nn.Conv2d}, r"subclasses\[.*Same.*\] \(=.*Conv2d.*\) must be a quantized layer's class"),
        ({Same: qconv.QLinear}, r"subclasses: .*Same.* must be a float subclass of Linear, as QLinear is"),
        ({qconv.BNNConv2d: QConv2d}, "must be a float subclass of Conv2d"),
        ({Padless: QConv2d}, r"Padless.forward calls neither super\(\).forward\(\) nor self._conv_forward\(\)"),
    ],
)
def test_wrong_tables(table: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        qconv.convert(nn.Sequential(Same(4, 4, 3)), schemes.bnn(), skip=(), subclasses=table)


def test_it_is_said_when_most_layers_stay() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Same(4, 4, 3), Same(4, 4, 3), UnitConv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    message = r"3 of 5 layers stay float, because subclasses may compute anything: 2 Same, 1 UnitConv2d\. If they "
    message += r"compute .* '1' is a subclass of Conv2d, see subclasses=\{Same: qconv\.QConv2d\}; see"
    with pytest.warns(UserWarning, match=message) as seen:
        qconv.convert(model, schemes.bnn(), skip=())
    assert seen[0].filename == __file__
    qconv.convert(qconv.to_float(model), schemes.bnn(), skip=(), subclasses={Same: QConv2d})


def test_an_nfnet_is_converted() -> None:
    model = timm.create_model("nfnet_f0", num_classes=4)
    steps = qconv.plan(model, schemes.bnn()).steps
    assert [step.names[0] for step in steps if step.scheme is None] == ["stem.conv1", "head.fc"]


@pytest.mark.parametrize(
    "name",
    mostly_nightly(
        ["beit_base_patch16_224", "eva02_tiny_patch14_224", "swinv2_tiny_window8_256"], ["beit_base_patch16_224"]
    ),
)
def test_attentions_of_timm_call_their_layers(name: str) -> None:
    size = {"beit_base_patch16_224": 32, "eva02_tiny_patch14_224": 28, "swinv2_tiny_window8_256": 64}[name]
    sizes: dict[str, Any] = {"embed_dim": 48, "depth": 1, "num_heads": 2}
    if "swin" in name:
        sizes = {"embed_dim": 24, "depths": (1, 1, 1, 1), "num_heads": (1, 2, 4, 8), "window_size": 2}
    model = timm.create_model(name, img_size=size, num_classes=2, **sizes).eval()
    input = torch.randn(1, 3, size, size)
    with torch.no_grad():
        expected = model(input)
        qconv.convert(model, schemes.identity())
        torch.testing.assert_close(model(input), expected)
        qkv = [layer for name, layer in model.named_modules() if name.endswith("attn.qkv")]
        assert {type(layer) for layer in qkv} == {qconv.QLinear}
        qconv.to_float(model)
        assert model(input).equal(expected)


@pytest.mark.parametrize(
    ("build", "scheme"),
    mostly_nightly(
        product(LAYERS.values(), (SIGNED, ON_INTEGERS[0], schemes.bwn())),
        [(LAYERS["Conv2dSame"], SIGNED), (LAYERS["StdConv2dSame"], ON_INTEGERS[0])],
    ),
)
def test_frozen_layers_are_verified_at_each_size(build: Any, scheme: qconv.Scheme) -> None:
    """A layer that pads by its input has another convolution for each size."""
    model = qconv.convert(
        nn.Sequential(nn.Conv2d(3, 4, 1), nn.Hardtanh(), build(), nn.BatchNorm2d(6)), scheme, skip=("0",)
    )
    model(torch.randn(4, 3, 9, 8))
    model.eval()
    frozen = qconv.freeze(model, example=torch.randn(2, 3, 9, 8))
    for size in ((9, 8), (6, 7), (8, 8)):
        verification = qconv.verify(model, frozen, torch.randn(3, 3, *size))
        assert verification.equal, verification


def test_a_forward_that_is_replaced_on_the_layer_is_not_lost() -> None:
    model = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3)))
    before: Any = model[1].forward
    model[1].forward = lambda x: 3 * before(x)
    assert "stays: its forward is replaced on the layer itself" in str(qconv.plan(model, schemes.bwn(), skip=()))
    with pytest.warns(UserWarning, match="layer '1' stays float: its forward is replaced on the layer itself"):
        qconv.convert(model, schemes.bwn(), skip=())
    assert [type(layer) for layer in model] == [qconv.QConv2d, nn.Conv2d, qconv.QConv2d]
    ours: Any = model[2].forward
    model[2].forward = lambda x: 3 * ours(x)
    with pytest.raises(
        ValueError, match=r"layer '2' \(QConv2d, bwn\(\)\): its forward is replaced on the layer itself"
    ):
        qconv.freeze(model.eval())
    with pytest.raises(ValueError, match="its forward is replaced on the layer itself, which would be lost: call del"):
        qconv.save_packed(model, "never.safetensors")


def test_what_is_learned_on_levels_says_which_layer_to_leave_float() -> None:
    """No scheme puts a weight on its levels that is standardized first."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), StdConv2d(4, 4, 3), nn.Flatten())
    model = qconv.convert(model, schemes.lsq(4, 8), skip=())
    model(torch.rand(2, 3, 5, 5))
    remedy = r"1\.weight with lsq.*: the layer quantizes .*; leave it float, with '1' in the skip of qconv\.convert"
    for learn in (
        lambda: qconv.reconstruct(model, [torch.rand(2, 3, 5, 5)]),
        lambda: qconv.optim.dampening_penalty(model),
        lambda: qconv.optim.Oscillations(freeze=0.01).attach(model, torch.optim.SGD(model.parameters(), lr=0.1)),
    ):
        with pytest.raises(TypeError, match=remedy):
            learn()
    left = qconv.convert(
        nn.Sequential(nn.Conv2d(3, 4, 3), StdConv2d(4, 4, 3), nn.Flatten()), schemes.lsq(4, 8), skip=["1"]
    )
    left(torch.rand(2, 3, 5, 5))
    qconv.optim.dampening_penalty(left)
