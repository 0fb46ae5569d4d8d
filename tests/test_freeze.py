"""Frozen models: equal to the trained ones, layer by layer and as a whole."""

import copy
import threading
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from settings import default_dtype, mostly_nightly
from torch import Tensor, nn
from torch.nn.utils import spectral_norm
from torch.nn.utils.parametrizations import orthogonal
from torch.nn.utils.prune import l1_unstructured

import qconv
from qconv import quantizers, schemes
from qconv.inference import freeze, verify
from qconv.inference.build import build
from qconv.inference.integers import arithmetic
from qconv.inference.verify import leaves
from qconv.methods import AdaBinInput, AdaBinWeight, LSQPlusInput
from qconv.models import ResNet
from qconv.models.vgg import vgg_small
from qconv.quantizers.levels import Levels
from qconv.scheme import Scheme


def trained(model: nn.Module, scheme: Scheme, input: Tensor, **convert: Any) -> nn.Module:
    """A converted model whose batch norms and steps are as after training; some gammas are negative, one is 0."""
    torch.manual_seed(0)
    qconv.convert(model, scheme, **convert)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm1d) and module.affine:
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias, std=0.3)
            module.weight.data[0] = 0
    qconv.calibrate(model, [input])
    with torch.no_grad():
        for _ in range(20):
            model.train()(input)
    return model.eval()


def chain(*, pool: str = "", activation: type[nn.Module] = nn.Hardtanh, width: int = 24) -> nn.Sequential:
    """Three convolutions with batch norm and activation between them, and a float layer at both ends."""
    parts: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), activation()]
    for index in range(3):
        parts.append(nn.Conv2d(width, width, 3, padding=1, bias=index == 1))
        parts += [nn.MaxPool2d(2)] if pool == "first" else []
        parts += [nn.BatchNorm2d(width), activation()]
        parts += [nn.MaxPool2d(2)] if pool == "last" else []
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


BNN = schemes.bnn()
INTEGER = {
    "bnn": BNN,
    "xnor": schemes.xnor(),
    "irnet": schemes.irnet(),
    "bireal": schemes.bireal(),
    "recu": schemes.recu(),
    "siman": schemes.siman(),
    "reste": schemes.reste(),
    "reactnet": schemes.reactnet(),
    "xnorpp": schemes.xnorpp(),
    "pad": schemes.bnn(padding_value=1),
    "minus": schemes.bnn(padding_value=-1),
    "lsq2": schemes.lsq(2, 2),
    "lsq4": schemes.lsq(4, 4),
    "lsq8": schemes.lsq(8, 8),
    "dorefa": schemes.dorefa(2, 2),
    "dorefa12": schemes.dorefa(1, 2),
    "pact": schemes.pact(),
    "n2uq": schemes.n2uq(),
    "apot": schemes.apot(),
    "minmax": schemes.minmax(),
    "minmax8": schemes.minmax(8, 8),
    "affine": schemes.minmax(8, 8, symmetric=False),
    "percentile8": schemes.percentile(8, 8),
    "dorefa8": schemes.dorefa(8, 8),
    "pact8": schemes.pact(8, 8),
    "shift": schemes.shift_q(fixed_point=(16, 16)),
    "shift_ps": schemes.shift_ps(fixed_point=(4, 4)),
    "adabin": schemes.adabin(),
    "lsq_plus": schemes.lsq_plus(),
    "lsq_plus8": schemes.lsq_plus(8, 8),
}
FLOAT = {
    "bwn": schemes.bwn(),
    "twn": schemes.twn(),
    "ttq": schemes.ttq(),
    "shift_float": schemes.shift_q(),
    "dsq": schemes.dsq(),
    "lsq16": schemes.lsq(8, 16),
    "minmax16": schemes.minmax(4, 16),
    "fp8": schemes.fp8(),
}


@pytest.mark.parametrize("name", mostly_nightly([*INTEGER, *FLOAT], ("bnn", "lsq4", "shift", "bwn", "apot")))
def test_every_scheme(name: str) -> None:
    input = torch.randn(3, 3, 9, 8)
    model = trained(chain(activation=nn.ReLU), {**INTEGER, **FLOAT}[name], input)
    before = copy.deepcopy(model.state_dict())
    frozen = build(model, input)
    checked = verify(model, frozen, input)
    assert checked.equal, f"\n{checked}"
    assert all(each.arithmetic != "float" for each in frozen.layers) == (name in INTEGER), frozen.layers
    assert all(each.reason for each in frozen.layers if each.arithmetic == "float")
    assert all(torch.equal(model.state_dict()[key], value) for key, value in before.items())


@pytest.mark.parametrize("name", mostly_nightly(["lsq_plus", "adabin", "dsq", "fp8", "xnor"], ("xnor",)))
def test_layers_of_other_kinds(name: str) -> None:
    scheme = schemes.xnor(center=True) if name == "xnor" else {**INTEGER, **FLOAT}[name]
    torch.manual_seed(0)
    layers = (
        (qconv.QConv1d(6, 4, 3, groups=2, bias=False, scheme=scheme), torch.randn(2, 6, 9)),
        (qconv.QConv3d(3, 4, 3, bias=False, scheme=scheme), torch.randn(2, 3, 5, 5, 4)),
        (qconv.QConvTranspose2d(4, 6, 3, 2, groups=2, bias=False, scheme=scheme), torch.randn(2, 4, 5, 5)),
        (qconv.QDeformConv2dPack(4, 6, 3, bias=False, scheme=scheme), torch.randn(2, 4, 6, 6)),
    )
    for layer, input in layers:
        model = nn.Sequential(layer)
        qconv.calibrate(model, [input])
        frozen = build(model.eval(), input)
        (told,) = frozen.layers
        of_signals = {"lsq_plus": "offset", "adabin": "offset", "xnor": "binary"}  # as QConv2d
        is_signal = isinstance(layer, qconv.QConv1d)
        assert told.arithmetic == (of_signals.get(name, "float") if is_signal else "float")
        torch.testing.assert_close(frozen(input), model(input), rtol=1e-5, atol=1e-6)  # in another memory format
        assert verify(model, frozen, input).equal


def test_a_resnet_and_shortcuts() -> None:
    input = torch.randn(2, 3, 16, 16)
    small = partial(ResNet, 3, 10, widths=(16, 32), blocks=(1, 1), downsample="A")
    binary = trained(small(shortcut="per_conv", activation=nn.Hardtanh), schemes.bireal(), input)
    low = trained(small(), schemes.lsq(4, 4), input)
    for model in (binary, low):
        frozen = freeze(model)
        checked = verify(model, frozen, [input[:1], input[1:]])
        assert checked.equal, f"\n{checked}"
        assert (checked.samples, checked.decisions) == (2, 0)
        assert not frozen.unplanned


def test_a_forward_that_looks_at_the_size_of_its_input() -> None:
    input = torch.randn(2, 3, 16, 16)
    model = trained(vgg_small(image_size=16), schemes.bnn(), input)
    assert freeze(model, example=input).program(input).size == (16, 16)


@pytest.mark.parametrize(
    "make",
    [
        lambda: qconv.QConv2d(6, 9, 3, stride=2, padding=(1, 2), dilation=(1, 2), groups=3, scheme=schemes.bnn()),
        lambda: qconv.QConv2d(6, 8, (2, 3), padding="same", groups=2, scheme=schemes.lsq(4, 4)),
        lambda: qconv.QConv2d(6, 8, 3, padding=2, padding_mode="reflect", scheme=schemes.bireal()),
        lambda: qconv.QConv2d(6, 8, 3, padding=1, padding_mode="circular", scheme=schemes.dorefa(3, 3)),
        lambda: qconv.QConv2d(6, 8, 3, padding=(1, 2), padding_mode="replicate", scheme=schemes.bwn()),
        lambda: qconv.QConv2d(6, 8, 3, padding=1, scheme=schemes.xnor(padding_value=-1)),
        lambda: qconv.QConv2d(6, 8, 3, stride=2, padding=(1, 2), groups=2, scheme=schemes.xnor(scale_map=True)),
        lambda: qconv.QConv2d(6, 8, 3, padding="same", bias=False, scheme=schemes.xnor(scale_map=True)),
        lambda: qconv.QConv1d(6, 8, 3, scheme=schemes.bnn()),
        lambda: qconv.QConvTranspose2d(6, 8, 3, scheme=schemes.lsq(4, 4)),
    ],
)
def test_single_layers(make: Any) -> None:
    torch.manual_seed(0)
    layer = make()
    input = torch.randn(2, 6, 9, 8) if layer.weight.ndim == 4 else torch.randn(2, 6, 9)
    qconv.calibrate(layer, [input])
    frozen = build(layer.eval(), input)
    checked = verify(layer, frozen, input)
    assert checked.equal, f"\n{checked}"
    torch.testing.assert_close(frozen(input), layer(input), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "scheme",
    [schemes.bnn(), schemes.xnor(scale_map=True), schemes.lsq(8, 8), schemes.bwn(), schemes.adabin()],
    ids=str,
)
def test_linear_layers(scheme: Scheme) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        qconv.QLinear(70, 30, scheme=scheme), nn.BatchNorm1d(30), nn.ReLU(), qconv.QLinear(30, 5, scheme=scheme)
    )
    input = torch.randn(6, 70)
    qconv.calibrate(model, [input])
    model.train()(input)
    frozen = freeze(model.eval(), example=input)
    assert frozen(input[:0]).shape == (0, 5)
    single = qconv.QLinear(7, 3, scheme=scheme)
    qconv.calibrate(single, [input := torch.randn(2, 4, 7)])
    assert freeze(single.eval(), example=input)(input).shape == (2, 4, 3)


@pytest.mark.nightly
def test_export_and_compile() -> None:
    input = torch.randn(4, 3, 8, 8)
    for scheme in (schemes.bnn(), schemes.lsq(4, 4), schemes.adabin()):
        model = trained(chain(activation=nn.ReLU), scheme, input)
        frozen = freeze(model)
        wanted = frozen(input)
        exported = torch.export.export(frozen, (input,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        assert torch.equal(exported.module()(input), wanted)
        assert torch.equal(exported.module()(input[:3]), wanted[:3])
        assert torch.equal(torch.compile(frozen, fullgraph=True)(input), wanted)
    listed = freeze(nn.Sequential(model, Likelihoods()).eval(), example=input)
    torch.testing.assert_close(torch.compile(listed, fullgraph=True)(input), listed(input))


class Likelihoods(nn.Module):
    """A function that takes lists."""

    def forward(self, input: Tensor) -> Tensor:
        return input - input.logsumexp((1,), True)


def test_a_packed_file_is_proved(tmp_path: Path) -> None:
    input = torch.randn(2, 3, 8, 8)
    model = trained(chain(), schemes.bnn(), input)
    qconv.save_packed(model, tmp_path / "model.safetensors")
    assert qconv.verify(model, tmp_path / "model.safetensors", input).equal
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[6].weight[3, 2, 1, 1] *= -1  # pyright: ignore
    found = qconv.verify(other, tmp_path / "model.safetensors", input)
    assert not found.equal
    assert found.first_difference is not None
    assert found.first_difference.name == "9"  # which reads the layer
    assert "not equal: '9' is the first layer that differs: its input is off" in str(found)


def test_bad_models() -> None:
    input = torch.randn(2, 3, 8, 8)
    model = trained(chain(), schemes.lsq(4, 4), input)
    with pytest.raises(TypeError, match=r"model \(=3\) must be a torch.nn.Module"):
        freeze(3)  # pyright: ignore[reportArgumentType]
    frozen = build(model, input)
    with pytest.raises(ValueError, match="already frozen"):
        freeze(frozen)
    with pytest.raises(ValueError, match=r"'0.weight' is torch.float64: call model.float\(\)"):
        freeze(copy.deepcopy(model).double())
    with pytest.raises(ValueError, match="waits for data"):
        freeze(qconv.convert(chain(), schemes.lsq(4, 4)))
    broken = copy.deepcopy(model)
    broken[4].running_var[2] = torch.nan  # pyright: ignore
    with pytest.raises(ValueError, match=r"'4.running_var' has NaN or inf"):
        freeze(broken)
    with pytest.raises(ValueError, match="can't be trained"):
        frozen.train()
    with pytest.raises(ValueError, match="has a layer '3', the trained one has no quantized layer there"):
        verify(chain(), frozen, input)
    with pytest.raises(ValueError, match="inputs must hold at least one sample"):
        verify(model, frozen, input[:0])
    for cast in (frozen.double, frozen.half, frozen.bfloat16):
        with pytest.raises(ValueError, match="it can't be cast"):
            cast()
    with default_dtype(torch.float64):
        moved = copy.deepcopy(frozen).to("cpu")
    assert torch.equal(moved(input), frozen(input))
    assert frozen(input[:0]).shape == (0, 10)


def test_a_mask_of_infinities_is_frozen() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.qkv, self.last = nn.Conv1d(3, 16, 1), nn.Conv1d(16, 48, 1), nn.Conv1d(16, 4, 1)
            self.register_buffer("mask", torch.full((16, 16), -torch.inf).triu(1))

        def forward(self, input: Tensor) -> Tensor:
            queries, keys, values = self.qkv(self.first(input)).chunk(3, 1)
            return self.last(values @ (queries.mT @ keys / 4 + self.mask).softmax(-1).mT)

    model = qconv.convert(Attention(), schemes.bwn()).eval()
    input = torch.randn(2, 3, 16)
    torch.testing.assert_close(freeze(model)(input), model(input))


def test_a_volume_without_a_batch_is_no_image() -> None:
    class Volume(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = qconv.QConv3d(4, 6, 3, scheme=schemes.bwn())

        def forward(self, input: Tensor) -> Tensor:
            return input + self.conv(input[:, :, None].expand(-1, -1, 5, -1, -1)[0]).mean()

    model, input = Volume().eval(), torch.randn(2, 4, 9, 8)
    frozen = freeze(model, example=input)
    assert not frozen.untraced
    torch.testing.assert_close(frozen(input), model(input))


def sequence(*modules: nn.Module, scheme: Scheme, size: int = 12) -> tuple[nn.Module, Tensor]:
    input = torch.randn(4, 24, size, size)
    return trained(nn.Sequential(*modules), scheme, input, skip=()), input


def conv(**options: Any) -> nn.Module:
    return nn.Conv2d(24, 24, 3, padding=1, **options)


@pytest.mark.parametrize(
    "modules",
    [
        lambda: (conv(), nn.BatchNorm2d(24), conv(groups=2), nn.BatchNorm2d(24)),
        lambda: (conv(), nn.MaxPool2d(2), nn.BatchNorm2d(24), nn.MaxPool2d(2), conv(), nn.BatchNorm2d(24)),
        lambda: (conv(), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2), conv(), nn.BatchNorm2d(24)),
        lambda: (conv(), nn.BatchNorm2d(24, affine=False), conv(), nn.BatchNorm2d(24, affine=False)),
        lambda: (conv(), nn.BatchNorm2d(24, track_running_stats=False), conv()),
        lambda: (conv(), nn.MaxPool2d(3, 2, 1, ceil_mode=True), nn.Hardtanh(), conv()),
    ],
)
@pytest.mark.parametrize("scheme", mostly_nightly([BNN, schemes.lsq(4, 4), schemes.bwn()], [BNN]), ids=str)
def test_what_stands_between_layers(modules: Any, scheme: Scheme) -> None:
    model, input = sequence(*modules(), scheme=scheme)
    frozen = build(model, input)
    checked = verify(model, frozen, input)
    assert checked.equal, f"\n{checked}"
    if not sum(each.drift for each in checked.layers):
        torch.testing.assert_close(frozen(input), model(input), rtol=1e-4, atol=1e-4)


AROUND = {
    "paper": schemes.adabin(),
    "code": schemes.adabin(offset="code"),
    "weight alone": Scheme(input=quantizers.Sign, weight=AdaBinWeight, padding_value=-1),
    "input alone": Scheme(input=AdaBinInput, weight=quantizers.Sign),
    "map": Scheme(input=quantizers.Sign, weight=AdaBinWeight, scale_map=True),
    "codes": schemes.lsq_plus(4, 4),
    "8 bits": schemes.lsq_plus(8, 8, per_channel=True),
    "codes by signs": Scheme(input=LSQPlusInput, weight=quantizers.Sign),
    "signs by codes": Scheme(input=AdaBinInput, weight=schemes.lsq(4, 4).weight),
}
AROUND_GEOMETRY: list[dict[str, Any]] = [
    {"kernel_size": 3},
    {"kernel_size": 1},
    {"kernel_size": 3, "padding": 1, "bias": False},
    {"kernel_size": 1, "stride": 2, "padding": 1},
    {"kernel_size": (2, 3), "padding": "same", "groups": 2},
    {"kernel_size": 3, "stride": 2, "padding": (1, 2), "dilation": (1, 2), "groups": 3},
    {"kernel_size": 3, "padding": 3, "groups": 6},
    {"kernel_size": 3, "stride": (1, 3), "padding": 4, "dilation": 3},
    {"kernel_size": 3, "padding": 2, "padding_mode": "reflect"},
    {"kernel_size": 1, "groups": 6},  # filters of one weight, with alpha = 0
]


def around(layer: Any) -> Any:
    """The layer with values of its input that don't lie around 0, and one filter of equal weights."""
    with torch.no_grad():
        layer.weight.add_(0.05)[0] = 0.25
        if isinstance(layer.input_quantizer, AdaBinInput):
            layer.input_quantizer.alpha.fill_(0.7)
            layer.input_quantizer.beta.fill_(-0.6)
        if isinstance(layer.input_quantizer, LSQPlusInput):
            layer.calibrate_(torch.randn(64, 6, 8, 8))
    return layer.eval()


@pytest.mark.parametrize(
    ("name", "geometry"),
    mostly_nightly(
        product(AROUND, AROUND_GEOMETRY),
        [*product(AROUND, AROUND_GEOMETRY[2:3]), *product(["paper", "codes"], AROUND_GEOMETRY[3:])],
    ),
)
def test_codes_with_an_offset(name: str, geometry: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = around(qconv.QConv2d(6, 12, scheme=AROUND[name], **geometry))
    frozen = freeze(layer)
    assert [told.arithmetic for told in frozen.layers] == ["offset"]
    exact = copy.deepcopy(layer).double()
    for size in ((9, 8), (7, 11), (9, 8)):  # what depends on the size follows it
        input = torch.randn(2, 6, *size)
        checked = verify(layer, frozen, input)
        assert checked.equal, f"\n{checked}"
        wanted = exact(input.double())
        assert (frozen(input) - wanted).abs().max() <= 2**-20 * wanted.abs().max()


class Squares(nn.ReLU):
    def forward(self, input: Tensor) -> Tensor:
        return input * input - 1


class Standardized(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return self._conv_forward(input, self.weight - self.weight.mean(), self.bias)


def test_subclasses_compute_what_they_did() -> None:
    bnn = schemes.bnn()
    model, input = sequence(conv(), nn.BatchNorm2d(24), Squares(), conv(), scheme=bnn)
    freeze(model, example=input)
    model, input = sequence(conv(), Standardized(24, 24, 3), nn.BatchNorm2d(24), scheme=bnn)
    freeze(model, example=input)
    model[1].register_forward_hook(lambda module, args, output: 2 * output)  # pyright: ignore[reportIndexIssue]


@pytest.mark.parametrize(
    ("wrap", "remedy"),
    [
        (lambda layer: l1_unstructured(layer, "weight", 0.5), r"torch.nn.utils.prune.remove\(layer, 'weight'\) first"),
        (spectral_norm, r"torch.nn.utils.remove_spectral_norm\(layer\) first"),
        (orthogonal, r"torch.nn.utils.parametrize.remove_parametrizations\(layer, 'weight'\) first"),
    ],
    ids=["prune", "hooks", "parametrize"],
)
def test_a_computed_weight_is_refused_with_its_remedy(wrap: Callable[[nn.Module], Any], remedy: str) -> None:
    model, _ = sequence(conv(), nn.BatchNorm2d(24), conv(), scheme=schemes.bwn())
    wrap(model.get_submodule("2"))
    with pytest.raises(
        ValueError, match=rf"layer '2' \(.*QConv2d, bwn\(\)\): its weight is computed \(.*\): call {remedy}"
    ):
        freeze(model)


def test_the_decision_of_a_single_output_is_its_sign() -> None:
    input = torch.randn(8, 3, 8, 8)
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 1))
    model = trained(model, schemes.bwn(), input)
    with torch.no_grad():
        model[3].bias.sub_(model(input).mean())
    frozen = build(model, input)
    assert verify(model, frozen, input).decisions == 0
    with torch.no_grad():
        negative = int((model(input) <= 0).sum())
        model[3].bias.add_(-100)
    assert verify(model, frozen, input).decisions == len(input) - negative > 0


def test_a_layer_that_is_not_called() -> None:
    class WithHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = conv(), conv()

        def forward(self, input: Tensor) -> Tensor:
            return self.conv(input)

    input = torch.randn(2, 24, 6, 6)
    model = trained(WithHead(), schemes.bnn(), input, skip=())
    checked = verify(model, build(model, input), input)
    assert checked.equal
    assert [each.name for each in checked.layers] == ["conv"]


def test_a_layer_that_the_trained_model_alone_calls() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.times = conv(), 2

        def forward(self, input: Tensor) -> Tensor:
            for _ in range(self.times):
                input = self.conv(input)
            return input

    input = torch.randn(2, 24, 6, 6)
    model = trained(Twice(), schemes.bnn(), input, skip=())
    frozen = build(model, input)
    assert verify(model, frozen, input).equal
    for model.times in (1, 3):  # pyright: ignore
        assert not verify(model, frozen, input).equal


def test_frozen_under_inference_mode() -> None:
    model, input = sequence(conv(), scheme=schemes.lsq(4, 4))
    with torch.inference_mode():
        frozen = freeze(model)
        for size in range(3, 12):
            assert frozen(input[:, :, :size, :size]).shape[2:] == (size, size)


def test_fixed_point_sums_are_exact() -> None:
    layer = qconv.QLinear(140_000, 2, bias=False, scheme=schemes.shift_q(fixed_point=(8, 8))).eval()
    input = 50 * torch.randn(3, 140_000)
    frozen = freeze(layer)
    assert frozen.layers[0].arithmetic == "shift"
    for each in (frozen, frozen.float()):
        assert torch.equal(each(input), copy.deepcopy(layer).double()(input.double()).float())


@pytest.mark.parametrize(("bits", "fixed_point"), [(7, (16, 16)), (8, (4, 4))])
def test_shifts_beyond_64_bits_stay_float(bits: int, fixed_point: tuple[int, int]) -> None:
    model, input = sequence(conv(), scheme=schemes.shift_q(bits, fixed_point))
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] = 1.0  # pyright: ignore
    frozen = build(model, input)
    torch.testing.assert_close(frozen(input), model(input), rtol=1e-5, atol=1e-5)
    assert frozen.layers[0].arithmetic == "float"


@pytest.mark.parametrize("scheme", [schemes.lsq(8, 8), schemes.shift_q(5, (16, 16)), schemes.bnn()], ids=str)
def test_pictures_of_bytes_are_no_codes(scheme: Scheme) -> None:
    model, _ = sequence(conv(), scheme=scheme)
    pictures = torch.randint(0, 256, (2, 24, 8, 8), dtype=torch.uint8)
    for each in (model, freeze(model)):
        with pytest.raises(TypeError, match=r"dtype torch.uint8; it must be .* call input.to\(torch.float32\)"):
            each(pictures)


def test_other_threads_run_while_one_freezes() -> None:
    model, _ = sequence(conv(), scheme=schemes.lsq(4, 4))
    other, ends = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), threading.Event()
    errors: list[Exception] = []

    def run() -> None:
        while not ends.is_set():
            try:
                other(torch.ones(1, 4))
                model(torch.ones(1, 24, 8, 8))
            except Exception as error:  # noqa: BLE001  # whatever it is
                errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(4):
        freeze(model)
    ends.set()
    thread.join()
    assert not errors


@pytest.mark.parametrize(
    ("weight", "padding_value"),
    [(partial(quantizers.ShiftQ, 5), 0), (partial(quantizers.ShiftQ, 5), -1), (quantizers.ShiftPS, 1)],
)
def test_shifts_of_signs_have_the_border_of_the_training(weight: Any, padding_value: int) -> None:
    scheme = Scheme("mine", input=quantizers.Sign, weight=weight, padding_value=padding_value)
    model = qconv.convert(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1)), scheme, skip=()).eval()
    x = torch.randn(2, 8, 6, 6)
    frozen = build(model, x)
    assert frozen.layers[0].arithmetic == "shift"
    torch.testing.assert_close(frozen(x), model(x))
    assert verify(model, frozen, x).equal


def test_whole_pictures_are_no_bits() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, (3, 1), padding=(1, 0)))
    frozen = freeze(qconv.convert(model, schemes.bnn(), skip=()).eval())
    with pytest.raises(TypeError, match=r"input has dtype torch.int64; it must be a floating dtype"):
        frozen(torch.ones(2, 8, 6, 1, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"input \(ndarray\) must be a tensor of samples"):
        frozen(np.zeros((1, 1), np.float32))


class HalvesByQuantize(quantizers.Quantizer):
    """0, 0.5, 1 or 1.5."""

    roles = ("input",)
    bits = 2

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return (2 * x.clamp(0.0, 1.5)).round() / 2


class Halves(HalvesByQuantize):
    def whole(self, x: Tensor, *tensors: Tensor) -> quantizers.Whole:
        return quantizers.Whole((2 * x.clamp(0.0, 1.5)).round(), torch.tensor(0.5))


class LeveledHalves(Halves):
    def levels(self, *tensors: Tensor) -> Levels:
        return Levels(0, 3, torch.tensor(0.5))


class Shifted(quantizers.Sign):
    """What it inherits of levels is not that of its own values."""

    def whole(self, x: Tensor, *tensors: Tensor) -> quantizers.Whole:
        return quantizers.Whole(1 - 2 * (x < 0.5).to(torch.int8))


class LevelsAlone(HalvesByQuantize):
    levels = LeveledHalves.levels


@pytest.mark.parametrize("kind", [HalvesByQuantize, Halves, LeveledHalves, Shifted])
def test_input_quantizers_of_ones_own(kind: type[quantizers.Quantizer], tmp_path: Path) -> None:
    scheme = Scheme("own", input=kind, weight=schemes.bwn().weight)
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten())
    model = qconv.convert(model, scheme, skip=()).eval()
    x = torch.randn(4, 8, 10, 10)
    frozen = build(model, x)
    torch.testing.assert_close(frozen(x), model(x))
    assert [layer.arithmetic for layer in frozen.layers] == ["integer" if kind is LeveledHalves else "float"] * 2
    assert qconv.verify(model, frozen, x).equal
    if kind is not HalvesByQuantize:  # whose clamp of a Python number torch can't export
        compared = qconv.export_onnx(model, tmp_path / "model.onnx", x)
        assert compared.decisions == 0


def test_levels_without_codes() -> None:
    model = qconv.convert(nn.Sequential(nn.Conv2d(8, 8, 3)), Scheme("own", input=LevelsAlone), skip=()).eval()
    with pytest.raises(ValueError, match=r"layer '0' \(QConv2d, own\): LevelsAlone states levels\(\), but has no"):
        freeze(model)


class ScaledInputs(quantizers.Quantizer):
    """Signs with a scale for each input channel."""

    roles = ("weight",)
    bits = 1

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return self.codes(x, *tensors).dequantize()

    def codes(self, x: Tensor, *tensors: Tensor) -> quantizers.Codes:
        return quantizers.Codes(x.sign(), 1 + torch.arange(x.shape[1]).float().view(1, -1, 1, 1))


def test_scales_of_another_shape_stay_float() -> None:
    scheme = Scheme("mine", input=quantizers.Sign, weight=ScaledInputs)
    model = qconv.convert(nn.Sequential(nn.Conv2d(8, 8, 3)), scheme, skip=()).eval()
    frozen = freeze(model)
    assert frozen.layers[0].reason == "its weight has scales (1, 8, 1, 1), not one for each filter"
    torch.testing.assert_close(frozen(x := torch.randn(2, 8, 6, 6)), model(x))


def test_a_layer_with_a_forward_of_its_own_computes_on_floats() -> None:
    class Doubled(qconv.QConv2d):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    kinds = [arithmetic(kind(4, 8, 3, scheme=schemes.bnn()))[:2] for kind in (qconv.QConv2d, Doubled)]
    assert kinds == [("binary", ""), ("float", "Doubled has a forward of its own")]


class OfOneImage(nn.Module):
    """A forward that treats one image in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.more = (nn.Conv2d(given, 8, 3, padding=1) for given in (3, 8, 8))

    def forward(self, input: Tensor) -> Any:
        hidden = self.stem(input)
        return self.more(hidden.relu() if len(hidden) == 1 else self.one(hidden))


class InAutocast(OfOneImage):
    def forward(self, input: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.one(self.stem(input))
        return self.more(hidden.float())


class Pair(NamedTuple):
    one: Tensor
    other: Tensor


class OfPairs(OfOneImage):
    def forward(self, input: Tensor) -> Any:
        hidden = self.more(self.one(self.stem(input).sigmoid()))
        return Pair(hidden, hidden.mean(1))


@pytest.mark.parametrize(
    ("kind", "untraced"), [(OfOneImage, "for one image than for several"), (InAutocast, "dtype"), (OfPairs, "")]
)
def test_what_a_forward_does_with_one_image_and_with_several(
    kind: type[nn.Module], untraced: str, tmp_path: Path
) -> None:
    input = torch.randn(4, 3, 8, 8)
    model = trained(kind(), schemes.lsq(4, 4), input)
    frozen = build(model, input)
    torch.save(frozen, tmp_path / "frozen.pt")
    loaded = torch.load(tmp_path / "frozen.pt", weights_only=False)
    for batch in (input[:1], input):
        wanted, got, again = (leaves(each(batch)) for each in (model, frozen, loaded))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(again, got, rtol=1e-6, atol=1e-6)
        assert verify(model, frozen, batch).equal
    assert untraced in frozen.untraced
    assert bool(untraced) == bool(frozen.untraced)
