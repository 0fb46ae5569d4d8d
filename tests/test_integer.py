"""The convolution of signs in integers equals the float one, bit for bit, and runs where it is meant to."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import qconv
from qconv import schemes
from qconv.function import sums
from qconv.kernels import onednn
from qconv.kernels.onednn import conv2d_codes
from qconv.kernels.window import Window
from qconv.quantizers import TWN, Sign

pytestmark = pytest.mark.skipif(not hasattr(torch.ops.onednn, "qconv_pointwise"), reason="torch without oneDNN")


def signs(*shape: int) -> Tensor:
    return torch.randint(2, shape, dtype=torch.int8) * 2 - 1


def codes(signs: Tensor) -> Tensor:
    """0 and 2 for -1 and +1; the code of 0 is 1."""
    return (signs + 1).view(torch.uint8)


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (5, 2)], ids=str)
@pytest.mark.parametrize(("stride", "dilation"), [((1, 1), (1, 1)), ((2, 1), (1, 2)), ((3, 2), (2, 1))], ids=str)
@pytest.mark.parametrize(("padding", "border", "value"), [((0, 0), (), 0), ((2, 1), (), 0), ((0, 0), (1, 0, 2, 3), -1)])
def test_equals_the_float_convolution(
    format: Any, groups: int, kernel: Any, stride: Any, dilation: Any, padding: Any, border: Any, value: int
) -> None:
    input, weight = signs(2, 6, 11, 9).to(memory_format=format), signs(12, 6 // groups, *kernel)
    sides = border or (padding[1], padding[1], padding[0], padding[0])
    found = conv2d_codes(codes(input), 1, weight, Window(stride, sides, dilation, groups, value))
    padded = F.pad(input.float(), border, value=value) if border else input.float()
    expected = F.conv2d(padded, weight.float(), None, stride, padding, dilation, groups)
    assert found.dtype == torch.float32
    assert found.equal(expected)
    assert found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("groups", "kernel", "stride", "padding", "dilation", "size"),
    [
        (4, (2, 1), (1, 3), (1, 1), (3, 3), (6, 1)),
        (1, (2, 2), (2, 2), (3, 1), (1, 3), (5, 4)),
        (1, (2, 2), (1, 1), (1, 1), (2, 2), (6, 1)),
        (2, (1, 1), (1, 1), (2, 2), (1, 1), (4, 4)),
    ],
)
def test_kernels_that_can_lie_in_the_padding(
    groups: int, kernel: Any, stride: Any, padding: Any, dilation: Any, size: Any
) -> None:
    input, weight = signs(4, 32 * groups, *size), signs(20 * groups, 32, *kernel)
    sides = padding[1], padding[1], padding[0], padding[0]
    found = conv2d_codes(codes(input), 1, weight, Window(stride, sides, dilation, groups))
    assert found.equal(F.conv2d(input.float(), weight.float(), None, stride, padding, dilation, groups))


def layer_and_input(**options: Any) -> tuple[qconv.QConv2d, Tensor]:
    options = {"bias": False, "scheme": schemes.bnn(), **options}
    layer = qconv.QConv2d(64, 64, 3, padding=1, **options)
    input = torch.randn(16, 64, 16, 16, dtype=layer.weight.dtype)
    input[0, :, 0] = torch.tensor([-0.0] * 8 + [0.0] * 8)
    return layer, input


def in_integers(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The outputs that come from the integer convolution; whether this machine is fast at it plays no part."""
    outputs = []

    def recorded(*args: Any) -> Tensor:
        outputs.append(conv2d_codes(*args))
        return outputs[-1]

    for module in (onednn, sums):
        monkeypatch.setattr(module, "has_fast_integers", lambda: True)
    monkeypatch.setattr(sums, "conv2d_codes", recorded)
    return outputs


SIGNS = [
    *(schemes.bnn(), schemes.xnor(), schemes.xnorpp(), schemes.bireal(), schemes.reactnet(), schemes.irnet()),
    *(schemes.recu(), schemes.reste()),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scheme", SIGNS, ids=str)
def test_sums_of_signs_are_exact_before_they_are_scaled(
    monkeypatch: pytest.MonkeyPatch, scheme: qconv.Scheme, dtype: torch.dtype
) -> None:
    check_on_integers(monkeypatch, torch.contiguous_format, dtype=dtype, scheme=scheme)


@pytest.mark.parametrize("scheme", SIGNS, ids=str)
def test_a_bias_comes_after_the_scale(monkeypatch: pytest.MonkeyPatch, scheme: qconv.Scheme) -> None:
    check_on_integers(monkeypatch, torch.contiguous_format, bias=True, scheme=scheme)


CODES = [
    *(schemes.lsq(4, 4), schemes.lsq(4, 4, per_channel=True), schemes.lsq(3, 4, signed_input=True), schemes.lsq(2, 8)),
    *(schemes.pact(4, 4), schemes.dorefa(4, 4), schemes.sawb(2, 4), schemes.lsq(1, 2), schemes.lsq(4, 1)),
    qconv.Scheme("signs and ternary weights", Sign, TWN),
]


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("scheme", CODES, ids=str)
def test_sums_of_codes_are_those_of_floats(monkeypatch: pytest.MonkeyPatch, scheme: qconv.Scheme, format: Any) -> None:
    check_on_integers(monkeypatch, format, scheme=scheme, bias=True)


@pytest.mark.parametrize("place", ["input", "weight"])
def test_codes_of_nan_run_on_floats(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    layer, input = layer_and_input(scheme=schemes.lsq(4, 4))
    qconv.calibrate(layer, [input])
    outputs = in_integers(monkeypatch)
    with torch.no_grad():
        (input if place == "input" else layer.weight)[0, 0, 0, 0] = torch.nan
    output = layer(input)
    assert outputs == []
    assert output.isnan().any()
    assert not output.isnan().all()


def test_sums_that_floats_round_run_in_integers_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, input = layer_and_input(scheme=schemes.lsq(8, 8))
    output = layer(input.relu_())
    outputs = in_integers(monkeypatch)
    assert layer(input).equal(output)
    assert qconv.lean(layer, exact=True)(input).equal(output)
    assert outputs == []
    found = qconv.lean(layer, exact=False)(input)
    assert len(outputs) == 1
    exact = F.conv2d(
        *(
            quantizer(x.double())
            for quantizer, x in ((layer.input_quantizer, input), (layer.weight_quantizer, layer.weight))
        ),
        padding=1,
    )
    errors = [(each.double() - exact).abs().max() for each in (found, output)]
    assert errors[0] <= errors[1] * 1.01
    assert errors[0] < 1e-5 * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("padding_value", [0, 1, -1])
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_layer_runs_on_integers(
    monkeypatch: pytest.MonkeyPatch, padding_value: int, format: Any, dtype: torch.dtype
) -> None:
    check_on_integers(monkeypatch, format, padding_value=padding_value, dtype=dtype)


def check_on_integers(monkeypatch: pytest.MonkeyPatch, format: Any, **options: Any) -> None:
    """Output and gradients are those of the float convolution, bit for bit."""
    layer, input = layer_and_input(**options)
    layer, input = layer.to(memory_format=format), input.to(memory_format=format).requires_grad_()
    leaves = [input, layer.weight]
    monkeypatch.setattr(onednn, "has_fast_integers", lambda: False)
    expected = layer(input)
    grad_output = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, leaves, grad_output)
    outputs = in_integers(monkeypatch)
    found = layer(input)
    assert len(outputs) == 1
    assert found.equal(expected)
    assert found.stride() == expected.stride()
    assert all(map(torch.equal, torch.autograd.grad(found, leaves, grad_output), gradients))


@pytest.mark.parametrize(
    "options",
    [
        {"bias": True, "dtype": torch.bfloat16},  # added to the sums before they are rounded
        {"dtype": torch.float64},
        {"dtype": torch.float16},
        {"groups": 4},  # too few terms in a sum
        {"stride": 4},  # too few outputs
        {"scheme": schemes.bwn()},
        {"scheme": schemes.adabin()},
    ],
    ids=str,
)
def test_other_layers_run_on_floats(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    layer, input = layer_and_input(**options)
    outputs = in_integers(monkeypatch)
    layer(input)
    assert outputs == []


def test_compiled_and_empty_run_on_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, input = layer_and_input()
    outputs = in_integers(monkeypatch)
    assert layer(input[:0]).shape == (0, 64, 16, 16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(input)
    assert outputs == []
    assert layer(input).equal(compiled)
    assert len(outputs) == 1


@pytest.mark.parametrize("name", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
@pytest.mark.parametrize(("value", "usable"), [("AVX512_CORE", False), ("avx2_vnni", False), ("ALL", True), ("", True)])
def test_an_environment_without_vnni(name: str, value: str, usable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """oneDNN's sums of two products would saturate."""
    for other in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_vnni": True})
    onednn.has_fast_integers.cache_clear()
    try:
        assert onednn.has_fast_integers() == usable
    finally:
        onednn.has_fast_integers.cache_clear()
