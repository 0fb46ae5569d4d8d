"""Layers of codes add whole numbers up and scale the sum: what was trained is what ships, where a sum is 0 too."""

from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import qconv
from qconv import Scheme, schemes
from qconv.function import sums
from qconv.quantizers import LSQ, Identity, LSQInput, Quantizer, ScaledSign, Sign, Stages, Whole

SCALED = [
    *(schemes.xnor(), schemes.xnorpp(), schemes.bireal(), schemes.reactnet(), schemes.irnet(), schemes.recu()),
    *(schemes.reste(), schemes.lsq(1, 1, signed_input=True), schemes.lsq(2, 2), schemes.pact(2, 2), schemes.apot()),
]


def network(scheme: Scheme, bias: bool, activation: nn.Module | None = None) -> tuple[nn.Sequential, Tensor]:
    """Two layers without batch norm between them, and inputs for which a tenth of the first one's sums is 0."""
    activation = nn.Identity() if activation is None else activation
    layers = (qconv.QConv2d(6, 16, 3, scheme=scheme, bias=bias), qconv.QConv2d(16, 8, 3, scheme=scheme, bias=bias))
    model, inputs = nn.Sequential(layers[0], activation, layers[1]), torch.randn(64, 6, 8, 8)
    with torch.no_grad():
        model(inputs)  # calibrates
    return model.eval(), inputs


def shipped(model: nn.Sequential, inputs: Tensor, folder: Path) -> dict[str, Tensor]:
    """What the packed, the frozen and the exported form give."""
    bias = model[0].bias is not None
    twin = nn.Sequential(nn.Conv2d(6, 16, 3, bias=bias), model[1], nn.Conv2d(16, 8, 3, bias=bias))
    qconv.save_packed(model, folder / "model.safetensors")
    with torch.no_grad():
        return {
            "packed": qconv.load_packed(folder / "model.safetensors", model=twin).eval()(inputs),
            "frozen": qconv.freeze(model)(inputs),
        }


@pytest.mark.parametrize("bias", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("scheme", SCALED, ids=str)
def test_trained_and_shipped_agree_bit_for_bit(scheme: Scheme, bias: bool, tmp_path: Path) -> None:
    model, inputs = network(scheme, bias, nn.ReLU() if scheme.name.startswith(("lsq(weight_bits=2", "apot")) else None)
    with torch.no_grad():
        expected = model(inputs)
        zeros = (model[0](inputs) == 0).float().mean()
    assert bias or zeros > 0.003
    for form, output in shipped(model, inputs, tmp_path).items():
        assert output.equal(expected), form


class Branches(nn.Module):
    """Networks side by side, so that one export is enough."""

    def __init__(self, branches: list[nn.Sequential]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, input: Tensor) -> Tensor:
        return torch.cat([branch(input) for branch in self.branches], 1)


@pytest.mark.nightly
def test_so_does_the_exported_form(tmp_path: Path) -> None:
    made: list[tuple[Scheme, nn.Module | None]] = [
        *((schemes.xnor(), None), (schemes.bireal(), None), (schemes.recu(), None), (schemes.reste(), None)),
        (schemes.xnor(), nn.AvgPool2d(1)),  # floats are handed on, whose scale no runtime may put into the weights
        (schemes.apot(), nn.ReLU()),
    ]
    branches, inputs = zip(*(network(scheme, False, activation) for scheme, activation in made), strict=True)
    model = Branches(list(branches)).eval()
    with torch.no_grad():
        expected = model(inputs[0])
    qconv.export_onnx(model, tmp_path / "model.onnx", inputs[0][:2])
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    output = session.run(None, {session.get_inputs()[0].name: inputs[0].numpy()})[0]
    assert torch.equal(torch.from_numpy(output), expected)


OPERATIONS: list[tuple[Any, tuple[int, ...]]] = [
    (qconv.QConv1d(6, 4, 3, groups=2, padding=1), (5, 6, 9)),
    (qconv.QConv2d(6, 4, 3, stride=2), (5, 6, 9, 9)),
    (qconv.QConv3d(6, 4, 3), (2, 6, 4, 4, 4)),
    (qconv.QConvTranspose1d(6, 4, 3), (5, 6, 9)),
    (qconv.QConvTranspose2d(6, 4, 3, groups=2, stride=2), (5, 6, 5, 5)),
    (qconv.QLinear(36, 4), (50, 3, 36)),
]


@pytest.mark.parametrize(("layer", "shape"), OPERATIONS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("scheme", [schemes.xnor(), schemes.reste(), schemes.lsq(3, 3)], ids=str)
def test_every_layer_gives_multiples_of_its_scale(layer: Any, shape: Any, scheme: Scheme) -> None:
    layer.set_scheme(scheme)
    torch.nn.init.zeros_(layer.bias)
    with torch.no_grad():
        output = layer(torch.randn(shape))
        whole = layer.input_quantizer.whole(torch.zeros(1), *layer.input_quantizer.tensors())
        weight = layer.weight_quantizer.whole(layer.filters(), *layer.weight_quantizer.tensors())
    scale = weight.scale.flatten() * (1.0 if whole.scale is None else whole.scale)
    output = output.movedim(-1 if isinstance(layer, qconv.QLinear) else 1, 0).flatten(1)
    multiples = (output.double() / scale.double()[:, None]).round()
    assert output.equal(multiples.float() * scale[:, None])
    assert multiples.abs().max() > 1


def test_what_can_not_be_taken_out_of_the_sums() -> None:
    weight, input = torch.randn(4, 3, 3, 3), torch.randn(2, 3, 5, 5)
    op = qconv.QConv2d(3, 4, 3).op
    padded = qconv.QConv2d(3, 4, 3, padding=1, padding_value=1, scheme=schemes.bnn()).op

    def found(of_input: Quantizer, of_weight: Quantizer, op: Any = op, dtype: torch.dtype = torch.float32) -> bool:
        of_input.build(3, 1)
        of_weight.initialize(weight)
        quantized = (of_input, of_input.tensors()), (of_weight, of_weight.tensors())
        return sums.scaled_sums(input.to(dtype), weight, None, op, *quantized) is not None

    assert found(Sign(), ScaledSign())
    assert found(Sign(), ScaledSign(), padded)
    assert found(LSQInput(), LSQ(per_channel=True))
    assert not found(Identity(), ScaledSign())
    assert not found(Sign(), Identity())
    assert not found(LSQInput(per_channel=True), LSQ())  # input channels with scales of their own
    assert not found(LSQInput(signed=True), LSQ(), padded)  # whose border is ±1, not ±scale
    assert not found(Sign(), ScaledSign(), dtype=torch.float16)


class Tripled(ScaledSign):
    """A user's: it writes `quantize` alone, and must not be computed by the `whole` of its parent."""

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return 3 * super().quantize(x, *tensors)


class Fives(Tripled):
    """The reverse."""

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        return Whole(torch.full_like(x, 5.0), torch.ones(()))


def test_of_whole_and_quantize_the_later_one_counts() -> None:
    x = torch.tensor([[-2.0, 1.0]])
    assert Tripled().quantize(x).tolist() == [[-4.5, 4.5]]
    assert Fives().quantize(x).tolist() == [[5.0, 5.0]]
    layer = qconv.QLinear(2, 1, bias=False, scheme=Scheme("tripled", Sign, Tripled))
    torch.nn.init.constant_(layer.weight, 0.5)
    assert layer(torch.ones(1, 2)).item() == 3
    in_stages = Scheme("tripled in stages", Sign, lambda: Stages([(0, Tripled)]))
    layer.set_scheme(in_stages)
    assert layer(torch.ones(1, 2)).item() == 3
    layer.set_scheme(Scheme("fives", Sign, Fives))
    inputs = torch.ones(3, 2, requires_grad=True)
    outputs = [layer(inputs), qconv.lean(layer)(inputs)]
    assert [output.unique().tolist() for output in outputs] == [[10.0], [10.0]]  # not the bits of signs
    with pytest.raises(NotImplementedError, match="neither whole"):
        Quantizer().quantize(x)
