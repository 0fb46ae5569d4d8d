"""Bias correction: the mean outputs of corrected layers are those of the float network."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qconv
from qconv import schemes

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
    assert [(row.name, row.corrected) for row in found.rows] == [
        ("stem.0", "its bias"),
        ("depthwise", "bn1, bn2"),
        ("transposed", "its bias"),
        ("last", "its bias"),
    ]
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


def test_outputs_on_other_pictures_come_nearer() -> None:
    network, other = trained(), pictures(200, seed=2)
    model = quantized(network, schemes.minmax(2, 8))
    with torch.no_grad():
        before = (model(other) - network(other)).square().mean()
        qconv.correct_bias(model, network, pictures())
        assert (model(other) - network(other)).square().mean() < 0.5 * before


def test_what_stays() -> None:
    network = trained()
    model = quantized(network).train()
    model.bn1.eval()
    stored = {name: value.clone() for name, value in model.state_dict().items()}
    of_float = {name: value.clone() for name, value in network.state_dict().items()}
    hooks = hooks_of(model, network)
    modes, random = [module.training for module in model.modules()], torch.random.get_rng_state()
    qconv.correct_bias(model, network, [(batch, torch.zeros(8)) for batch in pictures().split(8)], max_samples=20)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), random)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, stored[name])}
    assert changed == {"stem.0.bias", "transposed.bias", "last.bias", "bn1.running_mean", "bn2.running_mean"}
    assert all(torch.equal(value, of_float[name]) for name, value in network.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters() if parameter.is_floating_point())
    assert hooks_of(model, network) == hooks


def test_batches_and_a_tensor_are_the_same_and_what_waits_is_calibrated() -> None:
    network = trained()
    models: list[Any] = [qconv.convert(copy.deepcopy(network), SCHEMES[0], skip=()) for _ in range(2)]
    first = qconv.correct_bias(models[0], network, pictures(), max_samples=24)
    second = qconv.correct_bias(models[1], network, iter(pictures().split(7)), max_samples=24)
    assert first.samples == second.samples == 24
    assert torch.equal(models[0](pictures()), models[1](pictures()))


def test_layers_without_bias_or_batch_norm_are_named() -> None:
    network = nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.ReLU(), nn.BatchNorm2d(3)).double().eval()
    model = quantized(network)
    with pytest.warns(UserWarning, match=r"the shift of 0 stays: no bias, and no batch norm that takes the output"):
        (row,) = qconv.correct_bias(model, network, pictures()).rows
    assert row.corrected == "nothing"
    assert row.size > 0


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda model, network: (network, network, pictures()), ValueError, "model .Network. is float: convert it"),
        (lambda model, network: (model, model, pictures()), ValueError, "float_model has a quantized layer, layer 'st"),
        (lambda model, network: (model, network.stem, pictures()), ValueError, "'stem.0.weight' is absent in it"),
        (lambda model, network: (model, network, pictures(0)), ValueError, "at least one sample"),
        (lambda model, network: (model, network, pictures() / 0), FloatingPointError, "the outputs of layer 'stem.0'"),
    ],
)
def test_errors_leave_the_model_as_it_was(call: Callable[..., Any], error: type[Exception], words: str) -> None:
    network = trained()
    model = quantized(network)
    stored = {name: value.clone() for name, value in model.state_dict().items()}
    hooks = hooks_of(model, network)
    with pytest.raises(error, match=words):
        qconv.correct_bias(*call(model, network))
    assert all(torch.equal(value, stored[name]) for name, value in model.state_dict().items())
    assert hooks_of(model, network) == hooks


def test_a_batch_norm_without_statistics_takes_every_mean_away() -> None:
    network = (
        nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3, track_running_stats=False)).double().eval()
    )
    (row,) = qconv.correct_bias(quantized(network), network, pictures()).rows
    assert (row.corrected, row.size) == ("1", 0)


def test_layers_and_norms_that_are_called_twice() -> None:
    class Twice(nn.Module):
        def __init__(self, share: str) -> None:
            super().__init__()
            self.share = share
            self.conv1, self.conv2 = (nn.Conv2d(2, 2, 3, bias=False) for _ in range(2))
            self.bn = nn.BatchNorm2d(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn((self.conv1 if self.share == "conv" else self.conv2)(self.bn(self.conv1(x))))

    for share, words in (("conv", "conv1"), ("bn", "bn .BatchNorm2d")):
        network = Twice(share).double().eval()
        if share == "conv":
            network.conv2 = nn.Identity()  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(TypeError, match=words + r".* is called twice"):
            qconv.correct_bias(quantized(network), network, pictures())
    with pytest.raises(ValueError, match=r"max_samples \(=0\) must be at least 1"):
        qconv.correct_bias(quantized(trained()), trained(), pictures(), max_samples=0)
