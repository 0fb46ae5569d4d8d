"""Quantized deformable layers against torchvision's, against autograd of the formula, and in a model."""

import copy
import importlib
import io
import pickle
import sys
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torchvision.ops import DeformConv2d, deform_conv2d

import qconv
from qconv import Scheme, schemes
from qconv.layers import DeformConv2dPack, QDeformConv2d, QDeformConv2dPack


class Case(NamedTuple):
    """A layer's arguments, and what it is given."""

    arguments: dict[str, Any]
    offset_groups: int = 1
    masked: bool = True
    size: tuple[int, int] = (6, 5)
    batch: int = 2

    def pair(self, scheme: Scheme | None, dtype: torch.dtype = torch.float32) -> tuple[DeformConv2d, QDeformConv2d]:
        theirs = DeformConv2d(4, 6, **self.arguments).to(dtype)
        ours = QDeformConv2d(4, 6, **self.arguments, dtype=dtype, scheme=scheme)
        ours.load_state_dict(theirs.state_dict())
        return theirs, ours

    def tensors(self, layer: DeformConv2d, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Input, offset and, if there is one, mask; no sampling point is near a whole number."""
        geometry: Any = layer.kernel_size, layer.stride, layer.padding, layer.dilation
        spans = zip(self.size, *geometry, strict=True)
        output = [(x + 2 * p - d * (k - 1) - 1) // s + 1 for x, k, s, p, d in spans]
        taps = layer.weight.shape[2] * layer.weight.shape[3] * self.offset_groups
        offset = torch.randint(-2, 2, (self.batch, 2 * taps, *output)) + torch.empty(1).uniform_(0.1, 0.9)
        drawn = [torch.randn(self.batch, 4, *self.size), offset, torch.rand(self.batch, taps, *output)]
        return [tensor.to(dtype).requires_grad_() for tensor in drawn[: 3 if self.masked else 2]]


CASES = {
    "v1": Case(dict(kernel_size=3, padding=1), masked=False),
    "v2": Case(dict(kernel_size=3, padding=1)),
    "no bias": Case(dict(kernel_size=3, bias=False)),
    "groups and offset groups": Case(dict(kernel_size=(3, 2), groups=2), 4),
    "offset groups alone": Case(dict(kernel_size=1), 2, masked=False),
    "strided, dilated, rectangular": Case(
        dict(kernel_size=(2, 3), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2), 2, size=(7, 9)
    ),
    "one sample": Case(dict(kernel_size=3), batch=1),
    "more than a block of samples": Case(dict(kernel_size=2, groups=2), batch=33, size=(3, 3)),
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
QUANTIZED = {
    s.name: s
    for s in (
        schemes.identity(),
        schemes.bnn(),
        schemes.bwn(),
        schemes.xnor(),
        schemes.xnor(detach_scale=True),
        schemes.shift_q(),
        schemes.shift_q(weight_bits=3, fixed_point=(4, 6)),
        schemes.shift_ps(),
    )
}
EVERY_SCHEME = pytest.mark.parametrize("scheme", QUANTIZED.values(), ids=list(QUANTIZED))


def gradients(output: Tensor, leaves: list[Tensor]) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    grad_output = torch.randn(output.shape, generator=generator, dtype=output.dtype)
    return list(torch.autograd.grad(output, leaves, grad_output, allow_unused=True))


def trained(layer: nn.Module) -> list[Tensor]:
    return [parameter for parameter in layer.parameters() if parameter.requires_grad]


def check_equal(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@EVERY_CASE
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_identity_is_torchvisions_layer(case: Case, dtype: torch.dtype) -> None:
    theirs, ours = case.pair(schemes.identity(), dtype)
    tensors = case.tensors(theirs, dtype)
    expected, output = theirs(*tensors), ours(*tensors)
    assert output.equal(expected)
    check_equal(gradients(output, [*tensors, *trained(ours)]), gradients(expected, [*tensors, *trained(theirs)]))


def composed(layer: QDeformConv2d, input: Tensor, offset: Tensor, mask: Tensor | None = None) -> Tensor:
    """The layer left to autograd, its quantizers as nodes of their own."""
    weight_q = layer.weight_quantizer(layer.weight)
    return deform_conv2d(
        layer.input_quantizer(input), offset, weight_q, layer.bias, layer.stride, layer.padding, layer.dilation, mask
    )


@EVERY_CASE
@EVERY_SCHEME
def test_fused_equals_composed_exactly(case: Case, scheme: Scheme) -> None:
    _, ours = case.pair(scheme)
    tensors = case.tensors(ours)
    leaves = [*tensors, *trained(ours)]
    output, expected = ours(*tensors), composed(ours, *tensors)
    assert output.equal(expected)
    check_equal(gradients(output, leaves), gradients(expected, leaves))


@EVERY_SCHEME
@pytest.mark.parametrize("masked", [True, False])
def test_empty_batch(scheme: Scheme, masked: bool) -> None:
    case = Case(dict(kernel_size=3), 2, masked, batch=0)
    _, ours = case.pair(scheme)
    tensors = case.tensors(ours)
    output = ours(*tensors)
    assert output.shape == (0, 6, 4, 3)
    output.sum().backward()
    assert [tensor.grad is not None and tensor.grad.shape == tensor.shape for tensor in tensors] == [True] * len(
        tensors
    )
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in trained(ours))


def test_an_offset_of_nan_makes_its_pixel_nan() -> None:
    layer, input, offset = QDeformConv2d(4, 6, 3, padding=1), torch.randn(2, 4, 6, 6), torch.randn(2, 18, 6, 6)
    offset[1, 5, 2, 3] = 0
    wanted = layer(input, offset)
    offset[1, 5, 2, 3] = torch.nan
    wanted[1, :, 2, 3] = torch.nan
    output = layer(input, offset.requires_grad_())
    torch.testing.assert_close(output, wanted, rtol=0, atol=0, equal_nan=True)
    output.sum().backward()
    assert offset.grad is not None
    assert offset.grad.isnan().nonzero().tolist() == [[1, k, 2, 3] for k in range(18)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("input_dtype", [torch.float32, "low"], ids=str)
def test_autocast_runs_in_float32(dtype: torch.dtype, input_dtype: Any) -> None:
    case = CASES["v2"]
    _, ours = case.pair(schemes.xnor())
    low = dtype if input_dtype == "low" else torch.float32
    input, offset, mask = case.tensors(ours)
    tensors = [input.detach().to(low).requires_grad_(), offset.detach().to(dtype).requires_grad_(), mask]
    with torch.autocast("cpu", dtype):
        output = ours(*tensors)
    found = gradients(output, [*tensors, *trained(ours)])
    wide = [tensor.detach().float().requires_grad_() for tensor in tensors]
    expected = ours(*wide)
    assert output.equal(expected.to(low))
    of_wide = zip(gradients(expected.to(low), [*wide, *trained(ours)]), [*tensors, *trained(ours)], strict=True)
    check_equal(found, [None if grad is None else grad.to(tensor.dtype) for grad, tensor in of_wide])


def test_autocast_leaves_float64_alone() -> None:
    case = CASES["v2"]
    _, ours = case.pair(schemes.bnn(), torch.float64)
    tensors = case.tensors(ours, torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert ours(*tensors).equal(ours.double()(*tensors))
        with pytest.raises(TypeError, match=r"offset has dtype torch.float32 and weight torch.float64"):
            ours(tensors[0], tensors[1].float())


@pytest.mark.nightly
@EVERY_SCHEME
def test_compile(scheme: Scheme) -> None:
    case = CASES["groups and offset groups"]
    _, ours = case.pair(scheme, torch.float64)
    tensors = case.tensors(ours, torch.float64)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    output, expected = compiled(*tensors), ours(*tensors)
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    leaves = [*tensors, *trained(ours)]
    torch.testing.assert_close(gradients(output, leaves), gradients(expected, leaves), rtol=1e-12, atol=1e-12)


def test_compile_under_autocast_and_without_gradients() -> None:
    layer, input = QDeformConv2dPack(4, 6, 3, padding=1), torch.randn(2, 4, 6, 5)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(input), layer(input))
    with torch.no_grad():
        torch.testing.assert_close(compiled(input), layer(input))


# --- the layers that make their own offsets


@pytest.mark.parametrize("kind", [DeformConv2dPack, QDeformConv2dPack])
@pytest.mark.parametrize("modulated", [True, False])
def test_a_pack_starts_as_a_convolution(kind: Any, modulated: bool) -> None:
    geometry: dict[str, Any] = dict(stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2)
    options: dict[str, Any] = dict(scheme=schemes.identity()) if kind is QDeformConv2dPack else {}
    pack = kind(4, 6, (3, 2), **geometry, modulated=modulated, offset_groups=2, dtype=torch.float64, **options)
    input = torch.randn(2, 4, 7, 6, dtype=torch.float64)
    factor = 0.5 if modulated else 1.0
    expected = nn.functional.conv2d(input, pack.weight * factor, pack.bias, **geometry)
    torch.testing.assert_close(pack(input), expected, rtol=1e-12, atol=1e-12)
    assert pack.conv_offset.out_channels == (36 if modulated else 24)


@pytest.mark.parametrize("modulated", [True, False])
def test_a_packs_offsets_and_masks(modulated: bool) -> None:
    float_pack = DeformConv2dPack(4, 6, 3, padding=1, modulated=modulated, offset_groups=2)
    with torch.no_grad():
        float_pack.conv_offset.weight.uniform_(-0.3, 0.3)
    pack = QDeformConv2dPack(4, 6, 3, padding=1, modulated=modulated, offset_groups=2, scheme=schemes.identity())
    pack.load_state_dict(float_pack.state_dict())
    input = torch.randn(2, 4, 5, 6, requires_grad=True)
    predicted = pack.conv_offset(input)
    mask = predicted[:, 36:].sigmoid() if modulated else None
    expected = deform_conv2d(input, predicted[:, :36], pack.weight, pack.bias, padding=(1, 1), mask=mask)
    leaves = [input, *pack.parameters()]
    grads = gradients(expected, leaves)
    assert all(grad is not None and grad.any() for grad in grads)
    for kind in (pack, float_pack):
        output = kind(input)
        assert output.equal(expected)
        check_equal(gradients(output, [input, *kind.parameters()]), grads)


@pytest.mark.parametrize("kind", [DeformConv2dPack, QDeformConv2dPack])
@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16], ids=str)
def test_packs_under_autocast_have_positions_in_float32(kind: Any, low: torch.dtype) -> None:
    pack, input = kind(4, 6, 3), torch.randn(2, 4, 6, 5).to(low)
    nn.init.normal_(pack.conv_offset.weight)
    with torch.autocast("cpu", torch.bfloat16):
        output, found = pack(input), pack.offset_and_mask(input)
    output.float().sum().backward()
    assert output.dtype == low
    assert all(parameter.grad is not None for parameter in pack.parameters())
    assert all(map(torch.equal, found, pack.offset_and_mask(input.float())))


# --- in a model


def model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), DeformConv2dPack(4, 4, 3, modulated=False), DeformConv2dPack(4, 6, 3, offset_groups=2)
    )


def test_plan_and_convert(capsys: pytest.CaptureFixture[str]) -> None:
    network = model()
    qconv.plan(network, schemes.bnn())
    assert capsys.readouterr().out.splitlines() == [
        "0              Conv2d stays: the first layer",
        "1              DeformConv2dPack → QDeformConv2dPack bnn()",
        "1.conv_offset  OffsetConv2d stays: a subclass of Conv2d, see subclasses={OffsetConv2d: qconv.QConv2d}",
        "2              DeformConv2dPack stays: the last layer",
        "2.conv_offset  OffsetConv2d stays: a subclass of Conv2d, see subclasses={OffsetConv2d: qconv.QConv2d}",
    ]
    qconv.convert(network, schemes.bnn(), skip=("first",))
    assert [type(layer) for layer in network] == [nn.Conv2d, QDeformConv2dPack, QDeformConv2dPack]
    assert type(network[1].conv_offset) is type(network[2].conv_offset) is not nn.Conv2d
    assert network(torch.randn(2, 3, 9, 9)).shape == (2, 6, 3, 3)


@EVERY_SCHEME
def test_to_float_undoes_convert(scheme: Scheme) -> None:
    network, input = model(), torch.randn(2, 3, 9, 9)
    expected, keys = network(input), network.state_dict().keys()
    qconv.to_float(qconv.convert(network, scheme, skip=("first",)))
    assert [type(layer) for layer in network] == [nn.Conv2d, DeformConv2dPack, DeformConv2dPack]
    assert network.state_dict().keys() == keys
    if not scheme.name.startswith("shift_ps"):
        assert network(input).equal(expected)


@EVERY_SCHEME
def test_the_plain_layer_there_and_back(scheme: Scheme) -> None:
    holder = nn.ModuleList([DeformConv2d(4, 6, 3, groups=2)])
    tensors = CASES["groups and offset groups"].tensors(holder[0])  # pyright: ignore[reportArgumentType]
    expected = holder[0](*tensors)
    qconv.convert(holder, scheme, skip=())
    assert type(holder[0]) is QDeformConv2d
    assert holder[0](*tensors).shape == expected.shape
    qconv.to_float(holder)
    assert type(holder[0]) is DeformConv2d
    if not scheme.name.startswith("shift_ps"):
        assert holder[0](*tensors).equal(expected)


class Special(DeformConv2d):
    """A subclass, whose forward may be anything."""


def test_what_a_plan_says_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    network = nn.ModuleList([Special(4, 4, 3), QDeformConv2d(4, 4, 3), DeformConv2d(4, 4, 3)])
    qconv.plan(network, schemes.bnn(), skip=())
    assert capsys.readouterr().out.splitlines() == [
        "0  Special stays: a subclass of DeformConv2d, see subclasses={Special: qconv.QDeformConv2d}",
        "1  QDeformConv2d stays: quantized already, bwn()",
        "2  DeformConv2d → QDeformConv2d bnn()",
    ]
    with pytest.raises(
        ValueError, match=r"layer '2' \(DeformConv2d\): scale_map \(=True\) is defined for convolutions"
    ):
        qconv.convert(network, schemes.xnor(scale_map=True), skip=())
    assert type(network[2]) is DeformConv2d


@pytest.mark.parametrize("kind", [DeformConv2dPack, QDeformConv2dPack, QDeformConv2d])
def test_pickle_deepcopy_and_save(kind: Any) -> None:
    layer = kind(4, 6, 3)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    tensors = CASES["no bias"].tensors(layer)[: 1 if isinstance(layer, DeformConv2dPack) else 3]
    for copied in (pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer), torch.load(file, weights_only=False)):
        assert type(copied) is kind
        assert copied(*tensors).equal(layer(*tensors))


def test_construction() -> None:
    layer = QDeformConv2d(4, 6, (3, 2), 2, (0, 1), (1, 2), groups=2, bias=False, dtype=torch.float64)
    assert repr(layer) == (
        "QDeformConv2d(4, 6, kernel_size=(3, 2), stride=(2, 2), padding=(0, 1), dilation=(1, 2), groups=2, bias=False,"
        " scheme=bwn())"
    )
    assert layer.weight.dtype == torch.float64
    assert isinstance(layer, DeformConv2d)
    for kind in (QDeformConv2d, QDeformConv2dPack, DeformConv2dPack):
        meta = kind(4, 6, 3, device="meta", dtype=torch.bfloat16)
        assert {(p.device.type, p.dtype) for p in meta.parameters()} == {("meta", torch.bfloat16)}
    torch.manual_seed(0)
    theirs = DeformConv2d(4, 6, 3)
    torch.manual_seed(0)
    assert QDeformConv2d(4, 6, 3).weight.equal(theirs.weight)
    layer = QDeformConv2d(4, 6, 3, scheme=schemes.shift_ps())
    layer.reset_parameters()
    torch.testing.assert_close(layer.quantized_weight().sign(), layer.weight.sign())


BAD_LAYERS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    # constructor arguments, and the message
    "groups": (dict(groups=4), ValueError, r"groups \(=4\) must divide out_channels \(=6\)"),
    "no groups": (dict(groups=0), ValueError, r"groups \(=0\) must be positive"),
    "kernel_size": (dict(kernel_size=0), ValueError, r"kernel_size \(=0\) must be at least 1"),
    "three strides": (dict(stride=(1, 1, 1)), ValueError, r"stride \(=\(1, 1, 1\)\) must be an int or 2 ints"),
    "padding": (dict(padding=-1), ValueError, r"padding \(=-1\) must be at least 0"),
    "dilation": (dict(dilation=0), ValueError, r"dilation \(=0\) must be at least 1"),
    "padding_value": (dict(padding_value=1), ValueError, r"padding_value \(=1\) must be 0: it is what"),
    "padding of the scheme": (dict(scheme=schemes.bnn(-1)), ValueError, r"padding_value \(=-1\) must be 0: it is what"),
    "scale map": (dict(scheme=schemes.xnor(True)), ValueError, r"scale_map \(=True\) is defined for convolutions"),
    "scheme": (dict(scheme="bnn"), TypeError, r"scheme \(='bnn'\) must be a qconv.Scheme"),
}


@pytest.mark.parametrize("kind", [QDeformConv2d, QDeformConv2dPack])
@pytest.mark.parametrize(("arguments", "error", "message"), BAD_LAYERS.values(), ids=list(BAD_LAYERS))
def test_bad_layers(kind: Any, arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kind(4, 6, **{"kernel_size": 3, **arguments})


@pytest.mark.parametrize("offset_groups", [0, 3])
def test_bad_offset_groups(offset_groups: int) -> None:
    with pytest.raises(ValueError, match=rf"offset_groups \(={offset_groups}\) must divide in_channels \(=4\)"):
        QDeformConv2dPack(4, 6, 3, offset_groups=offset_groups)


BAD_TENSORS: dict[str, tuple[dict[str, Tensor], type[Exception], str]] = {
    "unbatched": (dict(input=torch.ones(4, 6, 5)), ValueError, r"input has shape \(4, 6, 5\); it must have 4 dim"),
    "channels": (dict(input=torch.ones(2, 3, 6, 5)), ValueError, r"its dimension 1 must be in_channels \(=4\)"),
    "offset": (dict(offset=torch.ones(2, 9, 4, 3)), ValueError, r"offset's size \(=\(2, 9, 4, 3\)\) must have 2·9·D"),
    "dtype of input": (dict(input=torch.ones(2, 4, 6, 5).double()), TypeError, "input has dtype torch.float64 and wei"),
    "dtype of offset": (dict(offset=torch.ones(2, 18, 4, 3).half()), TypeError, "offset has dtype torch.float16 and"),
    "integer mask": (dict(mask=torch.ones(2, 9, 4, 3).bool()), TypeError, "mask has dtype torch.bool; it must be a fl"),
    "device": (dict(mask=torch.ones(2, 9, 4, 3, device="meta")), ValueError, "mask is on meta and weight on cpu"),
}


@pytest.mark.parametrize(("wrong", "error", "message"), BAD_TENSORS.values(), ids=list(BAD_TENSORS))
def test_bad_tensors(wrong: dict[str, Tensor], error: type[Exception], message: str) -> None:
    right = dict(input=torch.ones(2, 4, 6, 5), offset=torch.ones(2, 18, 4, 3), mask=torch.ones(2, 9, 4, 3))
    with pytest.raises(error, match=message):
        QDeformConv2d(4, 6, 3)(**{**right, **wrong})


@pytest.mark.parametrize("kind", [DeformConv2dPack, QDeformConv2dPack])
def test_bad_input_of_a_pack(kind: Any) -> None:
    with pytest.raises(ValueError, match="must have 4 dimensions"):
        kind(4, 6, 3)(torch.ones(4, 6, 5))
    with pytest.raises(ValueError, match="must be in_channels"):
        kind(4, 6, 3)(torch.ones(2, 3, 6, 5))


def test_without_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "qconv.layers.deform")
    monkeypatch.setitem(sys.modules, "torchvision.ops", None)
    with pytest.raises(ImportError, match=r'needs torchvision: pip install "qconv\[train\]"'):
        importlib.import_module("qconv.layers.deform")
    monkeypatch.delitem(sys.modules, "torchvision.ops")
    assert not any("Deform" in str(step.kind) for step in qconv.plan(nn.Conv2d(3, 4, 3), schemes.bnn(), skip=()).steps)


def test_names_are_looked_up_late() -> None:
    with pytest.raises(AttributeError, match=r"module 'qconv.layers' has no attribute 'QDeformConv4d'"):
        qconv.layers.QDeformConv4d  # noqa: B018
