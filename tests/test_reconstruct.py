"""Learned rounding, against the formula written out, and on a network that was trained."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import same
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torchvision.models.convnext import CNBlock
from torchvision.models.swin_transformer import SwinTransformerBlock

import qconv
from qconv import schemes
from qconv.after_training.adaptive_rounding import Rounding
from qconv.after_training.blocks import feature_dim_of
from qconv.after_training.reconstruct import Reconstruction, reconstruct
from qconv.ground.table import read_csv
from qconv.layers.adopt import release

QUICK: dict[str, Any] = {"iterations": 150, "learning_rate": 0.05, "batch_size": 16}
FEW = {**QUICK, "iterations": 20}
LSQ, MINMAX = schemes.lsq(3, 8), schemes.minmax(3, 8)
STAGED = schemes.staged([(0, schemes.lsq(4, 8)), (0.5, schemes.lsq(2, 8))])
SLOW = pytest.mark.nightly


class Residual(nn.Module):
    """A block with a shortcut, and a transposed convolution with groups."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2 = nn.ConvTranspose2d(channels, channels, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.conv2(torch.relu(self.bn1(self.conv1(x)))))


def network(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    stages = nn.Sequential(Residual(4), nn.Sequential(nn.Conv2d(4, 6, 3, stride=2), nn.ReLU()))
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), stages, nn.Flatten(), nn.Linear(54, 3)).eval()


def pictures(count: int = 40) -> Tensor:
    return torch.rand(count, 2, 9, 9, generator=torch.Generator().manual_seed(1))


def quantized(scheme: qconv.Scheme) -> nn.Module:
    model = qconv.convert(network(), scheme, skip=())
    qconv.calibrate(model, [pictures()])
    return model.eval()


def several_sawb() -> nn.Module:
    """Layers whose ranges follow the weight little enough for some of them to stay on their levels to 1 %."""
    torch.manual_seed(0)
    convolutions = (nn.Conv2d(2, 2, 1) for _ in range(8))
    return qconv.convert(nn.Sequential(*convolutions), schemes.sawb(4, None, zero=True), skip=()).eval()


def error(model: nn.Module, images: Tensor) -> float:
    with torch.no_grad():
        return float((model(images) - network()(images)).square().mean())


@pytest.mark.parametrize(
    "scheme",
    [LSQ, *(pytest.param(scheme, marks=SLOW) for scheme in (MINMAX, schemes.minmax(2, None), schemes.lsq(2, None)))],
    ids=str,
)
def test_outputs_come_nearer_on_other_pictures_too(scheme: qconv.Scheme, tmp_path: Path) -> None:
    model = quantized(scheme)
    other = torch.rand(64, 2, 9, 9, generator=torch.Generator().manual_seed(2))
    before = error(model, other)
    found = reconstruct(model, pictures(), **QUICK)
    assert error(model, other) < 0.8 * before
    assert [row.name for row in found.rows] == ["0", "2.0", "2.1.0", "4"]
    assert [row.layers for row in found.rows] == [1, 2, 1, 1]
    assert found.rows[-1].after < found.rows[-1].before
    found.to_csv(tmp_path / "a.csv")
    assert [row["name"] for row in read_csv(tmp_path / "a.csv")] == ["0", "2.0", "2.1.0", "4"]
    assert "not to nearest" in str(found)
    assert repr(found) == "Reconstruction(4 blocks, 40 samples)"
    assert all(0 < row.moved < 0.6 for row in found.rows)


@pytest.mark.parametrize("scheme", [LSQ, MINMAX], ids=str)
def test_weights_lie_on_a_level_beside_them(scheme: qconv.Scheme, tmp_path: Path) -> None:
    model = quantized(scheme)
    before = dict(copy.deepcopy(model).named_modules())
    reconstruct(model, pictures(), **FEW)
    for name, layer in model.named_modules():
        if not isinstance(layer, qconv.QuantizedLayer):
            continue
        was: Any = before[name]
        assert torch.equal(layer.quantized_weight(), layer.weight)
        scale = was.weight_codes().scale.detach()
        torch.testing.assert_close(layer.weight_codes().scale.detach(), scale)
        low, high = layer.weight_quantizer.whole_ends or (0, 0)
        place = (was.filters() / scale).detach().clamp(low, high)
        step = layer.weight_codes().values - place
        assert step.abs().max() < 1 + 1e-3  # the level above or below, never a farther one
        assert type(layer.weight_quantizer) is type(was.weight_quantizer)
        assert all(parameter.requires_grad and parameter.grad is None for parameter in layer.parameters())
    qconv.save_packed(model, tmp_path / "a.qconv", example=pictures(2))
    again = qconv.load_packed(tmp_path / "a.qconv", network())
    with torch.no_grad():
        torch.testing.assert_close(again(pictures()), model(pictures()))


def test_what_stays() -> None:
    """Batch norms, biases, the mode, random numbers, and the gradients of the user."""
    model: Any = quantized(LSQ).train()
    model[2].eval()
    model(pictures()).sum().backward()
    grads = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    assert grads
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    random = torch.random.get_rng_state()
    reconstruct(model, pictures(), **FEW)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.random.get_rng_state(), random)
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert {name.rpartition(".")[2] for name in changed} == {"weight", "step"}
    assert not any(name.startswith("2.0.bn1") or "weight_quantizer" in name for name in changed)
    assert all(torch.equal(model.get_parameter(name).grad, grad) for name, grad in grads.items())


@SLOW
def test_compiled_models_are_reconstructed_as_others() -> None:
    models = [quantized(MINMAX) for _ in range(2)]
    models[1].compile(backend="eager")
    with torch.no_grad():
        for count in (1, QUICK["batch_size"], 8):  # every size that it runs: code without hooks is there
            models[1](pictures(count))
    rows = [reconstruct(model, pictures(), **QUICK).rows for model in models]
    assert len(rows[0]) == 4
    assert rows[0] == rows[1]


def test_the_outputs_of_a_given_float_model_are_kept() -> None:
    """Also where the biases of the quantized one are others."""
    alone, given, shifted = (quantized(MINMAX) for _ in range(3))
    expected = reconstruct(alone, pictures(), **FEW)
    rows = reconstruct(given, [pictures()], float_model=network(), **FEW).rows
    numbers = [[(row.before, row.after) for row in each] for each in (rows, expected.rows)]
    torch.testing.assert_close(*numbers)  # processors may add up a float layer's products in another order
    with torch.no_grad():
        shifted[2][0].conv2.bias.add_(0.5)  # pyright: ignore[reportIndexIssue]
    wrong = copy.deepcopy(shifted)
    reconstruct(shifted, pictures(), float_model=network(), **QUICK)
    reconstruct(wrong, pictures(), **FEW)
    assert error(shifted, pictures()) < 0.1 * error(wrong, pictures())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: quantized(MINMAX), r"float_model has a quantized layer, layer '0' \(QConv2d"),
        (lambda: network()[0], r"'0.weight' is absent in it, \(4, 2, 3, 3\) in model"),
        (lambda: Uncalled(network()), r"float_model \(Uncalled\) must call 2\.0, as model does"),
    ],
)
def test_another_float_model_is_refused(other: Any, message: str) -> None:
    model = quantized(MINMAX)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        reconstruct(model, pictures(), float_model=other(), iterations=2)
    assert same(model.state_dict(), before)


class Uncalled(nn.Sequential):
    """Calls the first layers alone."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__(*layers)

    def forward(self, input: Tensor) -> Tensor:
        return self[1](self[0](input))


def test_it_repeats_itself() -> None:
    models = [quantized(LSQ) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        reconstruct(model, pictures(), seed=seed, **FEW)
    outputs = [model(pictures()).detach() for model in models]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


@SLOW
def test_a_second_call_says_that_it_learns_nothing() -> None:
    model = quantized(LSQ)
    reconstruct(model, pictures(), **QUICK)
    weights = [parameter.clone() for parameter in model.parameters() if parameter.ndim > 1]
    message = r"all weights of layer '0' \(QConv2d.*\) and 4 more are already on levels"
    with pytest.warns(UserWarning, match=message):
        found = reconstruct(model, pictures(), **QUICK)
    assert {row.moved for row in found.rows} == {0.0}
    after = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    for mine, before in zip(after, weights, strict=True):
        torch.testing.assert_close(mine.detach(), before.detach(), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("make", "shape", "dim"),
    [
        (lambda: CNBlock(8, 1.0, 0.0), (2, 8, 6, 6), 1),
        (lambda: SwinTransformerBlock(8, 2, [3, 3], [0, 0]), (2, 6, 6, 8), -1),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16), (2, 5, 8), -1),
        (lambda: Residual(4), (2, 4, 6, 6), 1),
    ],
)
def test_the_dimension_of_the_channels(make: Any, shape: tuple[int, ...], dim: int) -> None:
    block = qconv.convert(make(), schemes.lsq(4, None), skip=())
    assert feature_dim_of(block.eval(), torch.randn(shape)) == dim


def test_the_start_is_the_latent_weight() -> None:
    layer: Any = quantized(LSQ)[0]  # pyright: ignore[reportIndexIssue]
    rounding = Rounding(layer)
    scale = float(layer.weight_codes().scale.detach())
    torch.testing.assert_close(rounding.weight(), layer.weight.detach().clamp(-4 * scale, 3 * scale), rtol=0, atol=1e-3)
    with torch.no_grad():
        rounding.logits.copy_(torch.linspace(-3, 3, rounding.logits.numel()).view_as(rounding.logits))
    logits = rounding.logits.detach()
    h = (1.2 / (1 + (-logits).exp()) - 0.1).clamp(0, 1)
    torch.testing.assert_close(rounding.up(), h.masked_fill(rounding.on_level, 0))
    expected = scale * ((layer.weight / scale).clamp(-4, 3).floor() + h).clamp(-4, 3)
    torch.testing.assert_close(rounding.weight(), expected)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.conv(x) + y


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.two = Two()

    def forward(self, x: Tensor) -> Tensor:
        return self.two(x, x)


class Holds(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.conv = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class Twice(Holds):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.conv(x))


def small() -> qconv.QConv2d:
    return qconv.QConv2d(2, 2, 1, scheme=schemes.minmax(4, 8))


def tied() -> nn.Module:
    model = nn.Sequential(small(), small())
    model[1].weight = model[0].weight
    return model


def pruned() -> nn.Module:
    model = quantized(LSQ)
    prune.l1_unstructured(model[0], "weight", 0.5)  # pyright: ignore
    return model


def shared() -> nn.Module:
    layer = small()
    return nn.Sequential(Holds(layer), Holds(layer))


def test_a_block_of_two_names_is_one() -> None:
    model = Holds(nn.Conv2d(2, 2, 1))
    model.features = nn.Sequential(model.conv)
    qconv.convert(model, LSQ, skip=())
    assert [row.name for row in reconstruct(model, pictures(), iterations=2).rows] == ["conv"]


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (pruned, {}, TypeError, r"layer '0' \(QConv2d, lsq.* its weight is computed \(pruning\): call"),
        (lambda: quantized(LSQ).half(), {}, TypeError, r"0.weight is torch.float16.*model.float\(\)"),
        (lambda: nn.DataParallel(quantized(LSQ)), {}, TypeError, r"\(DataParallel\).* it, .module"),
        (lambda: torch.compile(quantized(LSQ)), {}, TypeError, r"is a wrapper: .* it, ._orig_mod"),
        (shared, {}, TypeError, r"0 and 1 share .*QConv2d"),
        (network, {}, ValueError, r"model \(Sequential\) is float: convert it first"),
        (lambda: quantized(LSQ), {"iterations": 0}, ValueError, r"iterations \(=0\) must be at least 1"),
        (lambda: quantized(LSQ), {"learning_rate": -1.0}, ValueError, r"learning_rate \(=-1.0\) must be"),
        (lambda: quantized(schemes.apot(4, 4)), {}, TypeError, r"0\.weight with apot.* can't be learned"),
        (lambda: quantized(schemes.ttq()), {}, TypeError, r"0\.weight with ttq.* can't be learned: its levels are not"),
        (lambda: quantized(schemes.bnn()), {}, TypeError, r"0\.weight with bnn.* can't be learned: its levels are not"),
        (lambda: quantized(schemes.lsq(1, 8)), {}, TypeError, r"lsq\(weight_bits=1.* can't be learned: its levels"),
        (lambda: quantized(schemes.sawb()), {}, TypeError, r"0\.weight with sawb.* can't be learned"),
        (several_sawb, {}, TypeError, "its levels follow the weight"),
        (lambda: quantized(schemes.identity()), {}, TypeError, r"0\.weight with identity.* can't be learned"),
        (lambda: quantized(STAGED), {}, TypeError, r"can't be learned: its quantizer changes"),
        (lambda: Twice(small()), {}, TypeError, r"conv \(QConv2d\) is called twice"),
        (lambda: tied(), {}, TypeError, r"0 and 1 share a weight"),
        (lambda: tied(), {"float": True}, TypeError, r"0 and 1 share a weight"),
    ],
)
def test_what_cannot_work_is_said(make: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    model = make()
    if options.pop("float", False):  # the other holder of the weight is no quantized layer
        release(model[1])
    with pytest.raises(error, match=message):
        reconstruct(model, pictures(), **{"iterations": 2, **options})


class Stage(nn.Module):
    """Two residual blocks behind a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.blocks = nn.Conv2d(2, 2, 1), nn.Sequential(Residual(2), Residual(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.down(x))


class Unit(nn.Module):
    """A layer, its norm and its activation, as timm and torchvision put them together."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.conv(x)))


class Around(Holds):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def twice(block: nn.Module) -> nn.Sequential:
    return nn.Sequential(block, copy.deepcopy(block))


class OfLists(nn.ModuleDict):
    """A dense block, whose layers take lists of tensors."""

    def __init__(self) -> None:
        super().__init__({"one": Two(), "two": Two()})

    def forward(self, x: Tensor) -> Tensor:
        return self["two"](self["one"](x, x), x)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda: Holds(twice(Residual(2))), ["conv.0", "conv.1"]),  # a wrapper
        (lambda: nn.Sequential(nn.Identity(), Holds(twice(Residual(2)))), ["1.conv.0", "1.conv.1"]),
        (lambda: nn.Sequential(Stage(), Residual(2)), ["0.down", "0.blocks.0", "0.blocks.1", "1"]),
        (lambda: nn.Sequential(OfLists(), Residual(2)), ["0", "1"]),
        (lambda: twice(Around(nn.Sequential(Unit(), Unit()))), ["0", "1"]),  # residual, of layers with norms
        (Outer, ["two.conv"]),  # it takes two tensors
        (lambda: nn.Sequential(Holds(Residual(2)), Residual(2)), ["0", "1"]),
    ],
)
def test_blocks_of_networks_in_wrappers_and_stages(make: Any, names: list[str]) -> None:
    model = qconv.convert(make(), MINMAX, skip=())
    assert [row.name for row in reconstruct(model, pictures(), iterations=2).rows] == names


def test_a_hook_before_a_block_is_applied_once() -> None:
    blocks = nn.Sequential(nn.Conv2d(2, 2, 1), Residual(2))
    twice = copy.deepcopy(blocks)
    blocks[1].register_forward_pre_hook(lambda module, args: (2 - args[0],))
    twice.insert(1, Mirrored())
    models = [qconv.convert(each, MINMAX, skip=()) for each in (blocks, twice)]
    hooked, inside = (reconstruct(model, pictures(), iterations=60, batch_size=4).rows[-1] for model in models)
    assert (hooked.before, hooked.after) == pytest.approx((inside.before, inside.after))


class Mirrored(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 - x


class Attention(nn.Module):
    """The tokens of one sample look at one another."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.qkv, self.out, self.batch_first = nn.Linear(4, 12), nn.Linear(4, 4), batch_first

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        y = self.out(F.scaled_dot_product_attention(*self.qkv(x).chunk(3, -1)))
        return y if self.batch_first else y.transpose(0, 1)


class Tokens(nn.Module):
    """A layer takes any rows; what is called between is called ``block``."""

    def __init__(self, block: nn.Module, rows: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.block, self.rows = nn.Linear(4, 4), block, rows

    def forward(self, x: Tensor) -> Tensor:
        return self.block(self.rows(self.first(x.flatten(0, 1)).view(x.shape)))


class Swapped(Holds):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super().forward(x.transpose(0, 1))] * 2, 2).transpose(0, 1)[None]


class Flat(Holds):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).flatten(0, 1)


@SLOW
@pytest.mark.parametrize("tokens", [1, 5])
def test_blocks_take_the_samples_first(tokens: int) -> None:
    """Tokens that were taken for samples came from several of them."""
    images = torch.rand(6, tokens, 4)

    def learned(block: nn.Module, rows: Callable[[Tensor], Tensor] = lambda x: x) -> Reconstruction:
        model = qconv.convert(Tokens(block, rows), MINMAX, skip=())
        return reconstruct(model, images, iterations=500, batch_size=4)  # a batch of 4 images, and one of 2

    assert [row.name for row in learned(Attention(batch_first=True)).rows] == ["first", "block"]
    swapped = Swapped(nn.Linear(4, 4))  # its layer gets tokens first, of batches of 4 and 2
    assert [row.name for row in learned(swapped).rows] == ["first", "block.conv"]
    for block, rows, layers in (
        (Attention(batch_first=False), lambda x: x.transpose(0, 1), ["block.qkv", "block.out"]),
        (Flat(nn.Linear(4, 4)), lambda x: x, ["block.conv"]),
        (Holds(nn.Linear(4, 4)), lambda x: x.flatten(0, 1), ["block.conv"]),
    ):
        if tokens == 1 and not isinstance(block, Attention):  # there is one row for each sample
            continue
        found = learned(block, rows)
        assert [row.name for row in found.rows] == ["first", *layers]
        assert all(row.after <= 1.02 * row.before for row in found.rows)


class Part(nn.Module):
    """Only holds layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.inner, self.unused = nn.Conv2d(2, 2, 1), Residual(2), nn.Conv2d(2, 2, 1)


class InParts(nn.Module):
    """Calls what its part holds, but not the part."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.last = Part(), nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part.inner(self.part.conv(x)))


def test_layers_in_a_module_that_is_not_called_are_reconstructed() -> None:
    model = qconv.convert(InParts(), schemes.minmax(3, None), skip=())  # inputs would wait for data, too
    with pytest.warns(UserWarning, match=r"reconstruct: the model did not call layer 'part.unused'"):
        found = reconstruct(model, pictures(), float_model=qconv.to_float(copy.deepcopy(model)), iterations=2)
    assert [row.name for row in found.rows] == ["part.conv", "part.inner", "last"]
    assert [row.layers for row in found.rows] == [1, 2, 1]


@pytest.mark.parametrize("make", [nn.SiLU, nn.ReLU])
def test_a_block_that_writes_to_its_input_is_reconstructed_as_another(make: Any) -> None:
    """The block got what it had made of its input, so that it applied the activation twice."""

    def found(inplace: bool) -> list[Any]:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1)) for _ in range(2)]
        model = nn.Sequential(nn.Conv2d(2, 4, 3), *(WithActivation(make(inplace=inplace), block) for block in blocks))
        qconv.convert(model, schemes.lsq(3, 8, signed_input=True), skip=())
        return list(reconstruct(model, pictures(), **FEW).rows)

    assert found(True) == found(False)


class WithActivation(nn.Module):
    def __init__(self, activation: nn.Module, layers: nn.Module) -> None:
        super().__init__()
        self.activation, self.layers = activation, layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(self.activation(x))
