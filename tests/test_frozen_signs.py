"""Frozen layers of binary weights and float inputs, which look their sums up."""

import copy
import pickle
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from settings import mostly_nightly
from torch import Tensor, nn

import qconv
from qconv import freeze, schemes, verify
from qconv.inference.build import build
from qconv.kernels import native
from qconv.models import resnet20
from qconv.program.signs import SignConv2d

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
if native.instruction_sets()[-1:] in ((), ("portable",)):
    pytest.skip("needs a C kernel", allow_module_level=True)
BWN = schemes.bwn()
SCHEMES = BWN, schemes.dorefa(1, None), schemes.lsq(1, None), schemes.irnet(binary_input=False)
GEOMETRIES: dict[str, dict[str, Any]] = {
    "plain": dict(kernel_size=3),
    "padded": dict(kernel_size=3, padding=1, bias=False),
    "strided": dict(kernel_size=(3, 5), stride=2, padding=(1, 2)),
    "dilated": dict(kernel_size=3, dilation=(2, 1), padding="same"),
    "same, even": dict(kernel_size=(2, 4), padding="same"),
    "groups": dict(kernel_size=5, groups=2, padding=2),
    "reflected": dict(kernel_size=3, padding=1, padding_mode="reflect"),
    "reflected, even": dict(kernel_size=(2, 4), padding="same", padding_mode="reflect", bias=False),
}


def trained(model: nn.Module, input: Tensor) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
    model(input)
    return model.eval()


def found(frozen: nn.Module) -> list[SignConv2d]:
    return [module for module in frozen.modules() if isinstance(module, SignConv2d)]


FAST = [*product([BWN], ("padded", "strided", "groups", "reflected, even")), (SCHEMES[2], "same, even")]


@pytest.mark.parametrize(("scheme", "name"), mostly_nightly(product(SCHEMES, GEOMETRIES), FAST), ids=str)
def test_layers(scheme: qconv.Scheme, name: str) -> None:
    torch.manual_seed(0)
    input = torch.randn(3, 32, 12, 11)
    layer = qconv.QConv2d(32, 48, **GEOMETRIES[name], scheme=scheme)
    model = trained(nn.Sequential(layer, nn.BatchNorm2d(48), nn.ReLU()), input)
    frozen = build(model, input)
    assert len(found(frozen)) == 1
    assert [told.arithmetic for told in frozen.layers] == ["float"]
    checked = verify(model, frozen, input)
    assert checked.equal, f"\n{checked}"
    for batch in (input, input[:1], input[:0], input.to(memory_format=torch.channels_last)):
        torch.testing.assert_close(frozen(batch), model(batch), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "geometry",
    [
        dict(kernel_size=5, padding=2, stride=2, bias=False),
        dict(kernel_size=9, dilation=2, padding="same", groups=2),
        dict(kernel_size=4, padding="same", padding_mode="reflect"),
    ],
    ids=str,
)
def test_signals(geometry: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qconv.program.planned._MANY", 0)  # a small network would be a plan
    torch.manual_seed(0)
    input = torch.randn(3, 64, 23)
    layer = qconv.QConv1d(64, 96, **geometry, scheme=schemes.bwn())
    model = trained(nn.Sequential(layer, nn.BatchNorm1d(96), nn.ReLU()), input)
    frozen = build(model, input)
    checked = verify(model, frozen, input)
    assert checked.equal, f"\n{checked}"
    for batch in (input, input[:1], input[:0]):
        torch.testing.assert_close(frozen(batch), model(batch), rtol=1e-4, atol=1e-4)
    (made,) = found(frozen)
    made.weight = made.weight ^ 1  # a planted error
    assert not verify(model, frozen, input).equal


@pytest.mark.nightly
def test_a_network() -> None:
    torch.manual_seed(0)
    input = torch.randn(4, 3, 32, 32)
    model = trained(qconv.convert(resnet20(3, 10), schemes.bwn()), input)
    frozen = freeze(model, example=input)
    assert len(found(frozen)) == 18
    assert verify(model, frozen, input).equal
    assert torch.equal(copy.deepcopy(frozen)(input), frozen(input))
    assert torch.equal(pickle.loads(pickle.dumps(frozen))(input), frozen(input))
    weights = [module.weight.numel() * 8 for module in found(frozen)]
    floats = [conv.weight.numel() * 4 for conv in model.modules() if isinstance(conv, qconv.QConv2d)]
    assert sum(weights) < sum(floats) / 7  # a word holds 64 channels, which the first layers do not have


def test_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    model, input = nn.Sequential(qconv.QConv2d(32, 32, 3)).eval(), torch.randn(2, 32, 9, 9)
    frozen = freeze(model)
    monkeypatch.setattr(native, "kernels", lambda: None)
    torch.testing.assert_close(frozen(input), model(input), rtol=1e-4, atol=1e-4)
    assert not found(freeze(model))


@pytest.mark.nightly
def test_compiled_and_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    input = torch.randn(4, 32, 9, 9)
    frozen = freeze(trained(nn.Sequential(qconv.QConv2d(32, 48, 3), nn.BatchNorm2d(48)), input))
    assert len(found(frozen)) == 1
    frozen.unplanned = "modules are exported here"
    program = torch.export.export(frozen, (input,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    for batch in (input, input[:2]):
        by_modules = frozen._run(batch)  # a plan adds up in another order
        assert torch.equal(program.module()(batch), by_modules)
        assert torch.equal(torch.compile(frozen, backend="eager", fullgraph=True)(batch), by_modules)
    torch.export.save(program, tmp_path / "frozen.pt2")
    torch.save(input, tmp_path / "input.pt")
    code = """
import sys, torch, qconv.inference
program = torch.export.load(sys.argv[1] + "/frozen.pt2")
torch.save(program.module()(torch.load(sys.argv[1] + "/input.pt")), sys.argv[1] + "/output.pt")
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True)
    assert torch.equal(torch.load(tmp_path / "output.pt"), frozen._run(input))


@pytest.mark.parametrize("geometry", [{}, GEOMETRIES["reflected, even"]], ids=str)
def test_onnx(tmp_path: Path, geometry: dict[str, Any]) -> None:
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    input = torch.randn(4, 3, 16, 16)
    layer = qconv.QConv2d(32, 32, **{"kernel_size": 3, **geometry})
    model = trained(nn.Sequential(nn.Conv2d(3, 32, 3), layer, nn.BatchNorm2d(32), nn.ReLU()), input)
    assert len(found(build(model, input))) == 1
    compared = qconv.export_onnx(model, tmp_path / "model.onnx", input)
    assert compared.close == len(input), compared
    assert (tmp_path / "model.onnx").stat().st_size < 16000  # signs, not floats
