"""Targets: what their own runtimes compute from the files that qconv writes is what the program defines."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from functions import FUNCTIONS, of_functions
from settings import mostly_nightly
from test_program import NETWORKS, Attentive, every, network, trained
from torch import Tensor, nn

import qconv
from qconv import schemes
from qconv.cli.export import OTHERS
from qconv.cli.verify import INTERPRETERS
from qconv.export.comparison import CodesCheck, ExportVerification
from qconv.export.requantization import requantized
from qconv.export.targets import TARGETS, run
from qconv.inference.build import build
from qconv.kernels.onednn import has_fast_integers
from qconv.methods.lsq import LSQInput
from qconv.program import operations as ops
from qconv.program.edges import edges_of, float_at, place_of
from qconv.program.operations import Program, Window

SUFFIXES = {target: kind.suffix for target, kind in TARGETS.items() if kind.has_codes}
EACH = mostly_nightly(SUFFIXES, [target for target in SUFFIXES if target != "executorch"])
PACKAGES = {"litert": "ai_edge_litert"}


def written(target: str, program: Program, images: Tensor, folder: Path) -> list[Any]:
    """The outputs of each interpreter of the target for the program's file, and the codes inside."""
    pytest.importorskip(PACKAGES.get(target, target))
    module: Any = import_module(f"qconv.export.{target}")
    path = folder / f"model{SUFFIXES[target]}"
    module.write(program, path, images)
    interpreters = [[name] for name in TARGETS[target].interpreters if name != "micro" or runs_in_micro(path)]
    return [module.run(path, images.numpy(), *interpreter) for interpreter in interpreters or [[]]]


def runs_in_micro(path: Path) -> bool:
    """Whether LiteRT for Microcontrollers is there, and has the operators of a file; else it must refuse the file."""
    from ai_edge_litert import schema_py_generated as schema

    from qconv.export.litert import run

    if find_spec("tflite_micro") is None:
        return False
    model: Any = schema.ModelT.InitFromPackedBuf(path.read_bytes(), 0)
    if schema.BuiltinOperator.BUCKETIZE not in {code.builtinCode for code in model.operatorCodes}:
        return True
    with pytest.raises(ValueError, match="LiteRT for Microcontrollers can't run the file"):
        run(path, np.zeros((1, *model.subgraphs[0].tensors[0].shape[1:]), np.float32).transpose(0, 3, 1, 2), "micro")
    return False


def check_codes(program: Program, images: Tensor, found: dict[str, Any]) -> None:
    """All codes are those of the floats that the runtime itself has before them, or of the exact sums of its codes."""
    own: list[Tensor] = []
    for number, operation in enumerate(program.operations):
        value = operation.run(*(own[place] for place in operation.inputs)) if operation.inputs else images
        if isinstance(operation, ops.Quantize | ops.Sign):
            floats = torch.as_tensor(found.get(f"{number}.input", own[operation.inputs[0]]))
            zero = operation.zero if isinstance(operation, ops.Quantize) else 0
            value = torch.from_numpy(found[f"{number}.codes"]) + zero
            assert torch.equal(operation.run(floats).to(value.dtype), value), operation.origin
        own.append(value)


def check(target: str, program: Program, images: Tensor, folder: Path) -> list[dict[str, Any]]:
    wanted, runs = program.run(images).numpy(), written(target, program, images, folder)
    for (output,), found in runs:
        check_codes(program, images, found)
        is_close = np.abs(output.reshape(wanted.shape) - wanted).max() <= 2e-6 * np.abs(wanted).max()
        if not is_close and target == "openvino" and not has_fast_integers():
            pytest.skip("its sums of 8 bits may saturate on this processor, as docs/shipping.md says")
        assert is_close
    return [found for _, found in runs]


def evened(quantize: ops.Quantize) -> ops.Quantize:
    """The same bits, with even levels and ties that go to even codes."""
    low, high = -quantize.zero, len(quantize.codes) - 1 - quantize.zero
    edges = edges_of(lambda x: (x / 0.3).clamp(low, high).round(), low, high, 0.3)
    return replace(quantize, edges=edges, codes=torch.arange(len(quantize.codes)).byte(), step=0.3)


def each(*names: Any, some: Any) -> list[Any]:
    """Parameters: each name for each target; only some by default, and for ExecuTorch, which takes 10 seconds each."""
    return mostly_nightly(
        [(target, *name) for name in names for target in SUFFIXES if target != "executorch" or name in some],
        [(target, *name) for name in some for target in SUFFIXES if target != "executorch"],
    )


@pytest.mark.parametrize(
    ("target", "kinds", "groups"), each(*product((0, 1, 2), (1, 2, 6)), some=[(0, 6), (1, 2), (2, 1)])
)
def test_every_operation(target: str, kinds: int, groups: int, tmp_path: Path) -> None:
    program = every(kinds, groups)
    if target == "qonnx":
        program.operations = [evened(o) if isinstance(o, ops.Quantize) else o for o in program.operations]
    check(target, program, torch.randn(3, 5, 17, 14), tmp_path)


def plain() -> nn.Sequential:
    """Convolutions of all kinds without a shortcut."""

    def block(*sizes: int, **kind: Any) -> list[nn.Module]:
        norm = nn.BatchNorm2d(sizes[1])
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
        return [nn.Conv2d(*sizes, **kind, bias=False), norm, nn.ReLU()]

    return nn.Sequential(
        *block(3, 16, 3, padding=1),
        *block(16, 16, 3, groups=16, stride=2, padding=1),
        *block(16, 32, 1),
        nn.MaxPool2d(3, 2, padding=1),
        *block(32, 24, 3, padding=2, dilation=2, groups=2),
        nn.MaxPool2d(2, ceil_mode=True),
        *block(24, 16, 3, padding=1),
        *block(16, 16, 2),
        nn.AvgPool2d(3, 1, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


MADE: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda name=name: network(name) for name in NETWORKS if name not in ("float", "bireal")},
    "lsq33": lambda: trained(NETWORKS["lsq44"][0](), schemes.lsq(3, 3), torch.randn(8, 3, 16, 16)),
    "ternary": lambda: trained(
        NETWORKS["lsq44"][0](),
        replace(schemes.lsq(2, 2), weight=schemes.twn().weight),
        torch.randn(8, 3, 16, 16),
    ),
    "gates": lambda: trained(Attentive(), schemes.lsq(4, 4), torch.randn(8, 3, 16, 16)),
    "adabin": lambda: trained(NETWORKS["reactnet"][0](), schemes.adabin(), torch.randn(8, 3, 16, 16)),
    "plain": lambda: trained(plain(), schemes.lsq(4, 4), torch.randn(8, 3, 16, 16)),
    "depthwise": lambda: trained(
        nn.Sequential(
            *(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 8, 3, padding=1, groups=8)),
            *(nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 16, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
            nn.Linear(16, 10),
        ),
        schemes.minmax(8, 8),
        torch.randn(8, 3, 32, 32),
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize(("target", "name"), each(*zip(MADE), some=[("reactnet",), ("gates",), ("adabin",)]))
def test_networks(target: str, name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 3, 17, 13)
    program = build(MADE[name](), images).program(images)
    if (target, name) in (("qonnx", "apot44"), ("qonnx", "n2uq22")):
        with pytest.raises(ValueError, match=r"'stages\.0\.0\.conv1': its codes are uneven or have an offset, and"):
            written(target, program, images, tmp_path)
        assert not list(tmp_path.iterdir())
    else:
        check(target, program, images, tmp_path)


def near(target: str, edges: Tensor) -> Tensor:
    """Each edge and the three floats on both sides, and the ends; XNNPACK takes denormals as 0."""
    floats = float_at(place_of(edges[edges.isfinite()]).unsqueeze(1) + torch.arange(-3, 4)).flatten()
    floats = torch.cat([floats, torch.tensor([0.0, -0.0, 1e30, -1e30])])
    is_normal = (floats.abs() >= torch.finfo(torch.float32).tiny) | (floats == 0)
    return (floats[is_normal] if target in ("litert", "executorch") else floats).view(1, 1, 1, -1)


STEPS = 1.0, 0.0371, 0.31407
ENDS = (0, 15), (-8, 7), (0, 255), (-128, 127), (-3, 3), (-100, 155)


@pytest.mark.parametrize(
    ("target", "step", "ends"), each(*product(STEPS, ENDS), some=[(0.0371, (-100, 155)), (1.0, (0, 255))])
)
def test_codes_change_at_the_edges(target: str, step: float, ends: tuple[int, int], tmp_path: Path) -> None:
    low, high = ends
    number = torch.tensor(step)
    edges = edges_of(lambda x: (x / number).clamp(low, high).round(), low, high, step)
    program = Program(1)
    levels = torch.arange(high - low + 1, dtype=torch.uint8)
    given: dict[str, Any] = {"channels": 1, "origin": "layer"}
    program.add(ops.Quantize(**given, inputs=(0,), edges=edges, codes=levels, zero=-low, step=step))
    weight = torch.ones(1, 1, 1, 1, dtype=torch.int8)
    program.outputs = (program.add(ops.ConvCodes(**given, inputs=(1,), weight=weight, window=Window(), zero=-low)),)
    check(target, program, near(target, edges), tmp_path)


@pytest.mark.parametrize(
    ("target", "edge"), each(*zip([0.0, -0.3, 1e-30, torch.inf, -torch.inf]), some=[(-0.3,), (1e-30,), (torch.inf,)])
)
def test_signs_change_at_the_edge(target: str, edge: float, tmp_path: Path) -> None:
    program = Program(1)
    given: dict[str, Any] = {"channels": 1, "origin": "layer"}
    program.add(ops.Sign(**given, inputs=(0,), edge=torch.tensor([edge])))
    weight = torch.ones(1, 1, 1, 1, dtype=torch.int8)
    program.outputs = (program.add(ops.ConvBits(**given, inputs=(1,), weight=weight, window=Window())),)
    check(target, program, near(target, torch.tensor([edge])), tmp_path)


@pytest.mark.parametrize("target", mostly_nightly(TARGETS, ("litert", "program")))
def test_a_file_is_exported_and_verified_in_its_runtime(target: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES.get(target, "torch" if target in ("program", "pt2") else target))
    model, images = network("lsq44"), torch.randn(4, 3, 16, 16)
    path = tmp_path / f"model{TARGETS[target].suffix}"
    qconv.export(model, path, to=target, images=images)
    found = qconv.verify_export(model, path, images)
    assert (found.target, found.samples, found.agrees, found.decisions) == (target, 4, True, 0), str(found)
    assert len(found.layers) == (5 if TARGETS[target].has_codes else 0)
    assert sum(layer.codes for layer in found.layers) == (65_536 if TARGETS[target].has_codes else 0)
    other = trained(NETWORKS["lsq44"][0](), schemes.lsq(4, 4), torch.randn(8, 3, 16, 16))
    assert not qconv.verify_export(other, path, images).agrees
    for interpreter in TARGETS[target].interpreters:
        if interpreter != "micro" or find_spec("tflite_micro") is not None:
            found = qconv.verify_export(model, path, images[:1], interpreter=interpreter)
            assert (found.agrees, found.interpreter, len(found.layers)) == (True, interpreter, 5), str(found)
            assert f"{target} ({interpreter}): 0 of 1 predicted classes differ" in str(found)
    signals = torch.randn(4, 3, 40)
    layers = nn.Conv1d(3, 8, 5, 2), nn.BatchNorm1d(8), nn.ReLU(), nn.Conv1d(8, 8, 3, padding=1), nn.Conv1d(8, 4, 1)
    model = trained(nn.Sequential(*layers), schemes.minmax(8, 8), signals)
    qconv.export(model, path, to=target, images=signals)
    assert qconv.verify_export(model, path, signals).agrees
    with pytest.raises(ValueError, match=r"interpreter \(='other'\) (must be one of xnnpack, builtin,|is for LiteRT)"):
        qconv.verify_export(model, path, images, interpreter="other")


class Several(nn.Module):
    """A class for each image, and one for each pixel, which a layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.mask, self.head = nn.Conv2d(8, 2, 1), nn.Linear(2, 5)

    def forward(self, input: Tensor) -> dict[str, Any]:
        mask = self.mask(self.stem(input).relu())
        return {
            "mask": mask,
            "again": mask,
            "input": input,
            "more": [self.head(mask.mean((2, 3)))],
            "more_0": mask,
            "": mask,
        }


@pytest.mark.parametrize("target", mostly_nightly(TARGETS, [target for target in TARGETS if target != "executorch"]))
def test_several_outputs(target: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES.get(target, target if TARGETS[target].has_codes or target == "onnx" else "torch"))
    model, path = trained(Several(), schemes.lsq(4, 4), x := torch.randn(6, 3, 9, 8)), tmp_path / TARGETS[target].file
    qconv.export(model, path, to=target, images=x)
    for interpreter in TARGETS[target].interpreters or (None,):
        found = qconv.verify_export(model, path, x, interpreter=interpreter)
        assert (found.agrees, found.decisions, found.difference < 1e-5) == (True, 0, True)
        names = ["mask", "again", "input_", "more_0", "more_0_", "output"]
        assert [layer.name for layer in found.layers[-6:]] == names * TARGETS[target].has_codes
    mask: Any = model.mask
    mask.bias.data[0] += 100  # a planted error
    assert qconv.verify_export(model, path, x).decisions == 6


@pytest.mark.parametrize("target", ["onnx", "openvino", "qonnx", "litert"])
def test_outputs_that_are_no_samples(target: str, tmp_path: Path) -> None:
    """A mask of booleans, and one class for each pixel."""
    pytest.importorskip(PACKAGES.get(target, target))

    class Pixels(nn.Sequential):
        def forward(self, input: Tensor) -> tuple[Tensor, ...]:
            output = super().forward(input)
            return output > 0, output.permute(0, 2, 3, 1).reshape(-1, 4)

    network = Pixels(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1))
    model, path = trained(network, schemes.lsq(4, 4), x := torch.randn(5, 3, 6, 7)), tmp_path / TARGETS[target].file
    qconv.export(model, path, to=target, images=x)
    found = qconv.verify_export(model, path, x)
    assert (found.agrees, found.decisions, found.difference < 1e-5) == (True, 0, True)
    last: Any = model.get_submodule("2")
    last.bias.data[0] += 100  # a planted error
    assert qconv.verify_export(model, path, x).decisions == 5


@pytest.mark.parametrize(
    ("target", "suffix", "module"),
    [("program", "qcp", ""), ("pt2", "pt2", ""), ("onnx", "onnx", "onnx"), ("litert", "tflite", "ai_edge_litert")],
)
def test_the_only_output_in_a_dict_is_written(target: str, suffix: str, module: str, tmp_path: Path) -> None:
    """As in the outputs of torchvision's segmentation networks and of Hugging Face's classifiers."""
    if module:
        pytest.importorskip(module)

    class Named(nn.Sequential):
        def forward(self, input: Tensor) -> dict[str, Tensor]:
            return {"out": super().forward(input)}

    network = Named(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 4, 1))
    model = trained(network, schemes.lsq(4, 4), x := torch.randn(2, 3, 8, 8))
    program = qconv.export(model, path := tmp_path / f"model.{suffix}", to=target, images=x)
    assert program is None or program.size is None
    found = qconv.verify_export(model, path, x)
    assert (found.agrees, found.decisions, found.difference < 1e-5) == (True, 0, True)


def test_codes_that_differ_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    from qconv.export import litert

    def shifted(writer: Any, quantize: ops.Quantize, x: int) -> int:
        return right(writer, replace(quantize, edges=quantize.edges * 1.01, step=quantize.step * 1.01), x)

    model, images, path = network("lsq44"), torch.randn(4, 3, 16, 16), tmp_path / "model.tflite"
    right = litert._Writer._quantize
    monkeypatch.setattr(litert._Writer, "_quantize", shifted)
    qconv.export(model, path, to="litert", images=images)
    found = qconv.verify_export(model, path, images)
    assert not found.agrees
    assert found.layers[0].own > 0
    assert f"not equal: {found.layers[0].own:,} codes of 'stages.0.0.conv1' are not those" in str(found)


def test_why_floats_differ_depends_on_the_target() -> None:
    layer = CodesCheck("last", codes=1, floats=1.0, largest=1.0)
    for target, why in (("litert", "with round_outputs"), ("openvino", "without VNNI"), ("qonnx", "")):
        text = str(ExportVerification(target, (layer,), 0, 1, 1.0, 1.0, {}))
        assert "not equal: floats before 'last' differ by 1.0e+00, more than by the order of sums" in text
        assert why in text
        assert ("round_outputs" in text) == (target == "litert")
    close, far = (ExportVerification("onnx", (), 1, 4, difference, 20.0, {}) for difference in (1e-6, 1e-4))
    assert close.agrees  # classes of equal outputs
    assert not far.agrees


LACKED = {  # functions that a target refuses
    "openvino": {"average with padding, up"},
    "qonnx": set[str](),
    "litert": {
        *("gelu", "erf", "atan", "truncated", "argmax", "expand", "zeros", "ones", "sum of several"),
        *("bicubic", "bicubic aligned", "circular", "shuffle"),
        *("average", "average with padding", "largest", "adaptive", "average of volumes", "largest of volumes"),
        *("adaptive volumes", "linear signals", "transposed", "dilated", "norm of batches"),
        *("times images", "bilinear to a part of a pixel"),
        "average with padding, up",
    },
}


USUAL = "tanh", "elu", "mish", "softmax", "max", "variance", "group norm", "reflect", "cat", "bicubic"
EACH_FUNCTION = [(target, name) for target in LACKED for name in FUNCTIONS]


@pytest.mark.parametrize(("target", "name"), mostly_nightly(EACH_FUNCTION, [(t, n) for t in LACKED for n in USUAL]))
def test_functions(target: str, name: str, tmp_path: Path) -> None:
    program, images, path = of_functions(name), torch.randn(3, 6, 6, 8), tmp_path / f"model{SUFFIXES[target]}"
    program.size, writer = (6, 8), import_module(f"qconv.export.{target}")
    if name in LACKED[target]:
        with pytest.raises(ValueError, match="can't be written for"):
            writer.write(program, path, images)
        return
    writer.write(program, path, images)
    (got,), _ = writer.run(path, images.numpy())
    batches = images.split(1 if target == "qonnx" else 3)  # of which each file of QONNX takes one
    wanted = torch.cat([program.run(batch).float() for batch in batches])
    torch.testing.assert_close(torch.from_numpy(got).view(wanted.shape), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("target", LACKED)
@pytest.mark.parametrize(("size", "wanted"), [((56, 63), (8, 9)), ((98, 45), (7, 3)), ((2, 33), (41, 10))])
def test_pixels_are_torchs(target: str, size: Any, wanted: Any, tmp_path: Path) -> None:
    """Where a place is nearly whole, runtimes' own operators take the pixel before."""
    pytest.importorskip(PACKAGES.get(target, target))
    for function in (torch.ops.aten.upsample_nearest2d.default, torch.ops.aten._upsample_nearest_exact2d.default):
        program, path = Program(3), tmp_path / f"model{SUFFIXES[target]}"
        arguments = ops.Given(0), [*wanted]
        program.outputs = (program.add(ops.Function(inputs=(0,), channels=3, function=function, arguments=arguments)),)
        program.size, writer = size, import_module(f"qconv.export.{target}")
        writer.write(program, path, images := torch.randn(1, 3, *size))
        assert torch.equal(torch.from_numpy(writer.run(path, images.numpy())[0][0]), function(images, [*wanted]))


@pytest.mark.parametrize("target", EACH)
def test_a_function_that_a_target_does_not_have_is_refused_by_its_layer(target: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES.get(target, target))
    program, images = Program(3), torch.zeros(1, 3, 4, 4)
    given: dict[str, Any] = {"inputs": (0,), "channels": 3, "origin": "gate.act"}
    program.outputs = (program.add(ops.Function(**given, function=torch.ops.aten.erfinv.default)),)
    with pytest.raises(ValueError, match=r"'gate\.act': aten\.erfinv(\.default)? can't be written"):
        import_module(f"qconv.export.{target}").write(program, tmp_path / f"model{SUFFIXES[target]}", images)
    assert not list(tmp_path.iterdir())


def test_mistakes_of_exports(tmp_path: Path) -> None:
    model, images = network("lsq44"), torch.randn(2, 3, 16, 16)
    given: dict[str, Any] = {"to": "program", "images": images}
    for error, path, changed, message in [
        (ValueError, "a", {"to": "tflite"}, r"to \(='tflite'\) must be one of 'program', 'litert'"),
        (TypeError, "a", {"images": images[0, 0, 0]}, r"images \(\(16,\)\) must be a float tensor"),
        (
            ValueError,
            "a",
            {"images": images[:0]},
            r"images \(of shape \(0, 3, 16, 16\)\) must hold at least one sample",
        ),
        (FileNotFoundError, "none/a", {}, "there is no folder"),
        (
            TypeError,
            "a",
            {"four_bits": True},
            r"four_bits \(=True\) is no option of to='program', which has no options",
        ),
        (ValueError, "a", {"to": "litert", "four_bits": True, "round_outputs": True}, "exclude each other"),
        (TypeError, "a", {"to": "litert", "opset": 17}, r"opset \(=17\) is no option of .*, which has only four_bits"),
    ]:
        with pytest.raises(error, match=message):
            qconv.export(model, tmp_path / path, **given | changed)
    with pytest.raises(ValueError, match="model is frozen: pass the trained one"):
        qconv.export(build(model, images), tmp_path / "a", to="onnx", images=images)
    (tmp_path / "a.txt").write_text("")
    for name, message in (("none.xml", "there is no such file"), ("a.txt", r"it must end in \.onnx, \.pt2, \.pte,")):
        with pytest.raises(ValueError, match=message):
            qconv.verify_export(model, tmp_path / name, images)
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]
    assert {*TARGETS} == {*OTHERS, "onnx"}
    assert TARGETS["litert"].interpreters == INTERPRETERS


@pytest.mark.parametrize(
    ("target", "scheme", "count"),
    mostly_nightly(
        [
            *(("litert", f"lsq{bits}{bits}", 4) for bits in (2, 3, 4)),
            *product(["litert", "executorch"], ["bnn", "signed"], [4]),
            ("executorch", "lsq44", 4),
            ("litert", "minmax", 0),
        ],
        [("litert", "bnn", 4), ("litert", "lsq44", 4)],
    ),
)
def test_convolutions_are_in_bytes_where_kernels_are_exact(
    target: str, scheme: str, count: int, tmp_path: Path
) -> None:
    """Down to the last sum: kernels for phones and for microcontrollers round otherwise."""
    pytest.importorskip(PACKAGES.get(target, target))
    torch.manual_seed(0)
    made = {
        "bnn": schemes.bnn(),
        "signed": replace(schemes.lsq(4, 4), input=partial(LSQInput, 4, signed=True)),
        "minmax": schemes.minmax(8, 8),
    } | {f"lsq{bits}{bits}": schemes.lsq(bits, bits) for bits in (2, 3, 4)}
    model = trained(plain(), made[scheme], torch.randn(8, 3, 16, 16))
    images = torch.randn(16, 3, 18, 15)
    program = build(model, images).program(images)
    for names in check(target, program, images, tmp_path):
        kinds = [name.partition(".")[2] for name in names]
        assert kinds.count("codes") - kinds.count("input") == count


class Dead(nn.Module):
    """A quantizer of the image, a branch that is 0 for all images, and a batch norm of factors 0."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.last = nn.BatchNorm2d(8), nn.Linear(8, 10)
        nn.init.constant_(self.second.bias, -100.0)  # pyright: ignore
        nn.init.zeros_(self.norm.weight)

    def forward(self, input: Tensor) -> Tensor:
        input = self.first(input).relu()
        input = input + self.second(input).relu()
        return self.last((input + self.norm(self.third(input))).relu().mean((2, 3)))


ROUNDED = [
    *product(["litert", "executorch"], ["dead"], ["minmax"]),
    *product(["litert"], ["lsq44", "plain"], ["lsq44", "minmax", "signed", "apot"]),
    *product(["executorch"], ["lsq44", "plain"], ["minmax", "signed"]),
]


@pytest.mark.parametrize(
    ("target", "name", "scheme"),
    mostly_nightly(
        ROUNDED, [("litert", "lsq44", "minmax"), ("litert", "plain", "signed"), ("litert", "dead", "minmax")]
    ),
)
def test_outputs_are_rounded_to_bytes(target: str, name: str, scheme: str, tmp_path: Path) -> None:
    """A code may be off by one: kernels round sums of bytes, and biases are whole."""
    pytest.importorskip(PACKAGES.get(target, target))
    torch.manual_seed(0)
    made = {
        "lsq44": schemes.lsq(4, 4),
        "minmax": schemes.minmax(8, 8),
        "signed": replace(schemes.lsq(8, 8), input=partial(LSQInput, 8, signed=True)),
        "apot": schemes.apot(4, 4),
    }
    images, path = torch.randn(64, 3, 18, 15), tmp_path / f"model{SUFFIXES[target]}"
    networks, skip = {"plain": plain, "dead": Dead}, () if name == "dead" else ("first", "last")
    model = trained(networks.get(name, NETWORKS["lsq44"][0])(), made[scheme], images, skip=skip)
    qconv.export(model, path, to=target, images=images, round_outputs=True)
    program = build(model, images).program(images)
    if target == "litert":
        of_codes = sum(type(each) is ops.ConvCodes for each in program.operations)
        assert convolutions_in_bytes(path) == of_codes - (2 if scheme == "apot" else 0)  # the codes of which are uneven
    wanted = program.run(images)
    for interpreter in TARGETS[target].interpreters or (None,):
        if interpreter == "micro" and not runs_in_micro(path):
            continue
        ((output,), found), own = run(path, images, interpreter), list[Tensor]()
        for number, operation in enumerate(program.operations):
            value = operation.run(*(own[place] for place in operation.inputs)) if operation.inputs else images
            if isinstance(operation, ops.Quantize):
                floats = found.get(f"{number}.input", own[operation.inputs[0]])
                value = found[f"{number}.codes"] + operation.zero
                off = (operation.run(floats.contiguous()).float() - value).abs()
                assert off.max() <= 1
                assert off.mean() < 0.002
            own.append(value)
        most = 0.15 if scheme == "apot" else 0.01
        assert float((output - wanted).abs().mean()) < most * float(wanted.abs().mean())


@pytest.mark.parametrize("target", mostly_nightly(["litert", "executorch"], ["litert"]))
def test_a_sum_with_codes_is_rounded(target: str, tmp_path: Path) -> None:
    pytest.importorskip(PACKAGES.get(target, target))
    program = Program(4)
    given: dict[str, Any] = {"channels": 4, "origin": "layer"}
    edges = edges_of(lambda x: (x / 0.3).clamp(0, 15).round(), 0, 15, 0.3)
    weight = torch.randint(-7, 8, (4, 4, 1, 1), dtype=torch.int16)
    program.add(ops.Quantize(**given, inputs=(0,), edges=edges, codes=torch.arange(16).byte(), zero=0, step=0.3))
    program.add(ops.ConvCodes(**given, inputs=(1,), weight=weight, window=Window(), zero=0))
    program.add(ops.Affine(**given, inputs=(2,), scale=torch.rand(4) + 0.1, bias=torch.randn(4)))
    program.add(ops.Add(**given, inputs=(3, 1)))
    program.outputs = (program.add(ops.Clamp(**given, inputs=(4,), low=0.0, high=torch.inf)),)
    images, path = torch.randn(16, 4, 6, 5), tmp_path / f"model{SUFFIXES[target]}"
    import_module(f"qconv.export.{target}").write(program, path, images, round_outputs=True)
    wanted = program.run(images)
    assert (run(path, images)[0][0] - wanted).abs().max() < 0.02 * wanted.max()


def convolutions_in_bytes(path: Path) -> int:
    """How many convolutions of a LiteRT file have bytes as their output."""
    from ai_edge_litert import schema_py_generated as schema

    graph: Any = schema.ModelT.InitFromPackedBuf(path.read_bytes(), 0)
    (inner,), kinds = graph.subgraphs, schema.BuiltinOperator
    convs = [
        each
        for each, code in enumerate(graph.operatorCodes)
        if code.builtinCode in (kinds.CONV_2D, kinds.DEPTHWISE_CONV_2D)
    ]
    outputs = [inner.tensors[each.outputs[0]] for each in inner.operators if each.opcodeIndex in convs]
    return sum(output.type == schema.TensorType.INT8 for output in outputs)


@pytest.mark.nightly
def test_executorch_clamps_twice_and_pads_unevenly_behind_bytes(tmp_path: Path) -> None:
    """XNNPACK's partitioner fuses such clamps, codes that end at 1, and such paddings wrongly, or fails."""
    torch.manual_seed(0)
    blocks = [
        *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Hardtanh(-1.0, 0.3)),
        *(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 2, padding="same"), nn.BatchNorm2d(8)),
        nn.Conv2d(8, 4, 1),
    ]
    scheme = replace(schemes.lsq(2, 2), input=partial(LSQInput, 2, signed=True))
    images = torch.randn(4, 3, 9, 8)
    program = build(trained(nn.Sequential(*blocks), scheme, images), images).program(images)
    assert len(requantized(program)) == 1
    check("executorch", program, images, tmp_path)


@pytest.mark.nightly
def test_trained_layers_are_in_bytes() -> None:
    images = torch.randn(1, 3, 32, 32)
    assert len(requantized(build(qconv.load("resnet20-lsq4-cifar10"), images).program(images))) == 9


@pytest.mark.nightly
def test_litert_stores_four_bits(tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    model, images, sizes = network("lsq44"), torch.randn(2, 3, 16, 16), []
    for four_bits in (False, True):
        path = tmp_path / "model.tflite"
        qconv.export(model, path, to="litert", images=images, four_bits=four_bits)
        assert qconv.verify_export(model, path, images).agrees
        sizes.append(path.stat().st_size)
    if find_spec("tflite_micro") is not None:
        with pytest.raises(ValueError, match="LiteRT for Microcontrollers can't run the file"):
            qconv.verify_export(model, path, images, interpreter="micro")
    assert sizes[0] - sizes[1] == pytest.approx(50_688 / 2, rel=0.02)
    qconv.export(network("bwn"), tmp_path / "model.tflite", to="litert", images=images)  # a step for each filter
    assert (tmp_path / "model.tflite").stat().st_size < 1.2 * sizes[0]


def test_openvino_convolves_in_8_bits_with_the_settings_that_the_file_names(tmp_path: Path) -> None:
    openvino = pytest.importorskip("openvino")
    from qconv.export.openvino import SETTINGS, write

    images = torch.randn(2, 3, 16, 16)
    write(build(network("lsq44"), images).program(images), tmp_path / "model.xml", images)
    model = openvino.Core().read_model(tmp_path / "model.xml")
    assert {name: model.get_rt_info(["qconv", name]).astype(str) for name in SETTINGS} == SETTINGS
    running = openvino.Core().compile_model(model, "CPU", SETTINGS).get_runtime_model()
    kinds = [{key: value.astype(str) for key, value in node.get_rt_info().items()} for node in running.get_ops()]
    integer = [
        kind for kind in kinds if kind["layerType"] == "Convolution" and kind["runtimePrecision"] in ("u8", "i8")
    ]
    assert len(integer) == 4


def test_openvino_strides_over_padding_by_one_pixel(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    images, path = torch.randn(3, 3, 14, 9), tmp_path / "model.xml"
    for scheme in (schemes.bwn(), schemes.lsq(4, 4), schemes.bnn()):
        first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 1, stride=2, padding=1))
        rest = nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.ReflectionPad2d(1), nn.Conv2d(8, 4, 1, stride=(1, 2)))
        model = qconv.convert(nn.Sequential(first, rest), scheme, skip=("first",), check=False).eval()
        qconv.calibrate(model, [images])
        qconv.export(model, path, to="openvino", images=images)
        assert qconv.verify_export(model, path, images).agrees


def test_openvino_keeps_a_scale_without_bias(tmp_path: Path) -> None:
    """Of batches of any size, it scaled such sums twice for one of two readers."""
    torch.manual_seed(0)
    images = torch.rand(4, 3, 16, 16)
    layers = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 32, 2, 2, bias=False), nn.Conv2d(32, 8, 1), nn.Conv2d(8, 4, 1)
    program = build(trained(nn.Sequential(*layers), schemes.minmax(8, 8), images), images).program(images)
    check("openvino", program, images, tmp_path)


class Between(nn.Module):
    """A function between two convolutions."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.function, self.last = nn.Conv2d(3, 8, 3), function, nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


@pytest.mark.parametrize("target", ["openvino", "litert", "qonnx"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.roll(1, 1),
        lambda x: x[:, [1, 2, 0, 4, 3, 7, 5, 6]].abs(),
        lambda x: x.amax((2, 3), keepdim=True),
        partial(nn.functional.adaptive_avg_pool2d, output_size=3),
    ],
    ids=["roll", "index", "amax", "uneven pool"],
)
def test_a_function_before_a_convolution(target: str, function: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    """OpenVINO ordered channels the wrong way around, rounded largest values to even codes, and refused a Gather."""
    images = torch.randn(4, 3, 12, 12)
    for scheme in (schemes.pact(4, 4), schemes.bwn()):
        model = trained(Between(function), scheme, images, skip=("first",), check=False)
        qconv.export(model, path := tmp_path / f"model{SUFFIXES[target]}", to=target, images=images)
        assert qconv.verify_export(model, path, images).agrees


@pytest.mark.nightly
@pytest.mark.parametrize("how", [{"scale_factor": 0.5}, {"size": (5, 7), "mode": "bilinear", "align_corners": True}])
def test_executorch_resizes(how: dict[str, Any], tmp_path: Path) -> None:
    images = torch.randn(2, 3, 12, 12)
    model = trained(Between(partial(nn.functional.interpolate, **how)), schemes.lsq(4, 4), images, skip=("first",))
    qconv.export(model, path := tmp_path / "model.pte", to="executorch", images=images)
    assert qconv.verify_export(model, path, images).agrees


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 8), nn.InstanceNorm2d(8)], ids=["groups", "images"])
@pytest.mark.parametrize("target", ["openvino", "litert"])
def test_a_scale_stays_before_a_normalization(target: str, norm: nn.Module, tmp_path: Path) -> None:
    """OpenVINO moved it behind: of sums as small as eps, outputs were a half too large."""
    images = torch.randn(4, 3, 12, 12)
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False), norm, nn.Conv2d(8, 4, 1)
    nn.init.normal_(layers[2].weight, std=1e-3)
    model = trained(nn.Sequential(*layers), schemes.lsq(4, 4), images, check=False)
    qconv.export(model, path := tmp_path / f"model{SUFFIXES[target]}", to=target, images=images)
    assert qconv.verify_export(model, path, images).agrees


@pytest.mark.parametrize(
    ("name", "size"),
    mostly_nightly(
        [("resnet20-lsq4-cifar10", (3, 32, 32)), ("smallcnn-bnn-digits", (1, 8, 8))],
        [("smallcnn-bnn-digits", (1, 8, 8))],
    ),
)
def test_the_costs_that_qonnx_counts_are_those_of_the_summary(
    name: str, size: tuple[int, int, int], tmp_path: Path
) -> None:
    qonnx = pytest.importorskip("qonnx.util.inference_cost")
    datatypes = pytest.importorskip("qonnx.core.datatype")
    from qconv.export.qonnx import write

    model = qconv.load(name)
    images = torch.randn(2, *size)
    write(build(model, images).program(images), tmp_path / "model.onnx", images)
    found = qonnx.inference_cost(str(tmp_path / "model.onnx"), discount_sparsity=False)["total_cost"]
    macs = {tuple(key.split("_")[2:]): count for key, count in found.items() if key.startswith("op_mac")}
    by_bits = {tuple(datatypes.DataType[kind].bitwidth() for kind in reversed(kinds)): n for kinds, n in macs.items()}
    wanted = qconv.summary(model, size)
    assert by_bits == wanted.macs_by_bits
    assert found["total_bops"] == wanted.bops
    assert found["total_mem_w_elems"] == sum(module.weight.numel() for module in weighted(model))


def weighted(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]


class Integers(nn.Sequential):
    """A network that has only integers between its input and its output."""

    def __init__(self) -> None:
        first, second = nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.Conv2d(8, 8, 3, 2, bias=False)
        norm, last = nn.BatchNorm2d, nn.Linear(72, 10)
        pool, act = nn.MaxPool2d(2), nn.ReLU()
        super().__init__(first, norm(8), act, pool, second, norm(8), act, nn.Flatten(), last)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("tool", "packages"),
    [("finn", ["finn-plus==1.6.1"]), ("hls4ml", ["hls4ml==1.3.0", "qonnx==1.0.0", "onnx==1.19.1", "onnxruntime"])],
)
def test_a_network_of_integers_on_an_fpga(tool: str, packages: list[str], tmp_path: Path) -> None:
    from qconv.export.qonnx import write

    images = torch.randn(16, 1, 14, 14)
    frozen = build(trained(Integers(), schemes.lsq(4, 4, signed_input=None), images, skip=()), images)
    write(frozen.program(images), tmp_path / "model.onnx", images)
    np.save(tmp_path / "images.npy", images.numpy())
    subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, tmp_path / "env"], check=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run(["uv", "pip", "install", "--quiet", "--python", python, *packages], check=True)
    script, files = Path(__file__).with_name("hardware.py"), ["model.onnx", "images.npy", "outputs.npy"]
    subprocess.run([python, "-W", "ignore", script, tool, *files], check=True, cwd=tmp_path, capture_output=True)
    wanted, found = frozen(images).numpy(), np.load(tmp_path / "outputs.npy").reshape(16, 10)
    assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize("groups", [1, 4])
def test_litert_has_a_step_for_each_filter(groups: int, tmp_path: Path) -> None:
    steps, signs = torch.rand(8, 1, 1, 1) + 0.5, torch.randint(0, 2, (8, 4 // groups, 3, 3)) * 2 - 1
    program = Program(4)
    program.add(ops.Clamp(inputs=(0,), origin="act", channels=4, low=-1.0, high=1.0))
    given: dict[str, Any] = {"inputs": (1,), "origin": "layer", "channels": 8, "groups": groups}
    program.outputs = (program.add(ops.ConvFloats(**given, weight=steps * signs, window=Window((3, 3)))),)
    check("litert", program, torch.randn(2, 4, 6, 5), tmp_path)


def test_litert_for_microcontrollers_needs_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    from qconv.export.litert import run, write

    write(Program(1), tmp_path / "model.tflite", torch.zeros(1, 1, 4, 4))
    if find_spec("tflite_micro") is not None:
        with pytest.raises(
            ValueError, match=r"takes images \(height, width, channels\) of \(4, 4, 1\), not \(5, 4, 1\)"
        ):
            run(tmp_path / "model.tflite", np.zeros((1, 1, 5, 4), np.float32), "micro")
    monkeypatch.setitem(sys.modules, "tflite_micro", None)
    with pytest.raises(ImportError, match=r'Microcontrollers needs tflite_micro: pip install "qconv\[micro\]"'):
        run(tmp_path / "model.tflite", np.zeros((1, 1, 4, 4), np.float32), "micro")


def test_openvino_needs_its_package_and_an_xml_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from qconv.export.openvino import write

    program = Program(1)
    with monkeypatch.context() as missing:
        missing.setitem(sys.modules, "openvino", None)
        with pytest.raises(ImportError, match=r'export to OpenVINO needs openvino: pip install "qconv\[openvino\]"'):
            write(program, tmp_path / "model.xml", torch.zeros(1, 1, 4, 4))
    pytest.importorskip("openvino")
    with pytest.raises(ValueError, match=r"model\.bin\) must end in \.xml"):
        write(program, tmp_path / "model.bin", torch.zeros(1, 1, 4, 4))
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_executorch_names_the_file_that_it_cannot_run(tmp_path: Path) -> None:
    pytest.importorskip("executorch")
    from qconv.export.executorch import write

    program, path = Program(1), tmp_path / "model.pte"
    program.outputs = (program.add(ops.Clamp(inputs=(0,), channels=1, low=1.0, high=1.0)),)
    write(program, path, torch.zeros(1, 1, 4, 4))
    assert torch.equal(run(path, torch.zeros(2, 1, 4, 4))[0][0], torch.ones(2, 1, 4, 4))
    with pytest.raises(ValueError, match=r"model\.pte: .*: it takes images of \(1, 4, 4\), not \(1, 5, 4\)"):
        run(path, torch.zeros(2, 1, 5, 4))
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"model\.pte: executorch can't run it on images \(2, 1, 4, 4\): "):
        run(path, torch.zeros(2, 1, 4, 4))


@pytest.mark.parametrize("target", [*EACH, "pt2"])
def test_a_damaged_file_is_named(target: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{TARGETS[target].suffix}"
    path.write_bytes(TARGETS[target].mark + b"no file of a runtime")
    pytest.importorskip("torch" if target == "pt2" else PACKAGES.get(target, target))
    with pytest.raises(ValueError, match=rf"model\{path.suffix}: {target} can't run it on images \(2, 1, 4, 4\): .+"):
        run(path, torch.zeros(2, 1, 4, 4))
