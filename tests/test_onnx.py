"""ONNX files: what ONNX Runtime computes of them, against the frozen and the trained model."""

import copy
import itertools
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import METHODS
from settings import mostly_nightly
from torch import Tensor, nn

import qconv
from qconv import quantizers, schemes
from qconv.inference import freeze
from qconv.inference.build import build
from qconv.inference.frozen_layers import Encode, IntegerConv2d
from qconv.kernels.window import Window
from qconv.models import resnet20
from qconv.onnx import OnnxModel, compare_onnx
from qconv.onnx.eight_bit_codes import LinearEncode, OtherEncode, Quantize, encoder
from qconv.onnx.export import TOLERANCE, in_onnx
from qconv.onnx.integer_sums import steps_of_a_sum
from qconv.onnx.layer_nodes import QuantizedConv2d, may_saturate
from qconv.onnx.requantize import whole_bias
from qconv.onnx.runtime import load
from qconv.scheme import Scheme
from tests.test_freeze import chain, trained

pytestmark = pytest.mark.usefixtures("torchlib_read_once")

SCHEMES = {
    "bnn": schemes.bnn(),
    "plus": schemes.bnn(padding_value=1),
    "minus": schemes.bnn(padding_value=-1),
    "xnor": schemes.xnor(),
    "reactnet": schemes.reactnet(),
    "lsq2": schemes.lsq(2, 2),
    "lsq4": schemes.lsq(4, 4),
    "lsq8": schemes.lsq(8, 8),
    "signed": schemes.lsq(4, 4, signed_input=True),
    "lsq16": schemes.lsq(4, 16),
    "siman": schemes.siman(),
    "dorefa": schemes.dorefa(2, 4),
    "apot": schemes.apot(),
    "lsq_plus": schemes.lsq_plus(),
    "bwn": schemes.bwn(),
    "twn": schemes.twn(),
    "shift": schemes.shift_q(),
    "shift16": schemes.shift_q(fixed_point=(16, 16)),
    "adabin": schemes.adabin(),
    "dsq": schemes.dsq(),
    "fp8": schemes.fp8(),
    "dorefa8": schemes.dorefa(8, 8),
    "pact8": schemes.pact(8, 8),
    "percentile8": schemes.percentile(8, 8),
    "minmax8": schemes.minmax(8, 8, symmetric=False),
}
FINE = ("lsq8", "dorefa8", "pact8", "percentile8", "minmax8")
"""Of 255 steps, for which there may be no line with a whole bias: some codes are off by one."""


def kinds(path: Path) -> list[str]:
    """The operators that ONNX Runtime makes of a file."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(path.with_suffix(".optimized"))
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]


def agree(model: nn.Module, path: Path, input: Tensor) -> None:
    """Equal within the rounding of floats, but for a sample in which a code fell to the other side of an edge."""
    wanted = freeze(model)(input)
    error = (OnnxModel(path)(input) - wanted).abs().flatten(1).amax(1)
    assert int((error > 1e-5 * (wanted.abs().max() + 0.1)).sum()) <= 1, error
    found = compare_onnx(model, path, input)
    assert found.close >= len(input) - 1
    assert found.samples == len(input)


@pytest.mark.parametrize("name", mostly_nightly(SCHEMES, ("bnn", "lsq4", "bwn", "minmax8", "fp8")))
def test_every_kind_of_scheme(name: str, tmp_path: Path) -> None:
    input = torch.randn(12, 3, 9, 8)
    model = trained(chain(activation=nn.ReLU), SCHEMES[name], input)
    before = copy.deepcopy(model.state_dict())
    path = tmp_path / "model.onnx"
    qconv.export_onnx(model, path, input)
    if name in FINE:
        torch.testing.assert_close(OnnxModel(path)(input), freeze(model)(input), rtol=0, atol=1e-3)
    else:
        agree(model, path, input)
        runtime = OnnxModel(path)
        if name != "fp8":  # its scale is that of the whole batch
            torch.testing.assert_close(runtime(input[:1]), runtime(input)[:1], rtol=0, atol=1e-6)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    stored = {each.name: each.data_type for each in onnx.load(path).graph.initializer if np.prod(each.dims) > 2000}
    floats = [each for each, kind in stored.items() if kind == onnx.TensorProto.FLOAT]
    assert len(stored) >= 3
    assert not floats or name == "fp8", stored  # 253 numbers, which batch norm's factors make one set for each channel
    assert not four_bits(path)
    if name in ("bnn", "lsq2", "lsq4", "bwn", "twn"):
        output = OnnxModel(path)(input)
        qconv.export_onnx(model, path, input, four_bits=True)
        assert len(four_bits(path)) >= 3
        assert OnnxModel(path)(input).equal(output)


def four_bits(path: Path) -> set[str]:
    """The weights of a file that take 4 bits, which few programs read."""
    kinds = onnx.TensorProto.INT4, onnx.TensorProto.UINT4
    return {each.name for each in onnx.load(path).graph.initializer if each.data_type in kinds}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")  # of the old one
@pytest.mark.parametrize(
    "name", mostly_nightly(METHODS, ("bnn()", "shift_ps(weight_bits=5)", "apot(weight_bits=4, input_bits=4)"))
)
def test_torchs_exporter_takes_layers_that_are_not_frozen(name: str, tmp_path: Path) -> None:
    """Its old one is refused, in one way for all."""
    layer, input, path = qconv.QConv2d(3, 8, 3, scheme=METHODS[name]), torch.randn(4, 3, 9, 8), tmp_path / "model.onnx"
    qconv.calibrate(layer, [input])
    torch.onnx.export(layer.eval(), (input,), path, dynamo=True, verbose=False)
    torch.testing.assert_close(OnnxModel(path)(input), layer(input))
    with pytest.raises(ValueError, match=r"export\(dynamo=False\) has no operators.*: call qconv.export_onnx\(model"):
        torch.onnx.export(layer, (input,), path, dynamo=False)


@pytest.mark.parametrize(("highest", "count"), [(255, 1), (255, 5), (128, 3), (15, 2), (1, 4)])
def test_which_sums_of_two_products_may_saturate(highest: int, count: int) -> None:
    for most in (1, 63, 64, 65, 127):
        weight = torch.randint(-most - 1, most + 1, (3, count, 1, 1)).to(torch.int8)
        values = weight.flatten(1).tolist()
        two = [sum(pair) for filter in values for pair in ((w,) for w in filter)]
        two += [a + b for filter in values for a, b in itertools.combinations(filter, 2)]
        # A code is 0 or more: of two weights with different signs, the one alone gives the extreme.
        wanted = not all(-(2**15) < highest * sum_ < 2**15 for sum_ in two)
        assert may_saturate(weight, highest) == wanted, (most, values)
    assert not may_saturate(weight[:, :0], highest)


WIDE = {
    "W8A8": (schemes.minmax(8, 8), True),
    "uneven W8A8": (schemes.dorefa(8, 8), True),
    "uneven W7A8": (schemes.dorefa(7, 8), True),  # whole numbers up to 127
    "W7A8": (schemes.minmax(7, 8), False),
    "W4A8": (schemes.minmax(4, 8), False),
    "W2A8": (schemes.minmax(2, 8), False),
    "W8A7": (schemes.minmax(8, 7), False),
    "W8A4": (schemes.minmax(8, 4), False),
    "W1A8": (schemes.lsq(1, 8), False),
}
OPTION = "session.x64quantprecision"


def is_precise(runtime: OnnxModel) -> bool:
    try:
        return runtime.session.get_session_options().get_session_config_entry(OPTION) == "1"
    except RuntimeError:  # it is not set
        return False


@pytest.mark.parametrize("name", mostly_nightly(WIDE, ("W8A8", "W7A8")))
def test_processors_without_vnni(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime adds two products in 16 bits there, unless it is in its precise mode."""
    input, path = torch.randn(32, 3, 9, 8), tmp_path / "model.onnx"
    scheme, saturates = WIDE[name]
    model = trained(chain(activation=nn.ReLU), scheme, input)
    compared = qconv.export_onnx(model, path, input)
    assert compared.decisions == 0
    assert compared.saturating == (("3", "6") if saturates else ())
    assert (f"unless {OPTION} is 1" in str(compared)) == saturates
    written = in_onnx(build(model, TOLERANCE, input), input, False)
    found = [layer for layer in written.modules() if isinstance(layer, QuantizedConv2d)]
    assert len(found) == 2
    for layer in found:
        codes = 255 if "A8" in name else 127
        assert (2 * codes * int(layer.weight.long().abs().max()) > 32767) == saturates
    usual, here = OnnxModel(path)(input), torch.cpu.get_capabilities()
    for vnni in ("avx512_vnni", "avx_vnni", "none"):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda vnni=vnni: {vnni: True})
        runtime = OnnxModel(path)
        assert is_precise(runtime) == (saturates and vnni == "none")
        if is_precise(runtime) or not saturates or any(here.get(each) for each in ("avx512_vnni", "avx_vnni")):
            torch.testing.assert_close(runtime(input), usual, rtol=0, atol=1e-5)


def test_equal_layers_in_the_precise_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter makes one tensor of equal weights."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    input, path = torch.randn(8, 3, 9, 8), tmp_path / "model.onnx"
    stages = [nn.Sequential(nn.Conv2d(8, 8, 3, groups=8, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(5)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), *stages, nn.Flatten(), nn.Linear(8 * 7 * 6, 4))
    for stage in stages:
        conv: Any = stage[0]
        nn.init.constant_(conv.weight, 0.1)
    trained(model, schemes.minmax(8, 8), input)
    compared = qconv.export_onnx(model, path, input)
    assert compared.decisions == 0
    assert len(compared.saturating) == 4
    assert is_precise(OnnxModel(path))


def test_saturating_layers_have_the_names_of_the_model(tmp_path: Path) -> None:
    input = torch.randn(8, 3, 9, 8)
    reflect: Any = dict(kernel_size=3, padding=1, padding_mode="reflect")
    parts = [[nn.Conv2d(8, 8, **reflect), nn.BatchNorm2d(8), nn.ReLU()] for _ in range(3)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *itertools.chain(*parts), nn.Flatten(), nn.Linear(8 * 7 * 6, 4))
    trained(model, schemes.minmax(8, 8), input)
    compared = qconv.export_onnx(model, tmp_path / "model.onnx", input, round_outputs=True)
    assert compared.saturating == ("1", "4", "7")


@pytest.mark.parametrize("mode", mostly_nightly(["reflect", "replicate", "circular"], ("reflect",)))
def test_a_padded_layer_hands_codes_on(mode: str, tmp_path: Path) -> None:
    input, options = torch.randn(8, 3, 9, 8), {"kernel_size": 3, "padding": 1}
    first, second = nn.Conv2d(3, 8, padding_mode=mode, **options), nn.Conv2d(8, 8, **options)  # pyright: ignore
    layers = first, nn.BatchNorm2d(8), nn.ReLU(), second, nn.Flatten(), nn.Linear(8 * 72, 4)
    model = trained(nn.Sequential(*layers), schemes.lsq(4, 4), input, skip=("5",))
    assert [told.gives for told in freeze(model).layers] == ["codes", "floats"]
    qconv.export_onnx(model, tmp_path / "model.onnx", input)
    agree(model, tmp_path / "model.onnx", input)


@pytest.mark.parametrize("name", mostly_nightly(["lsq2", "lsq4", "lsq8", "signed"], ("signed",)))
def test_integers_at_run_time(name: str, tmp_path: Path) -> None:
    input = torch.randn(64, 3, 9, 8)
    model = trained(chain(activation=nn.Identity if name == "signed" else nn.ReLU), SCHEMES[name], input)
    qconv.export_onnx(model, tmp_path / "some", input)
    assert kinds(tmp_path / "some").count("QLinearConv") == 2
    qconv.export_onnx(model, tmp_path / "all", input, round_outputs=True)
    assert kinds(tmp_path / "all").count("QLinearConv") == 3
    found = compare_onnx(model, tmp_path / "all", input)
    assert found.is_rounded
    # 256 numbers over the range of an output, of which the last layer takes the mean.
    assert found.difference < 0.02 * found.largest


class Residual(nn.Module):
    """Two blocks, the second one of which has a layer in its shortcut."""

    def __init__(self, activation: type[nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.first = self.block(16, 16, activation)
        self.second = self.block(16, 24, activation)
        self.beside = nn.Sequential(nn.Conv2d(16, 24, 1), nn.BatchNorm2d(24))
        self.same, self.activation, self.head = nn.Identity(), activation(), nn.Linear(24, 4)

    @staticmethod
    def block(inputs: int, outputs: int, activation: type[nn.Module]) -> nn.Sequential:
        first, second = nn.Conv2d(inputs, outputs, 3, padding=1), nn.Conv2d(outputs, outputs, 3, padding=1)
        return nn.Sequential(first, nn.BatchNorm2d(outputs), activation(), second, nn.BatchNorm2d(outputs))

    def forward(self, input: Tensor) -> Tensor:
        input = self.activation(self.stem(input))
        input = self.activation(self.first(input) + self.same(input))
        input = self.activation(self.second(input).add_(self.beside(input)))
        return self.head((input + input).mean((2, 3)))


@pytest.mark.parametrize("name", mostly_nightly(["lsq2", "lsq8", "signed"], ("lsq8",)))
def test_sums_in_integers(name: str, tmp_path: Path) -> None:
    input = torch.randn(64, 3, 9, 8)
    model = trained(Residual(nn.Identity if name == "signed" else nn.ReLU), SCHEMES[name], input)
    path = tmp_path / "model.onnx"
    qconv.export_onnx(model, path, input, round_outputs=True)
    found = kinds(path)
    wanted = {"Conv": 1, "QLinearConv": 5, "QLinearAdd": 3, "QuantizeLinear": 1, "DequantizeLinear": 1, "Relu": 0}
    assert {kind: found.count(kind) for kind in wanted} == wanted
    wanted, got = freeze(model)(input), OnnxModel(path)(input)
    # With 2 or 4 bits a code that falls to the other side of an edge is a large difference, of one output of many.
    assert float((got - wanted).abs().mean()) < (0.02 if name == "lsq8" else 0.15) * float(wanted.abs().mean())


def by_torch(name: str, input: Tensor, *others: Tensor, dtype: torch.dtype, **attributes: Any) -> Tensor:
    """ONNX's operators, as its text defines them."""
    if name == "LeakyRelu":
        return torch.where(input < 0, attributes["alpha"] * input, input)
    scale, zero = (each.double() for each in others)
    if "axis" in attributes:
        scale, zero = (each.view(-1, *[1] * (input.ndim - 1)) for each in (scale, zero))
    if name == "QuantizeLinear":
        return ((input / scale).round() + zero).clamp(0, 255).to(dtype)
    return ((input.double() - zero) * scale).to(dtype)


IN_FLOATS = "bnn", "twn", "shift"
"""Their layers are float convolutions in the file."""
GUARDED = {
    **{name: SCHEMES[name] for name in (*IN_FLOATS, "lsq4", "lsq8", "apot", "minmax8")},
    "minmax8 symmetric": schemes.minmax(8, 8),
    "pact4": schemes.pact(4, 4),
    "dorefa": schemes.dorefa(),
}


@pytest.mark.parametrize("round_outputs", [False, True])
@pytest.mark.parametrize("name", mostly_nightly(GUARDED, ("bnn", "lsq8")))
def test_what_runtimes_may_fuse_is_in_integers(name: str, round_outputs: bool, tmp_path: Path) -> None:
    """A Conv between quantizers becomes one of integers, floats in it too; of two quantizers in a row one is left."""
    input, path = torch.randn(32, 3, 9, 8), tmp_path / "model.onnx"
    model = trained(Residual(nn.ReLU), GUARDED[name], input, skip=("stem", "head"))
    qconv.export_onnx(model, path, input, round_outputs=round_outputs)
    graph = onnx.load(path).graph
    maker = {output: node for node in graph.node for output in node.output}
    of_codes = 0
    for node in graph.node:
        makers = [maker[each].op_type if each in maker else "" for each in node.input]
        if node.op_type == "Conv" and "DequantizeLinear" in makers:
            of_codes += 1
            assert makers == ["DequantizeLinear"] * 3, node.name  # input, weight and bias
            assert {each.op_type for each in graph.node if node.output[0] in each.input} == {"QuantizeLinear"}
        assert node.op_type != "QuantizeLinear" or makers[0] != "DequantizeLinear", node.name
    assert of_codes == (0 if name in IN_FLOATS else 5 if round_outputs else 0 if name == "apot" else 2)
    sessions = (load(str(path), 1, optimized=optimized) for optimized in (False, True))
    one, other = (torch.from_numpy(each.run(None, {"input": input.numpy()})[0]) for each in sessions)
    off = (one - other).abs().amax(1) > 1e-4 * one.abs().max()
    assert int(off.sum()) <= 1, off


class Sums(nn.Module):
    """Layers whose outputs are added in one way or another."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, mode = kind, "reflect" if kind == "padded" else "zeros"
        self.stem, self.head = nn.Conv2d(3, 3 if kind == "input" else 8, 3, padding=1), nn.Conv2d(8, 4, 1)
        width = self.stem.out_channels
        self.one, self.two, self.three = (
            nn.Conv2d(width, 8 if name == "three" else width, 3, padding=1, padding_mode=mode)
            for name in ("one", "two", "three")
        )
        self.other = nn.Conv2d(width, 8, 1)
        self.shift = nn.Parameter(torch.randn(1, width, 1, 1))
        self.relu, self.relu6, self.leaving = nn.ReLU(), nn.ReLU6(), nn.ReLU(inplace=True)

    def forward(self, input: Tensor) -> Tensor:
        x = self.stem(input) if self.kind == "input" else self.relu(self.stem(input))
        one = self.one(x)
        match self.kind:
            case "plain" | "padded":
                x = self.relu(one + self.two(x))
            case "in_place":
                x.add_(one)
            case "in_place_relu":
                x = one + self.two(x)
                self.leaving(x)
            case "in_place_function":
                x = one + self.two(x)
                nn.functional.relu(x, True)
            case "relu6":
                x = self.relu6(one + x)
            case "also_read":
                x = one + x
                x = self.relu(x) - x
            case "parameter":
                x = one + self.shift
            case "number":
                x = one + x.shape[1]
            case "twice":
                x = self.one(self.relu(one + x)) + x
            case "input":
                x = input + one
            case "relus":
                x = self.relu(one) + self.relu(self.two(x))
            case _:
                x = one
        return self.head(self.three(x) + self.other(x))


ROUNDED = {
    **dict(plain=2, padded=2, in_place=0, in_place_relu=0, in_place_function=0, relu6=3, also_read=3),
    **dict(parameter=3, number=1, twice=4, input=3, relus=1),
    "no sum before": 1,
}
"""How many sums of each kind become integers."""
OF_TWO = "plain", "padded", "in_place_relu", "in_place_function", "relus"


@pytest.mark.parametrize("kind", ROUNDED)
def test_sums_of_every_kind(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("eight_bit_codes", "layer_nodes"):
        monkeypatch.setattr(f"qconv.onnx.{module}.operator", by_torch)
    input = torch.randn(16, 3, 8, 8)
    skip = ("stem", "head") if kind in OF_TWO else ("stem", "head", "two")
    model: Any = trained(Sums(kind), schemes.lsq(8, 8), input, skip=skip)
    with torch.no_grad():
        for layer in (model.one, model.two):
            layer.bias.fill_(3)  # sums without negative numbers, whose codes can be those of what reads them
        reached: list[float] = []
        model.three.register_forward_pre_hook(lambda _, args: reached.append(float(args[0].max())))
        model(input)
        model.three._forward_pre_hooks.clear()
        for layer in (model.three, model.other):
            layer.input_quantizer.step.fill_(1.2 * reached[0] / 255)
    network = in_onnx(freeze(model), input, round_outputs=True)
    wanted, got = freeze(model)(input), network(input)
    assert float((got - wanted).abs().mean()) < 0.02 * float(wanted.abs().mean())
    assert sum(type(module) is Quantize for module in network.children()) == ROUNDED[kind]


@pytest.mark.parametrize("ends", [(0.0, 9.0), (-3.0, 9.0), (0.5, 2.0), (0.0, 0.0)])
@pytest.mark.parametrize("reader", [2.0, 0.7, 0.037, 0.001])
def test_rounding_a_sum_keeps_the_codes_of_its_reader(reader: float, ends: tuple[float, float]) -> None:
    step, zero = steps_of_a_sum(*ends, reader)
    low, high = min(ends[0], 0), max(ends[1], 0)
    assert 0 <= zero <= 255
    assert -zero * step <= low + step / 2
    assert (255 - zero) * step >= high - step / 2
    if reader * 255 >= high - low > 0:
        input = torch.rand(100_000, dtype=torch.float64) * (high - low) + low
        codes = ((input / step).round() + zero).clamp(0, 255) - zero
        wanted, got = (input / reader).round(), (codes * step / reader).round()
        assert torch.equal(wanted, got)
        assert step >= (high - low) / 255 / 1.0001
    else:
        assert step == max((high - low) / 255, 1e-30)


@pytest.mark.parametrize(
    ("low", "high", "bound", "slope"), [(0, 15, 900, 0.05), (0, 3, 60, 0.1), (-8, 7, 700, 0.02), (0, 1, 9, 1.0)]
)
def test_whole_biases_have_the_same_steps(low: int, high: int, bound: int, slope: float) -> None:
    torch.manual_seed(0)
    scale, bias = torch.randn(64) * slope, torch.randn(64) * high / 2
    scale[:3], bias[:3] = 0, torch.tensor([high + 0.5, low - 0.5, (low + high) // 2])
    encode = Encode(qconv.quantizers.Identity(), torch.uint8)
    layer = IntegerConv2d(torch.ones(64, 1, 1, 1), Window(), scale, bias, encode)
    layer.round_(scale, bias, low, high)
    found = whole_bias(layer, bound, 15)
    sums = torch.arange(-bound, bound + 1).unsqueeze(1).double()
    wanted = (sums * scale.double() + bias.double()).round().clamp(low, high)
    whole = (found.bias * 15).round()
    torch.testing.assert_close(whole, found.bias * 15, rtol=0, atol=1e-6)
    got = ((sums * 15 + whole).float() * (found.scale / 15).float()).round().clamp(low, high)
    assert torch.equal(got.double(), wanted)


def test_encoders() -> None:
    for scheme, kind in ((schemes.lsq(4, 4), LinearEncode), (schemes.apot(), OtherEncode)):
        model = trained(chain(), scheme, torch.randn(4, 3, 8, 8))
        encode = next(each for each in freeze(model).modules() if isinstance(each, Encode))
        ends = encode(torch.tensor([-1e30, 1e30]).view(2, 1, 1, 1))
        assert encode.levels[:2] == (int(ends.min()), int(ends.max()))
        assert type(encoder(encode)) is kind


@pytest.mark.nightly
def test_a_residual_network_with_batches_of_any_size(tmp_path: Path) -> None:
    input = torch.randn(16, 3, 16, 16)
    model = trained(resnet20(num_classes=10), schemes.lsq(4, 4), input)
    qconv.export_onnx(model, tmp_path / "model.onnx", input[:1], four_bits=True)
    agree(model, tmp_path / "model.onnx", input)
    assert OnnxModel(tmp_path / "model.onnx")(input[:0]).shape == (0, 10)
    weights = sum(module.weight.numel() for module in model.modules() if isinstance(module, qconv.QConv2d))
    assert (tmp_path / "model.onnx").stat().st_size < 0.5 * weights + 80_000


def other(layer: nn.Module, channels: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 24, 3), nn.ReLU(), layer, nn.Flatten(), nn.LazyLinear(channels))


@pytest.mark.parametrize("scheme", [schemes.lsq(4, 4), schemes.lsq(3, 3, signed_input=True)], ids=str)
@pytest.mark.parametrize("round_outputs", [False, True])
def test_shapes_of_integer_layers(scheme: schemes.Scheme, round_outputs: bool, tmp_path: Path) -> None:
    layers = nn.Conv2d(24, 24, 3, 2, 1, groups=4), nn.Conv2d(24, 24, (3, 2), dilation=2, padding="same", groups=3)
    body: list[nn.Module] = [nn.Conv2d(3, 24, 3), nn.ReLU()]
    for layer in (*layers, nn.Conv2d(24, 24, 1)):
        body += [layer, nn.BatchNorm2d(24)]
    input = torch.randn(12, 3, 10, 10)
    model = trained(nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 5)), scheme, input)
    saturated: Any = model.get_submodule("3")
    with torch.no_grad():
        saturated.weight[:3], saturated.bias[:3] = 0, torch.tensor([50.0, -50.0, 0.1])
    path = tmp_path / "model.onnx"
    qconv.export_onnx(model, path, input, round_outputs=round_outputs)
    assert kinds(path).count("QLinearConv") == (3 if round_outputs else 2)
    if not round_outputs:
        agree(model, path, input)


def test_input_that_a_file_does_not_take(tmp_path: Path) -> None:
    input = torch.randn(4, 3, 8, 8)
    model = trained(chain(), schemes.bnn(), input)
    qconv.export_onnx(model, tmp_path / "model.onnx", input)
    with pytest.raises(ValueError, match=r"input \(of shape \(4, 3, 9, 9\)\)"):
        OnnxModel(tmp_path / "model.onnx")(torch.randn(4, 3, 9, 9))


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.Conv2d(24, 24, 3, groups=4, stride=2, padding=1),
        lambda: nn.Conv2d(24, 24, (3, 2), dilation=2, padding="same", padding_mode="reflect"),
        lambda: nn.ConvTranspose2d(24, 8, 3, stride=2, groups=2, output_padding=1),
        lambda: nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(24, 8, 1, bias=False)),
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(24 * 64, 8), nn.Unflatten(1, (8, 1, 1))),
    ],
)
@pytest.mark.parametrize("name", mostly_nightly(["bnn", "lsq4", "shift"], ("lsq4",)))
def test_other_layers(layer: Any, name: str, tmp_path: Path) -> None:
    input = torch.randn(6, 3, 10, 10)
    net = other(layer(), 5)
    net(input)
    model = trained(net, SCHEMES[name], input)
    qconv.export_onnx(model, tmp_path / "model.onnx", input)
    agree(model, tmp_path / "model.onnx", input)


class Shared(nn.Module):
    """Its forward stays Python: it calls a part with its default, reads its width, and has a layer in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.two = nn.Conv2d(3, 8, 3), Scaled(), Scaled()
        self.two.conv = self.one.conv

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2] < 4:
            raise ValueError("too small")
        return self.two(self.one(self.stem(x), 1.0)).mean((1, 2, 3)) / self.one.width


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.width = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), 8

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.relu(self.norm(self.conv(x))) * scale


@pytest.mark.parametrize("round_outputs", [False, True])
def test_a_network_in_parts_with_one_output_a_sample(round_outputs: bool, tmp_path: Path) -> None:
    input = torch.randn(6, 3, 8, 8)
    model = trained(Shared(), schemes.lsq(4, 4), input, skip=("stem",))
    compared = qconv.export_onnx(model, tmp_path / "model.onnx", input, round_outputs=round_outputs)
    assert compared.close == 6 or round_outputs
    got = OnnxModel(tmp_path / "model.onnx")(input)
    torch.testing.assert_close(
        got, model(input), rtol=0.05 if round_outputs else 1e-5, atol=0.05 if round_outputs else 1e-6
    )


def test_a_deformable_layer_is_refused_with_the_reason(tmp_path: Path) -> None:
    class Deformed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = qconv.QDeformConv2dPack(3, 8, 3, scheme=schemes.bwn())

        def forward(self, input: Tensor) -> Tensor:
            return self.conv(input).mean((2, 3))

    model = Deformed().eval()
    with pytest.raises(ValueError, match="'conv' is deformable"):
        qconv.export_onnx(model, tmp_path / "model.onnx", torch.randn(2, 3, 8, 8))
    assert not list(tmp_path.iterdir())


def test_mistakes(tmp_path: Path) -> None:
    input = torch.randn(4, 3, 8, 8)
    model = trained(chain(), schemes.bnn(), input)
    path = tmp_path / "model.onnx"
    for example, kind, words in (
        (3, TypeError, "example (int) must be a float tensor (N, C, H, W)"),
        (input.int(), TypeError, "example (torch.int32) must be a float tensor"),
        (input[:0], ValueError, "example (of shape (0, 3, 8, 8)) must be (N, C, H, W) and hold at least one sample"),
        (input * torch.nan, ValueError, "example has NaN or inf"),
        (input[:, :2], ValueError, "example (of shape (4, 2, 8, 8)) does not suit the model"),
    ):
        with pytest.raises(kind, match=re.escape(words)):
            qconv.export_onnx(model, path, example)  # pyright: ignore[reportArgumentType]
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        qconv.export_onnx(model, tmp_path / "none" / "model.onnx", input)
    with pytest.raises(IsADirectoryError, match="is a folder"):
        qconv.export_onnx(model, tmp_path, input)
    with pytest.raises(TypeError, match=r"model \(=3\) must be"):
        qconv.export_onnx(3, path, input)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="there is no such file"):
        OnnxModel(path)
    path.write_bytes(b"no model")
    with pytest.raises(ValueError, match=f"ONNX file {path}"):
        OnnxModel(path)
    path.unlink()
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    input = torch.randn(4, 3, 8, 8)
    model = trained(chain(), schemes.bnn(), input)
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        qconv.export_onnx(model, tmp_path / "model.onnx", input)
    assert not list(tmp_path.iterdir())


def test_wrappers_are_removed(tmp_path: Path) -> None:
    input = torch.randn(4, 3, 9, 8)
    model = trained(chain(), schemes.lsq(4, 4), input)
    found = qconv.export_onnx(nn.DataParallel(model), tmp_path / "model.onnx", input)
    assert found.samples == 4
    agree(model, tmp_path / "model.onnx", input)


@pytest.mark.parametrize(
    ("input", "weight"),
    [(quantizers.LSQPlusInput, partial(quantizers.ShiftQ, 5)), (quantizers.DSQInput, quantizers.ShiftPS)],
)
def test_powers_of_two_below_one_are_no_whole_numbers(input: Any, weight: Any, tmp_path: Path) -> None:
    scheme = Scheme("mine", input=partial(input, 4), weight=weight)
    model = qconv.convert(nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten()), scheme, skip=())
    model(x := torch.randn(4, 8, 6, 6))
    found = qconv.export_onnx(model.eval(), tmp_path / "model.onnx", x)
    assert found.agrees


def test_metadata(tmp_path: Path) -> None:
    model = qconv.convert(nn.Sequential(nn.Conv2d(8, 8, 3), nn.Flatten()), schemes.bnn(), skip=()).eval()
    qconv.export_onnx(model, tmp_path / "model.onnx", torch.randn(2, 8, 6, 6), metadata={"classes": '["cat", "dog"]'})
    told = onnxruntime.InferenceSession(tmp_path / "model.onnx").get_modelmeta().custom_metadata_map
    assert told["classes"] == '["cat", "dog"]'
    no: Any = {"classes": ["cat"]}
    with pytest.raises(TypeError, match=r"metadata\['classes'\] \(=\['cat'\]\) must be a string"):
        qconv.export_onnx(model, tmp_path / "no.onnx", torch.randn(2, 8, 6, 6), metadata=no)


def test_a_fixed_number_of_images_is_refused(tmp_path: Path) -> None:
    class Token(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)
            self.token = nn.Parameter(torch.ones(1, 8))

        def forward(self, input: Tensor) -> Tensor:
            return self.second(self.first(input)).mean((2, 3)) + self.token.expand(len(input), -1)

    model = qconv.convert(Token(), schemes.bwn(), skip=()).eval()
    with pytest.raises(ValueError, match=r"makes a Python number of the batch's size.*use x.shape\[0\]"):
        qconv.export_onnx(model, tmp_path / "model.onnx", torch.randn(2, 3, 8, 8))
    assert not any(tmp_path.iterdir())


class ScatteredMean(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return input.scatter_reduce(1, torch.zeros_like(input, dtype=torch.long), input, "mean")


@pytest.mark.parametrize(
    ("part", "name"),
    [
        (nn.AvgPool2d(2, divisor_override=3), "avg_pool2d"),
        (nn.Sequential(nn.Unflatten(1, (8, 1)), nn.AvgPool3d((1, 2, 2), divisor_override=3)), "avg_pool3d"),
        (
            partial(nn.functional.interpolate, scale_factor=1.7, mode="bicubic", antialias=True),
            "_upsample_bicubic2d_aa",
        ),
        (ScatteredMean(), "scatter_reduce"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
@pytest.mark.parametrize("is_last", [False, True])
def test_operators_that_torch_writes_wrongly_are_refused(part: Any, name: str, is_last: bool, tmp_path: Path) -> None:
    """The file would be off by several percent."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.part = nn.Conv2d(3, 8, 3, padding=1), part if isinstance(part, nn.Module) else None

        def forward(self, input: Tensor) -> Tensor:
            output = (self.part or part)(self.conv(input))
            return output if is_last else torch.relu(output).flatten(2).mean(2)

    model = qconv.convert(Net(), schemes.bwn(), skip=()).eval()
    where = "the model's forward" if isinstance(part, partial) else "'part"
    words = rf"Net\): its ONNX file would be wrong, .*aten.{name}.* in {where}.* differs from torch's by up to \d"
    with pytest.raises(ValueError, match=words):
        qconv.export_onnx(model, tmp_path / "model.onnx", torch.randn(2, 3, 8, 10))
    assert not any(tmp_path.iterdir())


class Floats(nn.Module):
    """Operators that torch's exporter rewrites, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3)
        self.pools = nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), nn.AdaptiveAvgPool2d((3, 5))
        self.norms = nn.ModuleList([nn.GroupNorm(4, 8), nn.InstanceNorm2d(8), nn.LocalResponseNorm(3, alpha=0.3)])
        self.pads = nn.ReflectionPad2d((2, 1, 0, 1)), nn.CircularPad2d(1), nn.ReplicationPad2d(2)

    def forward(self, input: Tensor) -> Tensor:
        x = nn.functional.gelu(self.first(input))
        x = nn.functional.interpolate(x, scale_factor=1.7, mode="bicubic", align_corners=True) // 0.01 * 0.01
        for part in (*self.norms, *self.pads):
            x = part(x)
        values, places = nn.functional.max_pool2d(x, 3, 2, 1, 2, return_indices=True)
        x = torch.cat([self.second(x).std((2, 3), correction=2), *(pool(x).amax((2, 3)) for pool in self.pools)], 1)
        return x + values.mean() + places.float().mean() + (x.cumsum(1) / x.topk(2, 1).values[:, 1:]).clamp(-1, 1)


def test_operators_that_torch_writes_rightly_are_exported(tmp_path: Path) -> None:
    input = torch.randn(3, 3, 8, 10)
    compared = qconv.export_onnx(qconv.convert(Floats(), schemes.bwn(), skip=()).eval(), tmp_path / "one.onnx", input)
    assert compared.close == 3


def upscaling(mode: str) -> nn.Sequential:
    parts = nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
    return nn.Sequential(*parts, nn.Conv2d(8, 12, 3, padding=1), nn.PixelShuffle(2), nn.Upsample(None, 2, mode))


def pooled(size: Any) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(size), nn.Flatten())


class OfItsSize(nn.Module):
    """Two layers, and a function of what they give and of the input."""

    def __init__(self, function: Any, stride: int = 1, head: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, stride, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.function, self.head = function, head

    def forward(self, input: Tensor) -> Tensor:
        return self.function(self, torch.relu(self.second(self.first(input))), input)


ANY_SIZE = {
    "nearest": lambda: upscaling("nearest"),
    "bilinear": lambda: upscaling("bilinear"),
    "classifier": lambda: nn.Sequential(pooled(1), nn.Linear(8, 5)),
    "attention": lambda: OfItsSize(lambda net, x, _: torch.softmax(x.flatten(2).mT @ x.flatten(2), 2).mean(1)),
    "even sizes": lambda: OfItsSize(lambda net, x, taken: torch.cat([x.repeat(1, 1, 2, 2), taken], 1), 2),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    mostly_nightly(itertools.product(ANY_SIZE, ("lsq4", "bnn", "lsq8")), (("bilinear", "lsq4"), ("even sizes", "bnn"))),
)
def test_images_of_any_size(name: str, kind: str, tmp_path: Path) -> None:
    input, path = torch.randn(4, 3, 6, 8), tmp_path / "model.onnx"
    model = trained(ANY_SIZE[name](), SCHEMES[kind], input, skip=())
    qconv.export_onnx(model, path, input, any_size=True)
    (taken,) = onnxruntime.InferenceSession(path).get_inputs()
    assert taken.shape == ["batch", 3, "height", "width"]
    for size in ((10, 4), (4, 18)) if name == "even sizes" else ((9, 5), (5, 17), (6, 8)):
        other = torch.randn(3, 3, *size)
        wanted, got = freeze(model)(other), OnnxModel(path)(other)
        assert got.shape == wanted.shape
        assert float((got - wanted).abs().mean()) < (1e-2 if kind == "lsq8" else 1e-3) * float(wanted.abs().mean())
    qconv.export_onnx(model, path, input, round_outputs=True)
    assert onnxruntime.InferenceSession(path).get_inputs()[0].shape == ["batch", 3, 6, 8]


OF_ONE_SIZE: dict[str, tuple[Any, str]] = {
    "pooling": (
        lambda: pooled((2, 3)),
        r"for images of 7x11 .* off by \d.*, and by 0.00% at the example's size \(6x8\)",
    ),
    "linear": (
        lambda: OfItsSize(lambda net, x, _: net.head(x.flatten(1)), head=nn.Linear(384, 5)),
        "OfItsSize\\) takes no images of another size than 6x8: with 12x24, 'head' raises: input has shape",
    ),
    "constant": (
        lambda: OfItsSize(lambda net, x, _: x + x.new_ones(6, 8)),
        "OfItsSize\\) takes no images of another size than 6x8: with 12x24, its forward raises: The size of tensor a",
    ),
    "branch": (
        lambda: OfItsSize(lambda net, x, _: x * (2 if x.shape[3] > 8 else 1)),
        "for images of 7x11 the file's outputs would be off by 50",
    ),
    "number": (
        lambda: OfItsSize(lambda net, x, _: nn.functional.interpolate(x, (int(x.shape[2]) * 2, 9))),
        r"Python number of the height, which .* use x.shape\[2\] as it is, in place of int\(x.shape\[2\]\)",
    ),
}


@pytest.mark.parametrize("name", mostly_nightly(OF_ONE_SIZE, ("linear", "number")))
def test_networks_of_one_size_are_refused_as_any_size(name: str, tmp_path: Path) -> None:
    net, words = OF_ONE_SIZE[name]
    input = torch.randn(4, 3, 6, 8)
    model = trained(net(), schemes.lsq(4, 4), input, skip=())
    with pytest.raises(ValueError, match=words):
        qconv.export_onnx(model, tmp_path / "model.onnx", input, any_size=True)
    assert not any(tmp_path.iterdir())
    assert qconv.export_onnx(model, tmp_path / "model.onnx", input).samples == 4
    flat = qconv.convert(nn.Sequential(nn.Linear(4, 4)), schemes.bwn(), skip=()).eval()
    with pytest.raises(ValueError, match=r"any_size: example \(of shape \(2, 4\)\) has no height and width"):
        qconv.export_onnx(flat, tmp_path / "flat.onnx", torch.randn(2, 4), any_size=True)
