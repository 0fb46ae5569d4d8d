"""Bias correction: the mean outputs of corrected layers are those of the float network."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import same
from torch import Tensor, nn

import qconv
from qconv import schemes
from qconv.layers.adopt import release


def test_what_is_calibrated_stays_where_another_layer_waits() -> None:
    class WithHead(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            return self[1](self[0](input).relu())

    float_model = WithHead(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 2, 1)).eval()
    model: Any = qconv.convert(copy.deepcopy(float_model), schemes.lsq(4, 4), skip=())
    images = torch.randn(32, 3, 8, 8)
    with pytest.warns(UserWarning, match="did not call layer '2'"):
        qconv.calibrate(model, [images])
    with torch.no_grad():
        step = model[1].input_quantizer.step.mul_(3).clone()  # stands for training
    with pytest.warns(UserWarning, match="did not call layer '2'"):
        qconv.correct_bias(model, float_model, images)
    assert torch.equal(model[1].input_quantizer.step, step)


SCHEMES = [schemes.minmax(3, 8), schemes.minmax(2, None), schemes.lsq(2, 4), schemes.dorefa(2, 2), schemes.bwn()]


class Network(nn.Module):
    """Layers with and without bias, with groups, transposed, behind a shortcut and two batch norms; names nest."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU())
        self.depthwise, self.bn1 = nn.Conv2d(6, 6, 3, padding=1, groups=3, bias=False), nn.BatchNorm2d(6)
        self.between, self.bn2 = nn.Identity(), nn.BatchNorm2d(6)
        self.transposed = nn.ConvTranspose2d(6, 4, 3, stride=2, groups=2)
        self.last = nn.Linear(4 * 15, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.between(self.depthwise(x))
        x = torch.relu(x + self.bn1(y) + self.bn2(y))
        return self.last(torch.relu(self.transposed(x)).mean(2).flatten(1))


def trained(seed: int = 0) -> Network:
    torch.manual_seed(seed)
    network = Network().double()
    with torch.no_grad():
        for norm in (network.bn1, network.bn2):
            for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
                assert tensor is not None
                tensor.uniform_(0.5, 1.5)
    return network.eval()


def pictures(count: int = 40, seed: int = 1) -> Tensor:
    return torch.rand(count, 2, 9, 9, generator=torch.Generator().manual_seed(seed)).double()


def quantized(network: nn.Module, scheme: qconv.Scheme = SCHEMES[0]) -> Any:
    model = qconv.convert(copy.deepcopy(network), scheme, skip=())
    qconv.calibrate(model, [pictures()])
    return model.eval()


def means(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """The mean of each filter's output, less the running mean of a batch norm behind it."""
    found: dict[str, Tensor] = {}
    for name in ("stem.0", "depthwise", "transposed", "last"):
        handle = model.get_submodule(name).register_forward_hook(
            lambda *seen, name=name: found.update({name: seen[-1].transpose(0, 1).flatten(1).mean(1)})
        )
        with torch.no_grad():
            model(images)
        handle.remove()
    without = found.pop("depthwise")
    for name in ("bn1", "bn2"):
        running: Any = model.get_submodule(name).running_mean
        found[name] = without - running
    return found


def hooks_of(*models: nn.Module) -> list[int]:
    return [len(m._forward_hooks) + len(m._forward_pre_hooks) for model in models for m in model.modules()]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_mean_outputs_are_those_of_the_float_network(scheme: qconv.Scheme, tmp_path: Path) -> None:
    network = trained()
    model = quantized(network, scheme)
    target, before = means(network, pictures()), means(model, pictures())
    assert all((before[name] - target[name]).abs().max() > 1e-3 for name in target)
    found = qconv.correct_bias(model, network, pictures())
    for name, mean in means(model, pictures()).items():
        torch.testing.assert_close(mean, target[name], rtol=0, atol=1e-9)
    corrected = {"stem.0": "its bias", "depthwise": "bn1, bn2", "transposed": "its bias", "last": "its bias"}
    assert {row.name: row.corrected for row in found.rows} == corrected
    assert str(found).count("\n") == 6
    again = qconv.correct_bias(model, network, pictures())
    assert all(row.size < 1e-9 for row in again.rows)
    qconv.save_packed(model, tmp_path / "a.qconv", example=pictures(2))
    loaded = qconv.load_packed(tmp_path / "a.qconv", trained())
    with torch.no_grad():
        torch.testing.assert_close(loaded(pictures(4)), model(pictures(4)))


def test_the_size_of_a_shift_by_hand() -> None:
    layer = nn.Linear(1, 2).double()
    network = nn.Sequential(layer)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0], [3.0]]))
    model = qconv.convert(copy.deepcopy(network), schemes.bwn(), skip=())
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[0.5], [3.0]]))  # of another float model: y_q − y is x / 2 and 0
    x = torch.tensor([[0.0], [2.0], [4.0]]).double()  # mean 2, deviation √(8/3)
    (row,) = qconv.correct_bias(model, network, x).rows
    deviations = (8 / 3) ** 0.5 * torch.tensor([0.5, 3.0])
    assert row.size == pytest.approx(1 / float(deviations.norm()))
    corrected: Any = model[0]
    torch.testing.assert_close(corrected.bias - layer.bias, torch.tensor([-1.0, 0.0]).double())


def test_what_stays() -> None:
    network = trained()
    model = quantized(network).train()
    model.bn1.eval()
    stored, of_float, hooks = state_of(model), state_of(network), hooks_of(model, network)
    modes, random = [module.training for module in model.modules()], torch.random.get_rng_state()
    qconv.correct_bias(model, network, [(batch, torch.zeros(8)) for batch in pictures().split(8)], max_samples=20)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), random)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, stored[name])}
    assert changed == {"stem.0.bias", "transposed.bias", "last.bias", "bn1.running_mean", "bn2.running_mean"}
    assert same(network.state_dict(), of_float)
    assert all(parameter.requires_grad for parameter in model.parameters() if parameter.is_floating_point())
    assert hooks_of(model, network) == hooks


@pytest.mark.parametrize(
    ("layers", "images", "corrected", "size"),
    [
        # a bias or a batch norm takes the shift, one without statistics every mean
        ((nn.Conv2d(2, 3, 3, bias=False), nn.ReLU(), nn.BatchNorm2d(3)), 40, "nothing", None),
        ((nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3, track_running_stats=False)), 40, "1", 0),
        # channels of a linear layer are not those of a batch norm behind it
        ((nn.Flatten(2), nn.Linear(81, 2, bias=False), nn.BatchNorm1d(2)), 40, "nothing", None),
        ((nn.Flatten(), nn.Linear(162, 2)), 1, "its bias", float("inf")),  # deviations of 0
    ],
)
def test_what_is_corrected(layers: Any, images: int, corrected: str, size: float | None) -> None:
    network = nn.Sequential(*copy.deepcopy(layers)).double().eval()
    expectation = pytest.warns(UserWarning, match="stay shifted: there is no bias, and no batch norm")
    with expectation if corrected == "nothing" else nullcontext():
        found = qconv.correct_bias(quantized(network), network, pictures(images))
    (row,) = found.rows
    assert row.corrected == corrected
    assert row.size > 0 if size is None else row.size == size
    assert ("inf%" in str(found)) == (images == 1)


def test_batches_and_a_tensor_are_the_same_and_what_waits_is_calibrated() -> None:
    network = trained()
    models: list[Any] = [qconv.convert(copy.deepcopy(network), SCHEMES[0], skip=()) for _ in range(2)]
    first = qconv.correct_bias(models[0], network, pictures(), max_samples=24)
    second = qconv.correct_bias(models[1], network, iter(pictures().split(7)), max_samples=24)
    assert first.samples == second.samples == 24
    assert torch.equal(models[0](pictures()), models[1](pictures()))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda model, network: (network, network, pictures()), ValueError, "model .Network. has no quantized layers"),
        (lambda model, network: (model, model, pictures()), ValueError, "float_model has a quantized layer, layer 'st"),
        (lambda model, network: (model, network.stem, pictures()), ValueError, "'stem.0.weight' is absent in it"),
        (lambda model, network: (model, network, pictures() / 0), FloatingPointError, "the outputs of layer 'stem.0'"),
        (
            lambda model, network: (model, poisoned(network), pictures()),
            *(FloatingPointError, r"layer 'transposed' .ConvTranspose2d. have NaN or inf"),
        ),
        (
            lambda model, network: (model, network, [pictures(), pictures()[:, :, 1:]]),
            *(ValueError, r"images must all have one size, .* there are \[\(2, 8, 9\), \(2, 9, 9\)\]"),
        ),
        (
            lambda model, network: (model, copy.deepcopy(network).to("meta"), pictures()),
            *(ValueError, r"float_model \(on meta\) must be on the device of model \(cpu\): see 'stem.0'"),
        ),
    ],
)
def test_errors_leave_the_model_as_it_was(call: Callable[..., Any], error: type[Exception], words: str) -> None:
    network = trained()
    model = quantized(network)
    stored, hooks = state_of(model), hooks_of(model, network)
    with pytest.raises(error, match=words):
        qconv.correct_bias(*call(model, network))
    with torch.inference_mode(), pytest.raises(RuntimeError, match=r"correct_bias .* outside torch.inference_mode\(\)"):
        qconv.correct_bias(model, network, pictures())
    assert same(model.state_dict(), stored)
    assert hooks_of(model, network) == hooks


def poisoned(network: Network) -> Network:
    """NaN in the float model alone."""
    network = copy.deepcopy(network)
    with torch.no_grad():
        network.transposed.weight[0] = torch.nan
    return network


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())


class Chain(nn.Module):
    """A convolution without bias and a batch norm, and what a test makes of them."""

    def __init__(self, path: Callable[["Chain", Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(2, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2)
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        return self.path(self, x)


def chain(path: Callable[[Chain, Tensor], Tensor]) -> Chain:
    torch.manual_seed(0)
    return Chain(path).double().eval()


@pytest.mark.parametrize(
    "path",
    [
        lambda net, x: net.bn(net.conv(x).relu_()),
        lambda net, x: net.bn(net.conv(x).clamp_(0, 0.3)),
        lambda net, x: net.bn(net.conv(x).add_(x)),
    ],
    ids=["relu", "clamp", "add"],
)
def test_an_output_that_is_changed_in_place_is_not_that_of_the_layer(path: Callable[[Chain, Tensor], Tensor]) -> None:
    network = chain(path)
    model = quantized(network)
    before = model(pictures())
    with pytest.warns(UserWarning, match="'conv' stay shifted"):
        qconv.correct_bias(model, network, pictures())
    assert torch.equal(model(pictures()), before)


@pytest.mark.parametrize(
    "path",
    [
        lambda net, x: net.bn(net.conv(net.bn(net.conv(x)))),
        lambda net, x: net.bn(torch.relu(net.bn(net.conv(x)))),
        lambda net, x: net.bn(net.conv(torch.relu(net.bn(x)))),
    ],
    ids=["layer", "norm behind", "norm before"],
)
def test_layers_and_norms_that_are_called_twice(path: Callable[[Chain, Tensor], Tensor]) -> None:
    network = chain(path)
    model = quantized(network)
    before = model(pictures())
    with pytest.raises(TypeError, match=r"is called twice: its \w+ have different shifts"):
        qconv.correct_bias(model, network, pictures())
    assert torch.equal(model(pictures()), before)
    by_name = chain(lambda net, x: net.bn(input=net.conv(x)))
    (row,) = qconv.correct_bias(quantized(by_name), by_name, pictures()).rows
    assert row.corrected == "bn"


@pytest.mark.nightly
def test_compiled_models_are_corrected_as_others(recwarn: pytest.WarningsRecorder) -> None:
    network = trained()
    models = [quantized(network) for _ in range(2)]
    for each in (network, models[1]):
        each.compile(backend="eager")
        each(pictures())
    found = [qconv.correct_bias(model, network, pictures()) for model in models]
    assert found[0].rows == found[1].rows
    assert torch.equal(models[0](pictures()), models[1](pictures()))
    assert not [each for each in recwarn if "raph break" in str(each.message)]


def test_biases_that_are_shared_or_computed() -> None:
    network = nn.Sequential(nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3)).double().eval()
    model = quantized(network)
    model[1].bias = model[0].bias
    with pytest.raises(TypeError, match="0 and 1 share a bias"):
        qconv.correct_bias(model, network, pictures())
    model = quantized(network)
    release(model[1])  # a float layer has the bias, too
    model[1].bias = model[0].bias
    with pytest.raises(TypeError, match="0 and 1 share a bias"):
        qconv.correct_bias(model, network, pictures())
    model = quantized(network)
    nn.utils.parametrize.register_parametrization(model[1], "bias", nn.Identity())
    with pytest.raises(TypeError, match=r"the bias of layer '1' .* is computed by a parametrization"):
        qconv.correct_bias(model, network, pictures())
    with pytest.raises(ValueError, match=r"float_model \(on meta\) must be on the device of model \(cpu\)"):
        qconv.reconstruct(quantized(network), pictures(), float_model=copy.deepcopy(network).to("meta"))
    convolution = nn.Sequential(nn.Conv2d(2, 7, 3)).double()  # as many filters as rows
    with pytest.raises(ValueError, match=r"images must be batches: .* have 3 dimensions instead of \d"):
        qconv.correct_bias(quantized(convolution), convolution, pictures()[0])


def test_hooks_behind_a_layer_see_what_is_corrected() -> None:
    network = trained()
    model = quantized(network)
    for each in (network, model):
        each.last.register_forward_hook(lambda module, args, output: 4 * output)
    qconv.correct_bias(model, network, pictures())
    again = {row.name: row.size for row in qconv.correct_bias(model, network, pictures()).rows}
    assert again["last"] == pytest.approx(0, abs=1e-6)
