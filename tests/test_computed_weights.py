"""Weights that are computed: parametrized and pruned layers are right, or refused before anything changes."""

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from conftest import same
from methods import METHODS
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import qconv
from qconv import schemes
from qconv.quantizers import Identity, Quantizer

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*weight_norm.* is deprecated", "ignore:.*spectral_norm.* is deprecated"
)


def pruned(layer: nn.Module) -> nn.Module:
    return prune.l1_unstructured(layer, "weight", amount=0.5)


MAKERS: dict[str, tuple[Callable[[nn.Module], nn.Module], str]] = {
    # what computes the weight, and how the message names it
    "weight_norm": (parametrizations.weight_norm, r"\(WeightNorm\): call torch.nn.utils.parametrize.remove_param"),
    "spectral_norm": (
        parametrizations.spectral_norm,
        r"\(SpectralNorm\): call torch.nn.utils.parametrize.remove_param",
    ),
    "old weight_norm": (nn.utils.weight_norm, r"\(WeightNorm\): call torch.nn.utils.remove_weight_norm"),
    "old spectral_norm": (nn.utils.spectral_norm, r"\(SpectralNorm\): call torch.nn.utils.remove_spectral_norm"),
    "pruned": (pruned, r"\(pruning\)(: call torch.nn.utils.prune.remove|, and .* keeps no zeros)"),
}
makers = pytest.mark.parametrize(("make", "message"), MAKERS.values(), ids=MAKERS.keys())


def small() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 1))


@makers
def test_convert_leaves_what_a_scheme_would_replace_and_says_why(
    make: Callable[[nn.Module], nn.Module], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = small()
    kind = type(make(model[1]))
    assert "stays: its weight is computed" in str(qconv.plan(model, schemes.shift_ps(), skip=()))
    assert re.search(message, capsys.readouterr().out)
    with pytest.warns(UserWarning, match=rf"layer '1' stays float: its weight is computed {message}.*ShiftPS"):
        qconv.convert(model, schemes.shift_ps(), skip=())
    assert [type(layer) for layer in model] == [qconv.QConv2d, kind, qconv.QConv2d]
    qconv.convert(qconv.to_float(model), schemes.shift_ps(), skip=("1",))


@makers
def test_schemes_that_need_the_latent_weight_are_refused(make: Callable[[nn.Module], nn.Module], message: str) -> None:
    for scheme in (schemes.shift_ps(), schemes.siman(), schemes.xnor(center=True)):
        model = qconv.convert(small(), scheme, skip=())
        make(model[1])
        with pytest.raises(ValueError, match=r"layer '1' \(.*QConv2d, .*\): its weight is computed " + message):
            model(torch.randn(2, 3, 8, 8))


@pytest.mark.parametrize("is_first", [True, False], ids=["made first", "converted first"])
@makers
def test_others_train_on_the_computed_weight(
    make: Callable[[nn.Module], nn.Module], message: str, is_first: bool
) -> None:
    model = small()
    if is_first:
        make(model[1])
    qconv.convert(model, schemes.lsq(4, None), skip=())
    if not is_first:
        make(model[1])
    assert all(isinstance(layer, qconv.QConv2d) for layer in model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    qconv.after_every_step(optimizer, model)
    input = torch.randn(2, 3, 8, 8)
    for _ in range(2):
        optimizer.zero_grad()
        model(input).square().mean().backward()
        optimizer.step()
    model.eval()
    output = model(input)
    layer: Any = model[1]
    quantizer = layer.weight_quantizer
    weight_q = quantizer.quantize(layer.weight, *quantizer.tensors())
    expected = nn.functional.conv2d(model[0](input), weight_q, layer.bias)
    torch.testing.assert_close(output, model[2](expected))


def keeps_zeros(scheme: qconv.Scheme) -> bool:
    """Whether zeros stay 0 at the end of training: some among weights of both signs, and one below all others."""
    signed = nn.Conv2d(4, 4, 3).weight.detach()
    single = signed.abs() + 1
    signed[0], single[0, 0, 0, 0] = 0, 0
    for weight in (signed, single):
        quantizer = scheme.weight()
        quantizer.initialize(weight)
        quantizer.eval().set_progress_(1.0, weight.clone())
        if quantizer.quantize(weight, *quantizer.tensors())[weight == 0].any():
            return False
    return True


@pytest.mark.parametrize("name", [name for name in METHODS if not name.startswith(("identity", "shift_ps"))])
def test_pruned_weights_stay_zero_or_are_refused_by_name(name: str) -> None:
    model, input = small(), torch.randn(2, 3, 8, 8)
    pruned(model[1])
    if not keeps_zeros(METHODS[name]):
        with pytest.warns(UserWarning, match=r"layer '1' stays float: .*\(pruning\).* keeps no zeros"):
            qconv.convert(model, METHODS[name], skip=())
        assert type(model[1]) is nn.Conv2d
        return
    qconv.convert(model, METHODS[name], skip=())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    qconv.after_every_step(optimizer, model)
    for progress in (0.0, 0.5, 0.99):
        qconv.set_progress(model, progress)
        optimizer.zero_grad()
        model(input).square().mean().backward()
        optimizer.step()
    layer: Any = model.eval()[1]
    assert not layer.quantized_weight()[layer.weight_mask == 0].any()
    assert layer.quantized_weight().any()
    assert model(input).isfinite().all()


def test_the_first_zeros_of_a_later_pruning_are_refused_by_schemes_without_zeros() -> None:
    model, input = qconv.convert(small(), schemes.bnn(), skip=()), torch.randn(2, 3, 8, 8)
    prune.identity(model[1], "weight")
    model(input)
    pruned(model[1])
    with pytest.raises(ValueError, match=r"layer '1' .*\(pruning\).* keeps no zeros"):
        model(input)


@makers
def test_to_float_keeps_what_computes_the_weight(make: Callable[[nn.Module], nn.Module], message: str) -> None:
    torch.manual_seed(1)
    expected = small()
    torch.manual_seed(1)
    model = qconv.convert(small(), schemes.lsq(), skip=())
    for network in (expected, model):
        torch.manual_seed(2)
        make(network[1])
    qconv.to_float(model)
    kind = type(expected[1])
    assert type(model[1]).__name__ == kind.__name__
    assert isinstance(model[1], nn.Conv2d)
    assert not isinstance(model[1], qconv.QuantizedLayer)
    assert model.state_dict().keys() == expected.state_dict().keys()
    input = torch.randn(2, 3, 8, 8)
    assert model.eval()(input).equal(expected.eval()(input))
    if parametrize.is_parametrized(model[1]):
        parametrize.remove_parametrizations(model[1], "weight")
        assert type(model[1]) is nn.Conv2d
        torch.testing.assert_close(model(input), expected(input))


def test_a_bias_that_is_parametrized_comes_through() -> None:
    model = qconv.convert(small(), schemes.bnn(), skip=())
    parametrize.register_parametrization(model[1], "bias", nn.Tanh())
    model(torch.randn(2, 3, 8, 8))
    qconv.to_float(model)
    assert model(torch.randn(2, 3, 8, 8)).isfinite().all()
    layer: Any = model[1]
    assert layer.bias.equal(layer.parametrizations.bias.original.tanh())


def test_another_scheme_for_a_computed_weight() -> None:
    layer: Any = qconv.QConv2d(4, 4, 3, scheme=schemes.lsq())
    parametrizations.weight_norm(layer)
    layer.set_scheme(schemes.lsq(2, None))
    assert layer.quantized_weight().unique().numel() <= 4
    layer.set_scheme(schemes.shift_ps())
    with pytest.raises(ValueError, match=r"its weight is computed \(WeightNorm\).* learns other tensors in its place"):
        layer(torch.randn(1, 4, 8, 8))


class Picky(Quantizer):
    """A quantizer that some weights do not suit."""

    def quantize(self, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        return x

    def initialize(self, x: torch.Tensor) -> None:
        if x.shape[-1] == 1:
            raise ValueError("kernel_size (=1) must be more")


@pytest.mark.parametrize("first", [schemes.shift_ps(), schemes.bnn()], ids=str)
def test_a_layer_that_fails_leaves_the_model_as_it_was(first: qconv.Scheme) -> None:
    model = small()
    model[1].weight.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    picky = qconv.Scheme("picky", Identity, partial(Picky))
    with pytest.raises(ValueError, match=r"layer '2' \(Conv2d\): kernel_size \(=1\) must be more"):
        qconv.convert(model, picky, skip=(), overrides={"[01]": first})
    assert [type(layer) for layer in model] == [nn.Conv2d] * 3
    assert [tensor.requires_grad for tensor in model.parameters()] == [True, True, False, True, True, True]
    assert same(model.state_dict(), before)
    assert vars(model[2]).keys() == vars(nn.Conv2d(4, 4, 1)).keys()


class Dropped(nn.Module):
    """Other zeros at each computation, counted."""

    count = 0

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Half of the weights."""
        self.count += self.training
        return nn.functional.dropout(weight, training=self.training)


LAYERS: dict[str, tuple[Callable[..., nn.Module], Callable[..., nn.Module], tuple[int, ...]]] = {
    "conv": (partial(nn.Conv2d, 4, 4, 3), partial(qconv.QConv2d, 4, 4, 3), (2, 4, 6, 6)),
    "unbatched": (partial(nn.Conv2d, 4, 4, 3), partial(qconv.QConv2d, 4, 4, 3), (4, 6, 6)),
    "transposed": (partial(nn.ConvTranspose1d, 4, 4, 3), partial(qconv.QConvTranspose1d, 4, 4, 3), (2, 4, 6)),
    "linear": (partial(nn.Linear, 4, 4), partial(qconv.QLinear, 4, 4), (2, 4)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_forward_computes_the_weight_once(name: str) -> None:
    make, make_quantized, shape = LAYERS[name]
    layer, quantized = make(), make_quantized(scheme=schemes.identity())
    quantized.load_state_dict(layer.state_dict())
    parametrizations.spectral_norm(layer)
    parametrizations.spectral_norm(quantized)
    quantized.load_state_dict(layer.state_dict())
    input = torch.randn(shape)
    for _ in range(3):
        torch.testing.assert_close(quantized(input), layer(input))
    dropped = Dropped()
    quantized = make_quantized(scheme=schemes.identity())
    parametrize.register_parametrization(quantized, "weight", dropped)
    dropped.count = 0
    quantized(input)
    assert dropped.count == 1
    assert dropped.training


LOOKS: dict[str, Callable[[nn.Sequential], object]] = {
    "after_step": qconv.after_step,
    "set_progress": partial(qconv.set_progress, progress=0.5),
    "quantized_weight": lambda model: model[0].quantized_weight(),  # pyright: ignore[reportCallIssue]
    "weight_codes": lambda model: model[0].weight_codes(),  # pyright: ignore[reportCallIssue]
    "summarize": lambda model: qconv.summarize(model, (4, 6, 6)),
}


@pytest.mark.parametrize("look", LOOKS)
def test_looking_at_a_computed_weight_has_no_effect(look: str) -> None:
    for scheme in (schemes.lsq(4, None), schemes.recu()):
        model = nn.Sequential(qconv.QConv2d(4, 4, 3, scheme=scheme))
        parametrizations.spectral_norm(model[0])
        parametrize.register_parametrization(model[0], "weight", Dropped())
        before = {name: tensor.clone() for name, tensor in model.state_dict().items() if "parametrizations" in name}
        random = torch.get_rng_state()
        LOOKS[look](model)
        state = model.state_dict()
        assert all(state[name].equal(tensor) for name, tensor in before.items())
        assert torch.get_rng_state().equal(random)
        assert all(module.training for module in model.modules())


@makers
def test_the_quantized_weight_is_never_that_of_an_earlier_step(
    make: Callable[[nn.Module], nn.Module], message: str
) -> None:
    layer = cast(Any, make(qconv.QConv2d(4, 4, 3, scheme=schemes.lsq(4, None))))
    layer(torch.randn(2, 4, 6, 6))
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name != "bias":
                parameter.copy_(torch.randn_like(parameter))
    now, codes = layer.quantized_weight(), layer.weight_codes()
    layer.eval()
    layer(torch.randn(2, 4, 6, 6))
    assert layer.quantized_weight().equal(now)
    assert layer.weight_codes().values.equal(codes.values)


@makers
def test_the_first_backward_is_like_the_others(make: Callable[[nn.Module], nn.Module], message: str) -> None:
    layer = cast(Any, make(qconv.QConv2d(4, 4, 3, scheme=schemes.minmax()))).eval()
    layer.input_quantizer.calibrated = True
    input = torch.randn(2, 4, 6, 6)
    grads = []
    for _ in range(3):
        layer.zero_grad()
        output = layer(input)
        layer.quantized_weight()
        assert layer.weight.requires_grad
        output.square().mean().backward()
        grads.append([parameter.grad.clone() for parameter in layer.parameters() if parameter.requires_grad])
    assert all(grad.any() for grad in grads[0])
    torch.testing.assert_close(grads[0], grads[1])
    torch.testing.assert_close(grads[1], grads[2])


def orthogonal(layer: nn.Module) -> nn.Module:
    return parametrizations.orthogonal(layer, "weight")


@pytest.mark.parametrize("make", [*(make for make, _ in MAKERS.values()), orthogonal], ids=[*MAKERS, "orthogonal"])
@pytest.mark.parametrize("scheme", [schemes.lsq(2, None), schemes.dsq(2, None)], ids=["lsq", "dsq"])
def test_what_is_learned_starts_from_the_computed_weight(
    make: Callable[[nn.Module], nn.Module], scheme: qconv.Scheme
) -> None:
    if make is pruned and scheme.name.startswith("dsq"):
        pytest.skip("DSQ gives pruned weights another value")
    layer, input = qconv.QConv2d(4, 4, 3), torch.randn(2, 4, 6, 6)
    nn.init.normal_(layer.weight, std=2)
    layer.set_scheme(scheme)  # so that nothing but `make` changes the weight
    computed: Any = make(layer)
    learned = [*computed.weight_quantizer.parameters()]
    sources = [p for p in computed.parameters() if p is not computed.bias and all(p is not own for own in learned)]
    for _ in range(2):
        computed(input)
        computed.eval()
        plain = qconv.QConv2d(4, 4, 3, scheme=scheme)
        plain.load_state_dict({"weight": computed.weight.detach(), "bias": computed.bias.detach()})
        torch.testing.assert_close(learned, [*plain.weight_quantizer.parameters()])
        computed.train()
        if make is pruned:
            pruned(computed)
            continue
        with torch.no_grad():  # as a float checkpoint does
            for source in sources:
                source.mul_(3)
    computed(input).square().mean().backward()
    before = [own.clone() for own in learned]
    with torch.no_grad():
        for source in sources:
            source.mul_(3)
    computed(input)  # it is trained, and follows no more
    assert all(own.equal(as_before) for own, as_before in zip(learned, before, strict=True))


def test_calibration_does_not_compute_the_weight() -> None:
    for calibrate in (lambda model: qconv.calibrate(model, [torch.randn(2, 4, 6, 6)]), None):
        model, dropped = nn.Sequential(qconv.QConv2d(4, 4, 3, scheme=schemes.lsq(4, 4))), Dropped()
        parametrize.register_parametrization(model[0], "weight", dropped)
        dropped.count = 0
        if calibrate is not None:
            calibrate(model)
            assert dropped.count == 0
        model(torch.randn(2, 4, 6, 6))
        assert dropped.count == 1


@pytest.mark.parametrize(
    ("penalty", "scheme"),
    [(qconv.optim.dampening_penalty, schemes.lsq(2, None)), (qconv.optim.sine_penalty, schemes.biper())],
    ids=["dampening", "sine"],
)
def test_penalties_of_computed_weights(penalty: Any, scheme: qconv.Scheme) -> None:
    model = nn.Sequential(qconv.QConv2d(4, 4, 3, scheme=scheme))
    parametrizations.spectral_norm(model[0])
    qconv.calibrate(model, [torch.randn(2, 4, 6, 6)])  # sets what is learned from the weight
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first = penalty(model)
    assert penalty(model).equal(first)
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    first.backward()
    plain = nn.Sequential(qconv.QConv2d(4, 4, 3, scheme=scheme))
    layer: Any = model.eval()[0]
    plain.load_state_dict(qconv.float_state_dict(model) | {"0.weight": layer.weight.detach()}, strict=False)
    qconv.calibrate(plain, [torch.randn(2, 4, 6, 6)])
    torch.testing.assert_close(first, penalty(plain))
    assert layer.parametrizations.weight.original.grad.any()


def test_copies_of_parametrized_layers_are_copies_of_layers() -> None:
    layer = qconv.QConv2d(4, 4, 3, scheme=schemes.lsq(2, None))
    parametrizations.weight_norm(layer)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    qconv.after_every_step(optimizer, layer)
    copied = copy.deepcopy(layer)
    assert copied.weight.equal(layer.weight)
    assert copied.weight_quantizer is not layer.weight_quantizer
    plain: Any = qconv.to_float(nn.Sequential(layer))
    assert copy.deepcopy(plain)[0].weight.equal(plain[0].weight)


def test_inq_keeps_the_zeros_of_a_mask_that_grows() -> None:
    torch.manual_seed(0)
    model = qconv.convert(nn.Sequential(nn.Conv2d(3, 8, 3)), schemes.inq(), skip=())
    layer: Any = model[0]
    prune.l1_unstructured(layer, "weight", amount=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    qconv.after_every_step(optimizer, model)
    for progress in (0.0, 0.3, 0.6, 0.8, 1.0):
        if progress == 0.8:
            prune.l1_unstructured(layer, "weight", amount=0.5)
        qconv.set_progress(model, progress)
        model(torch.randn(2, 3, 9, 9)).square().mean().backward()
        optimizer.step()
    weight_q = layer.quantized_weight()
    assert not weight_q[layer.weight_mask == 0].any()
    assert weight_q.any()
    assert layer.weight_codes().dequantize().to(weight_q).equal(weight_q)
