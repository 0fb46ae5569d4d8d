"""ONNX files: what ONNX Runtime computes of them, against the program, the frozen and the trained model."""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from conftest import METHODS
from functions import FUNCTIONS, X, aten, of_functions
from onnx.reference import ReferenceEvaluator
from settings import mostly_nightly
from torch import Tensor, nn

import qconv
from qconv import Scheme, schemes
from qconv.inference import FrozenModel
from qconv.inference.build import build
from qconv.inference.verify import leaves
from qconv.onnx import OnnxModel, compare_onnx
from qconv.onnx.export import written
from qconv.onnx.graph import Form, Graph
from qconv.onnx.integers import may_saturate, steps_of
from qconv.onnx.runtime import load
from qconv.onnx.write import Writer
from qconv.program import operations as ops
from qconv.program.operations import Program, Window
from tests.test_freeze import chain, trained

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
    "dorefa": schemes.dorefa(2, 4),
    "pact4": schemes.pact(4, 4),
    "n2uq": schemes.n2uq(),
    "apot": schemes.apot(),
    "bwn": schemes.bwn(),
    "twn": schemes.twn(),
    "percentile8": schemes.percentile(8, 8),
    "minmax8": schemes.minmax(8, 8),
    "asymmetric8": schemes.minmax(8, 8, symmetric=False),
    "dorefa8": schemes.dorefa(8, 8),
    "pact8": schemes.pact(8, 8),
    "siman": schemes.siman(),
    "lsq_plus": schemes.lsq_plus(),
    "adabin": schemes.adabin(),
    "dsq": schemes.dsq(),
    "fp8": schemes.fp8(),
    "lsq16": schemes.lsq(4, 16),
    "shift": schemes.shift_q(),
    "shift16": schemes.shift_q(fixed_point=(16, 16)),
}
FINE = ("lsq8", "percentile8", "minmax8", "asymmetric8", "dorefa8", "pact8")
"""Of 255 steps, for which there may be no line with a whole bias: some codes are off by one."""
FORMS: dict[str, dict[str, Any]] = {
    "": {},
    "opset 13": {"opset": 13},
    "opset 25": {"opset": 25},
    "four bits": {"four_bits": True},
    "signed": {"signed": True},
    "by saturation": {"clamp_by_saturation": True},
}


def kinds(path: Path) -> list[str]:
    """The operators that ONNX Runtime makes of a file."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(path.with_suffix(".optimized"))
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    return [node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node]


def written_as(program: Program, images: Tensor, rounded: bool = False, **form: Any) -> tuple[Writer, Any]:
    """A program's writer, and its file."""
    writer = Writer(program, Form(**{"opset": 21 if form.get("four_bits") else 17, **form}), images, rounded)
    return writer, written(writer, program, program.size is None, {})


def other_values(program: Program, images: Tensor, **form: Any) -> tuple[int, int, float]:
    """How many codes differ from those of the program on ONNX Runtime's own floats, of how many; and how far floats are
    from the results of its operations on ONNX Runtime's own values, relative to the largest number."""
    writer, model = written_as(program, images, **form)
    names = {place: name for place, name in {**writer.floats, **writer.codes}.items() if place}
    model.graph.output.extend(map(onnx.helper.make_empty_tensor_value_info, names.values()))
    got = load(model.SerializeToString(), 1, optimized=False).run([*names.values()], {"input": images.numpy()})
    values, found, others, codes, error = [images], dict(zip(names, got, strict=True)), 0, 0, 0.0
    for place, operation in enumerate(program.operations[1:], 1):
        given = [values[each] for each in operation.inputs]
        values.append(operation.run(*given))
        if place in found:
            there = torch.from_numpy(found[place]).float() - (writer.offset(place) if place in writer.codes else 0)
            if isinstance(operation, ops.Quantize | ops.Sign):
                others, codes = others + int((there != values[-1]).sum()), codes + there.numel()
            else:
                largest = max(float(each.float().abs().max()) for each in (values[-1], *given))
                error = max(error, float((there - values[-1].float()).abs().max()) / (largest + 1e-30))
            values[-1] = there.to(values[-1].dtype)
    return others, codes, error


@pytest.mark.parametrize("scheme", [schemes.pact(4, 4), schemes.sawb(4, 4), schemes.dorefa(4, 4)])
def test_codes_of_4_bits_are_equal(scheme: qconv.Scheme) -> None:
    """Some of these filters need another factor of their weights, and some have no line: their layers are floats."""
    blocks = [[nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU()] for _ in range(4)]
    network = nn.Sequential(nn.Conv2d(3, 64, 3), *itertools.chain(*blocks), nn.Conv2d(64, 4, 1))
    program = build(trained(network, scheme, x := torch.randn(16, 3, 12, 12)), x).program(x)
    assert other_values(program, x)[0] == 0


def agree(model: nn.Module, frozen: FrozenModel, path: Path, input: Tensor) -> None:
    """Equal within the rounding of floats, but for a sample in which a code fell to the other side of an edge."""
    wanted = frozen(input)
    error = (OnnxModel(path)(input) - wanted).abs().flatten(1).amax(1)
    assert int((error > 1e-5 * (wanted.abs().max() + 0.1)).sum()) <= 1, error
    found = compare_onnx(model, path, input)
    assert found.close >= len(input) - 1
    assert found.samples == len(input)


def guarded(path: Path) -> int:
    """Assert that a Conv between quantizers has a whole weight and bias, and no quantizer follows one directly.

    ONNX Runtime rounds floats in such a Conv, drops one of two quantizers, and warns of constants that nothing reads.
    """
    graph, of_codes = onnx.load(path).graph, 0
    assert {each.name for each in graph.initializer} <= {name for node in graph.node for name in node.input}
    maker = {output: node for node in graph.node for output in node.output}
    for node in graph.node:
        makers = [maker[each].op_type if each in maker else "" for each in node.input]
        if node.op_type == "Conv" and "DequantizeLinear" in makers:
            of_codes += 1
            assert makers == ["DequantizeLinear"] * 3, node.name  # input, weight and bias
        assert node.op_type != "QuantizeLinear" or makers[0] != "DequantizeLinear", node.name
    return of_codes


CASES = [
    *((name, "") for name in SCHEMES),
    *itertools.product(("bnn", "lsq4", "signed", "apot", "asymmetric8", "shift"), list(FORMS)[1:]),
    *(("lsq2", "four bits"), ("fp8", "opset 25"), ("minmax8", "by saturation")),
]
FAST = ("bnn", ""), ("lsq4", "opset 13"), ("apot", ""), ("signed", "by saturation"), ("lsq2", "four bits")


@pytest.mark.parametrize(("name", "form"), mostly_nightly(CASES, FAST))
def test_every_kind_of_scheme(name: str, form: str, tmp_path: Path) -> None:
    input, path = torch.randn(12, 3, 9, 8), tmp_path / "model.onnx"
    model = trained(chain(activation=nn.ReLU), SCHEMES[name], input)
    if form == "signed" and name in FINE:
        with pytest.raises(ValueError, match="signed=True takes codes from -128 to 127, and its input has"):
            qconv.export_onnx(model, path, input, **FORMS[form])
        return
    if (name, form) == ("fp8", ""):
        with pytest.raises(ValueError, match=r"'3': floats of 8 bits need opset=19 or more"):
            qconv.export_onnx(model, path, input, **FORMS[form])
        return
    qconv.export_onnx(model, path, input, **FORMS[form])
    guarded(path)
    frozen = build(model, input)
    program = frozen.program(input)
    others, codes, error = other_values(program, input, **FORMS[form])
    assert others <= (1e-3 * codes if name in FINE else 0)
    assert error < 1e-5
    if name in FINE:
        torch.testing.assert_close(OnnxModel(path)(input), frozen(input), rtol=0, atol=1e-2)
    else:
        agree(model, frozen, path, input)
        if name != "fp8":  # its scale is that of the whole batch
            torch.testing.assert_close(OnnxModel(path)(input[:1]), OnnxModel(path)(input)[:1], rtol=0, atol=1e-6)
    (one,) = load(str(path), 1, optimized=False).run(None, {"input": input.numpy()})
    other = OnnxModel(path)(input).numpy()
    assert int((np.abs(one - other).max(1) > 1e-4 * np.abs(one).max()).sum()) <= 1
    file = onnx.load(path)
    if file.opset_import[0].version >= 19 and name != "fp8":  # the first in which it has DequantizeLinear
        by_onnx: Any = ReferenceEvaluator(file).run(None, {"input": input[:2].numpy()})
        assert float(np.abs(by_onnx[0] - one[:2]).max()) <= (1e-2 if name in FINE else 1e-5)
    assert file.opset_import[0].version == FORMS[form].get("opset", 21 if form == "four bits" else 17)
    stored = {each.data_type for each in file.graph.initializer if np.prod(each.dims) > 2000}
    small = {onnx.TensorProto.INT4, onnx.TensorProto.UINT4} if form == "four bits" else set()
    small |= {onnx.TensorProto.INT16} if name == "asymmetric8" else set()  # in a convolution of floats
    assert stored <= {onnx.TensorProto.INT8, onnx.TensorProto.UINT8} | small
    if form == "by saturation":
        assert "Min" not in {each.op_type for each in file.graph.node}


@pytest.mark.parametrize("name", mostly_nightly(METHODS, ("bnn()", "apot(weight_bits=4, input_bits=4)")))
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")  # of the old one
def test_torchs_exporter_takes_layers_that_are_not_frozen(name: str, tmp_path: Path) -> None:
    """Its old one is refused, in one way for all."""
    layer, input, path = qconv.QConv2d(3, 8, 3, scheme=METHODS[name]), torch.randn(4, 3, 9, 8), tmp_path / "model.onnx"
    qconv.calibrate(layer, [input])
    torch.onnx.export(layer.eval(), (input,), path, dynamo=True, verbose=False)
    torch.testing.assert_close(OnnxModel(path)(input), layer(input))
    with pytest.raises(ValueError, match=r"export\(dynamo=False\) has no operators.*: call qconv.export_onnx\(model"):
        torch.onnx.export(layer, (input,), path, dynamo=False)


def sums(conv: Any, coder: Any, scale: Tensor, bias: Tensor) -> Program:
    """A program whose sums become codes."""
    program = Program(conv.weight.shape[1] * conv.groups)
    given: dict[str, Any] = {"channels": program.operations[0].channels}
    signs = ops.Sign(inputs=(0,), edge=torch.zeros(given["channels"]), **given)
    codes = ops.Quantize(
        inputs=(0,), edges=torch.arange(1, 16) - 0.5, codes=torch.arange(16).byte(), zero=0, step=1.0, **given
    )
    program.add(signs if isinstance(conv, ops.ConvBits) else codes)
    program.add(conv)
    program.add(ops.Affine(inputs=(2,), channels=conv.channels, scale=scale, bias=bias))
    program.outputs = (program.add(coder),)
    return program


@pytest.mark.parametrize(("low", "high", "slope"), [(0, 15, 0.05), (0, 3, 0.1), (-8, 7, 0.02), (0, 1, 1.0)])
@pytest.mark.parametrize("bits", [False, True])
def test_sums_that_become_codes(bits: bool, low: int, high: int, slope: float) -> None:
    """In integers, with the edges that the floats would have; some channels fall, some stay where they are."""
    torch.manual_seed(0)
    scale, bias = torch.randn(64) * slope, torch.randn(64) * high / 2
    scale[:3], bias[:3] = 0, torch.tensor([high + 0.7, low - 0.7, (low + high) // 2])
    kind = ops.ConvBits if bits else ops.ConvCodes
    weight = torch.randint(0, 2, (64, 6, 3, 3)) * 2 - 1 if bits else torch.randint(-7, 8, (64, 6, 3, 3))
    conv = kind(inputs=(1,), channels=64, weight=weight.to(torch.int8), window=Window((3, 3), padding=(1, 0, 1, 0)))
    edges = torch.arange(low, high) + 0.5
    codes = torch.arange(low, high + 1) - low
    quantize = ops.Quantize(inputs=(3,), channels=64, edges=edges, codes=codes.byte(), zero=-low, step=1.0)
    moved, bent = replace(quantize, edges=edges + 3.3), replace(quantize, edges=edges**3)
    uneven = replace(quantize, codes=(codes**2).clamp(max=255).byte())
    for coder in (quantize, ops.Sign(inputs=(3,), channels=64, edge=torch.randn(64) / 10), moved, bent, uneven):
        program = sums(conv, coder, scale, bias)
        input = torch.randn(8, 6, 9, 9) * 8
        _, model = written_as(program, input)
        count = [node.op_type for node in model.graph.node].count("DequantizeLinear")
        assert count == (0 if coder in (bent, uneven) and high - low > 1 else 3)
        assert other_values(program, input)[0] == 0
        (got,) = load(model.SerializeToString(), 1).run(None, {"input": input.numpy()})
        assert torch.equal(torch.from_numpy(got), program.run(input).float())


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


WIDE = {
    "W8A8": (schemes.minmax(8, 8), True),
    "W7A8": (schemes.minmax(7, 8), False),
    "W4A8": (schemes.minmax(4, 8), False),
    "W8A7": (schemes.minmax(8, 7), False),
    "W1A8": (schemes.lsq(1, 8), False),
    "uneven W8A8": (schemes.dorefa(8, 8), True),
    "uneven W7A8": (schemes.dorefa(7, 8), True),  # whole numbers up to 127
    "W2A8": (schemes.minmax(2, 8), False),
    "W8A4": (schemes.minmax(8, 4), False),
}
OPTION = "session.x64quantprecision"


def is_precise(runtime: OnnxModel) -> bool:
    try:
        return runtime.session.get_session_options().get_session_config_entry(OPTION) == "1"
    except RuntimeError:  # it is not set
        return False


@pytest.mark.parametrize("name", mostly_nightly(WIDE, ("W8A8",)))
def test_processors_without_vnni(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime adds two products in 16 bits there, unless it is in its precise mode."""
    input, path = torch.randn(32, 3, 9, 8), tmp_path / "model.onnx"
    scheme, saturates = WIDE[name]
    compared = qconv.export_onnx(trained(chain(activation=nn.ReLU), scheme, input), path, input)
    assert compared.decisions == 0
    assert compared.saturating == (("3", "6") if saturates else ())
    assert (f"unless {OPTION} is 1" in str(compared)) == saturates
    usual, here = OnnxModel(path)(input), torch.cpu.get_capabilities()
    for vnni in ("avx512_vnni", "avx_vnni", "none"):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda vnni=vnni: {vnni: True})
        runtime = OnnxModel(path)
        assert is_precise(runtime) == (saturates and vnni == "none")
        if is_precise(runtime) or not saturates or any(here.get(each) for each in ("avx512_vnni", "avx_vnni")):
            torch.testing.assert_close(runtime(input), usual, rtol=0, atol=1e-5)


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
    input, path = torch.randn(64, 3, 9, 8), tmp_path / "model.onnx"
    model = trained(Residual(nn.Identity if name == "signed" else nn.ReLU), SCHEMES[name], input)
    found = qconv.export_onnx(model, path, input, round_outputs=True)
    assert found.is_rounded
    counts = {"Conv": 2, "QLinearConv": 5, "QLinearAdd": 3, "DequantizeLinear": 1, "Relu": 0}
    run = kinds(path)
    assert {kind: run.count(kind) for kind in counts} == counts
    wanted, got = build(model, input)(input), OnnxModel(path)(input)
    # With 2 or 4 bits a code that falls to the other side of an edge is a large difference, of one output of many.
    assert float((got - wanted).abs().mean()) < (0.02 if name == "lsq8" else 0.15) * float(wanted.abs().mean())


ROUNDED = itertools.product(["bnn", "twn", "lsq8", "n2uq"], [False, True])


@pytest.mark.parametrize(("name", "rounded"), mostly_nightly(ROUNDED, [("bnn", False)]))
def test_what_runtimes_may_fuse_is_in_integers(name: str, rounded: bool, tmp_path: Path) -> None:
    input, path = torch.randn(32, 3, 9, 8), tmp_path / "model.onnx"
    model = trained(Residual(nn.ReLU), SCHEMES[name], input, skip=("stem", "head"))
    qconv.export_onnx(model, path, input, round_outputs=rounded)
    assert guarded(path) == (0 if name == "twn" else 5 if rounded and name != "bnn" else 2)
    one = torch.from_numpy(load(str(path), 1, optimized=False).run(None, {"input": input.numpy()})[0])
    other = OnnxModel(path)(input)
    if rounded:  # a number between two of 256 may fall to either
        assert float((one - other).abs().mean()) < 1e-4 * float(one.abs().max())
    else:
        off = (one - other).abs().amax(1) > 1e-4 * one.abs().max()
        assert int(off.sum()) <= 1, off


@pytest.mark.parametrize("ends", [(0.0, 9.0), (-3.0, 9.0), (-0.5, 2.0), (0.0, 0.0)])
@pytest.mark.parametrize("reader", [2.0, 0.7, 0.037, 0.001])
def test_rounding_a_sum_keeps_the_codes_of_its_reader(reader: float, ends: tuple[float, float]) -> None:
    for signed, lowest, highest in ((False, 0, 255), (True, -127, 127)):
        step, zero = steps_of(*ends, reader, signed)
        low, high = ends
        assert lowest <= zero <= highest
        assert (lowest - zero) * step <= low + step / 2
        assert (highest - zero) * step >= high - step / 2
        if reader * (127 if signed else 255) >= max(high, -low if signed else high - low) > 0:
            input = torch.rand(100_000, dtype=torch.float64) * (high - low) + low
            codes = ((input / step).round() + zero).clamp(lowest, highest) - zero
            assert torch.equal((input / reader).round(), (codes * step / reader).round())
        else:
            assert step >= 1e-30


def test_weights_are_stored_as_integers() -> None:
    torch.manual_seed(0)
    signs = torch.randint(0, 2, (8, 16, 3, 3)) * 2.0 - 1
    factors = torch.rand(8, 1, 1, 1) + 0.5
    for weight, dtype in (
        (signs, np.int8),
        (signs * factors, np.int8),
        (torch.randint(-127, 128, (8, 16, 3, 3)) * factors, np.int8),
        (torch.randint(-8, 8, (8, 16, 3, 3)) * torch.tensor(0.0371), np.int8),
        (2.0 ** torch.randint(-9, 0, (8, 16, 3, 3)) * signs, np.uint8),  # powers of two: a list
        (signs * factors + factors.flip(0) / 3, np.uint8),  # two numbers a channel: a list for each
        (torch.randn(8, 16, 3, 3), np.float32),
    ):
        for form in (Form(17), Form(21, four_bits=True)):
            graph = Graph(form)
            name = graph.node("Identity", graph.weight(weight))
            out = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, weight.shape)
            made = onnx.helper.make_graph(graph.nodes, "weight", [], [out], graph.constants)
            opsets = [onnx.helper.make_opsetid("", form.opset)]
            model = onnx.helper.make_model(made, opset_imports=opsets, ir_version=10)
            (got,) = load(model.SerializeToString(), 1).run(None, {})
            assert torch.equal(torch.from_numpy(got), weight)
            largest = max(graph.constants, key=lambda each: int(np.prod(each.dims)))
            is_small = largest.data_type in (onnx.TensorProto.INT4, onnx.TensorProto.UINT4)
            assert is_small or onnx.numpy_helper.to_array(largest).dtype == dtype


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    program, input = of_functions(name), torch.randn(3, 6, 6, 8)
    for opset in (13, 25):
        program.size = (6, 8)
        _, model = written_as(program, input, opset=opset)
        onnx.checker.check_model(model, full_check=True)
        (got,) = load(model.SerializeToString(), 1, optimized=opset == 25).run(None, {"input": input.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), program.run(input).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scheme", [schemes.lsq(4, 4), schemes.bnn()], ids=["lsq", "bnn"])
def test_deformable_convolutions(scheme: Scheme, tmp_path: Path) -> None:
    geometry: dict[str, Any] = {"stride": 2, "padding": (2, 1), "dilation": (2, 1), "groups": 2}
    layers = [qconv.DeformConv2dPack(8, 6, 3, modulated=False, offset_groups=4), nn.ReLU(), nn.Conv2d(6, 4, 1)]
    model = nn.Sequential(nn.Conv2d(3, 8, 1), qconv.DeformConv2dPack(8, 8, 3, **geometry), *layers)
    input, path = torch.randn(4, 3, 11, 12), tmp_path / "model.onnx"
    model = trained(model, scheme, input, skip=("first", r"2\..*", "last"), check=False)
    for module in model.modules():
        if isinstance(module, qconv.DeformConv2dPack):
            nn.init.normal_(module.conv_offset.weight, std=0.1)
    frozen = qconv.freeze(model, example=input)
    assert sum(isinstance(each, ops.ConvFloats) for each in frozen.program(input).operations) >= 3
    qconv.export(model, path, to="onnx", images=input, opset=19)
    checked = qconv.verify_export(model, path, input)
    assert checked.difference < 1e-5 * max(checked.largest, 1)
    with pytest.raises(ValueError, match="deformable convolutions need an ONNX file with opset=19 or more"):
        qconv.export(model, path, to="onnx", images=input)


def test_gates_keep_the_sign() -> None:
    """Signs may follow: those of numbers as small as torch has them are not the sign of 0."""
    input = torch.linspace(-80, 80, 6 * 48).view(1, 6, 6, 8)
    silu = Program(6)
    silu.outputs = (silu.add(ops.SiLU(channels=6, inputs=(0,))),)
    for program in (silu, of_functions("silu"), of_functions("glu")):
        program.size = (6, 8)
        content = written_as(program, input)[1].SerializeToString()
        (got,) = load(content, 1).run(None, {"input": input.numpy()})
        assert torch.equal(torch.from_numpy(got).signbit(), program.run(input).signbit())
        torch.testing.assert_close(torch.from_numpy(got), program.run(input), rtol=1e-5, atol=0)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("scheme", [schemes.bwn(), schemes.lsq(4, 4), schemes.adabin()], ids=lambda scheme: scheme.name)
def test_padding_modes(scheme: Scheme, mode: Any, tmp_path: Path) -> None:
    layer = qconv.QConv2d(4, 6, (3, 2), stride=2, padding=(1, 2), padding_mode=mode, scheme=scheme)
    model, x = nn.Sequential(layer, nn.ReLU()), torch.randn(3, 4, 9, 8)
    model(x).sum().backward()
    qconv.export_onnx(model.eval(), tmp_path / "model.onnx", x)
    torch.testing.assert_close(OnnxModel(tmp_path / "model.onnx")(x), model(x))


def test_codes_of_volumes_that_cancel_out(tmp_path: Path) -> None:
    """Their sum is 0, of which signs follow; with a scale in the weights, it would not be."""
    conv, x = nn.Conv3d(8, 8, 3, bias=False), torch.randn(16, 3, 7, 7, 7)
    model = nn.Sequential(nn.Conv3d(3, 8, 3), conv, nn.Conv3d(8, 8, 3), nn.Flatten(), nn.Linear(8, 5))
    qconv.convert(model, schemes.lsq(4, 4), skip=("first",), overrides={"2": schemes.bnn()}, check=False)
    qconv.calibrate(model, [x])
    qconv.export_onnx(model.eval(), tmp_path / "model.onnx", x)
    torch.testing.assert_close(OnnxModel(tmp_path / "model.onnx")(x), model(x), rtol=1e-4, atol=1e-4)
    assert (conv(model[0](x)) == 0).any()


class Tokens(nn.Module):
    """Pixels before images, as attention of old takes them."""

    def forward(self, input: Tensor) -> Tensor:
        tokens = input.flatten(2).permute(2, 0, 1)
        tokens = torch.stack([tokens, tokens.abs()], 3).amax(3) + tokens.std(2, keepdim=True)
        return tokens.permute(1, 2, 0).reshape(input.shape)


@pytest.mark.parametrize("target", ["onnx", "openvino", "qonnx"])
def test_images_that_do_not_come_first(target: str, tmp_path: Path) -> None:
    path, images = tmp_path / f"model.{'xml' if target == 'openvino' else 'onnx'}", torch.randn(5, 3, 6, 6)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), Tokens(), qconv.QConv2d(8, 5, 3, scheme=schemes.lsq(4, 4)))
    qconv.calibrate(model, [images])
    qconv.export(model.eval(), path, to=target, images=images)
    for count in (1, 3):
        assert qconv.verify_export(model, path, images[:count]).agrees


def test_signs_around_a_mean_after_global_pooling(tmp_path: Path) -> None:
    first, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1)), torch.randn(4, 3, 9, 8)
    model = nn.Sequential(first, qconv.QConv2d(8, 6, 1, scheme=schemes.siman())).eval()
    qconv.export_onnx(model, tmp_path / "model.onnx", x)
    torch.testing.assert_close(OnnxModel(tmp_path / "model.onnx")(x), model(x))


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (aten.logcumsumexp.default, "'part': aten.logcumsumexp.default can't be written as ONNX"),
        (nn.RReLU(), "can't be written as ONNX: use another function there"),
        (F.softsign, "'part': softsign can't be written as ONNX: use another function there"),
        (aten.avg_pool2d.default, "'part': aten.avg_pool2d.default with these arguments can't be written"),
    ],
)
def test_functions_that_onnx_has_not(function: Any, words: str) -> None:
    program = Program(6)
    arguments = (X, [3, 3], [1, 1], [0, 0], False, True, 3) if function is aten.avg_pool2d.default else (X, 1)
    arguments = arguments if isinstance(function, torch._ops.OpOverload) else (X,)
    given: dict[str, Any] = {"channels": 6, "origin": "part"}
    program.outputs = (program.add(ops.Function(inputs=(0,), function=function, arguments=arguments, **given)),)
    with pytest.raises(ValueError, match=re.escape(words)):
        written_as(program, torch.randn(2, 6, 6, 8))


@pytest.mark.parametrize("ceil", [False, True])
def test_operations_on_floats(ceil: bool) -> None:
    """Those that the networks above lack: windows, gates, channels beside each other."""
    program = Program(4)
    of_four: dict[str, Any] = {"channels": 4, "inputs": (0,)}
    window = Window((3, 2), (2, 2), (1, 0, 1, 1), (1, 1), ceil)
    program.add(ops.Average(window=window, **of_four))
    program.add(ops.Maximum(window=window, **of_four))
    program.add(ops.Multiply(channels=4, inputs=(1, 2)))
    program.add(ops.Mean(channels=4, inputs=(3,)))
    program.add(ops.Multiply(channels=4, inputs=(3, 4), is_gate=True))
    program.add(ops.Take(channels=9, inputs=(5,), stride=(2, 1), first=2))
    program.add(ops.PReLU(channels=9, inputs=(6,), slope=torch.linspace(-1, 1, 9)))
    program.outputs = (program.add(ops.Clamp(channels=9, inputs=(7,), low=-0.5)),)
    for size in ((9, 8), (12, 7)):
        assert other_values(program, torch.randn(3, 4, *size))[2] < 1e-6


@pytest.mark.nightly
def test_a_network_of_the_zoo(tmp_path: Path) -> None:
    model, input = qconv.load("resnet20-lsq4-cifar10"), torch.randn(16, 3, 32, 32)
    qconv.export_onnx(model, tmp_path / "model.onnx", input[:1])
    program = build(model, input).program(input)
    assert other_values(program, input)[0] == 0
    assert kinds(tmp_path / "model.onnx").count("QLinearConv") == 9
    assert OnnxModel(tmp_path / "model.onnx")(input[:0]).shape == (0, 10)
    assert (tmp_path / "model.onnx").stat().st_size < 320_000


class Several(nn.Module):
    """A class for each image, and one for each pixel."""

    def __init__(self, join: Any) -> None:
        super().__init__()
        self.stem, self.join = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)), join
        self.head, self.mask = nn.Linear(8, 5), nn.Conv2d(8, 2, 1)

    def forward(self, input: Tensor) -> Any:
        hidden = self.stem(input).relu()
        return self.join(self.head(hidden.mean((2, 3))), self.mask(hidden))


@pytest.mark.parametrize(
    ("join", "names"),
    [
        (lambda one, two: (one, [two]), ["output_0", "output_1_0"]),
        (lambda one, two: {"mask": two}, ["mask"]),
        (lambda one, two: (one[:, 0], two), ["output_0", "output_1"]),  # (N,)
    ],
)
def test_several_outputs(join: Any, names: list[str], tmp_path: Path) -> None:
    input, path = torch.randn(6, 3, 9, 8), tmp_path / "model.onnx"
    model = trained(Several(join), schemes.lsq(4, 4), input)
    assert qconv.export_onnx(model, path, input).close == 6
    runtime = OnnxModel(path)
    assert runtime.names == names
    wanted, got = leaves(model(input)), leaves(runtime(input))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    mask: Any = model.mask
    mask.bias.data[0] += 100  # a planted error
    compared = compare_onnx(model, path, input)
    assert (compared.close, compared.decisions) == (0, 6)


def test_transposed_convolutions_of_signs(tmp_path: Path) -> None:
    input, path = torch.randn(6, 3, 6, 6), tmp_path / "model.onnx"
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 4, 2, 1), nn.Conv2d(4, 2, 1)
    model = trained(nn.Sequential(*layers), schemes.bnn(), input)
    assert qconv.export_onnx(model, path, input).close == 6


def test_images_of_any_size(tmp_path: Path) -> None:
    input, path = torch.randn(4, 3, 16, 16), tmp_path / "model.onnx"
    model = trained(Residual(nn.ReLU), schemes.lsq(4, 4), input)
    frozen = build(model, input)
    qconv.export_onnx(nn.DataParallel(model), path, input, metadata={"classes": '["cat", "dog"]'})
    session = onnxruntime.InferenceSession(path)
    assert session.get_inputs()[0].shape == ["batch", 3, "height", "width"]
    told = session.get_modelmeta().custom_metadata_map
    assert told == {"classes": '["cat", "dog"]', "qconv.round_outputs": "false", "qconv.saturating_layers": ""}
    for size in ((16, 16), (24, 20), (17, 23)):
        agree(model, frozen, path, torch.randn(3, 3, *size))
    flat = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 5))
    model = trained(flat, schemes.lsq(4, 4), input := torch.randn(4, 3, 8, 8))
    qconv.export_onnx(model, path, input)
    assert onnxruntime.InferenceSession(path).get_inputs()[0].shape == ["batch", 3, 8, 8]
    with pytest.raises(ValueError, match=r"input \(of shape \(4, 3, 9, 9\)\)"):
        OnnxModel(path)(torch.randn(4, 3, 9, 9))


class Seen(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, input: Tensor) -> Tensor:
        return self.function(input)


@pytest.mark.parametrize(
    ("function", "takes_all"),
    [
        (lambda x: x / x.var((2, 3), keepdim=True), False),  # whose nodes hold the number of pixels
        (lambda x: x.roll(1, 3), False),
        (lambda x: F.interpolate(x, 5), False),
        (F.selu, True),
        (lambda x: x * x.amax(1, True).sigmoid(), True),
        (nn.GroupNorm(2, 8), True),
        (nn.InstanceNorm2d(8), True),
    ],
)
def test_functions_of_the_size(function: Any, takes_all: bool, tmp_path: Path) -> None:
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), Seen(function), nn.Conv2d(8, 4, 1)
    model = trained(nn.Sequential(*layers), schemes.lsq(4, 4), input := torch.randn(4, 3, 8, 8))
    qconv.export_onnx(model, path := tmp_path / "model.onnx", input)
    sides = ["height", "width"] if takes_all else [8, 8]
    assert onnxruntime.InferenceSession(path).get_inputs()[0].shape == ["batch", 3, *sides]
    if takes_all:
        torch.testing.assert_close(OnnxModel(path)(input := torch.randn(4, 3, 12, 9)), model(input))


def full(_: int) -> None:
    raise OSError(28, "No space left on device")


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    input = torch.randn(4, 3, 8, 8)
    model = trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)), schemes.bnn(), input, skip=())
    path = tmp_path / "model.onnx"
    no: Any = {"classes": ["cat"]}
    for example, options, kind, words in (
        (3, {}, TypeError, "example (int) must be a float tensor (N, C, H, W)"),
        (input.int(), {}, TypeError, "example (torch.int32) must be a float tensor"),
        (
            input[:0],
            {},
            ValueError,
            "example (of shape (0, 3, 8, 8)) must be (N, C, H, W) and hold at least one sample",
        ),
        (input * torch.nan, {}, ValueError, "example has NaN or inf"),
        (input[:, :2], {}, ValueError, "example (of shape (4, 2, 8, 8)) does not suit the model"),
        (input, {"opset": 12}, ValueError, "opset (=12) must be from 13 to 25, and from 21 on with four_bits"),
        (input, {"opset": 17, "four_bits": True}, ValueError, "opset (=17) must be from 13 to 25, and from 21 on"),
        (input, {"signed": True, "clamp_by_saturation": True}, ValueError, "signed and clamp_by_saturation exclude"),
        (input, {"metadata": no}, TypeError, "metadata['classes'] (=['cat']) must be a string"),
    ):
        with pytest.raises(kind, match=re.escape(words)):
            qconv.export_onnx(model, path, example, **options)  # pyright: ignore
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
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left on device"):
        qconv.export_onnx(model, path, input)
    assert not list(tmp_path.iterdir())
