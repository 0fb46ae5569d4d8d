"""The float networks: their published sizes, shapes, gradients, conversion, and the activations of binary networks."""

import copy
from collections.abc import Callable
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from runs import CONFIGS, config
from settings import mostly_nightly
from torch import Tensor, nn

import qconv
from qconv import models
from qconv.models.activations import build_activation
from qconv.models.birealnet import BiRealBlock
from qconv.models.quicknet import Blur, ResidualBlock, Transition
from qconv.models.reactnet import MobileBlock
from qconv.models.resnet import BasicBlock, make_downsample
from qconv.models.vgg import ConvBlock
from qconv.summary import summarize
from qconv.summary.costs_table import Summary
from qconv.training.assemble import quantized_model

CIFAR = ("resnet20", "resnet32", "resnet44", "resnet56", "resnet18", "vgg_small", "vgg7")
IMAGENET = (
    *("birealnet18", "birealnet34", "reactnet18", "reactnet_a"),
    *("quicknet_small", "quicknet", "quicknet_large", "torchvision_resnet", "torchvision_mobilenet_v2"),
    *("torchvision_model", "timm_model"),
)
NAMES = (*CIFAR, *IMAGENET, "small_cnn")


def make(name: str, **arguments: Any) -> nn.Module:
    return getattr(models, name)(**arguments)


def images(name: str, batch: int = 2) -> Tensor:
    size = 64 if name in IMAGENET else 32
    return torch.randn(batch, 3, size, size)


# Published numbers. Convolutions count their products at every output pixel, as the papers do.


def table(name: str, size: int, **arguments: Any) -> Summary:
    return summarize(make(name, **arguments), (3, size, size))


STEM = 32**2 * 3 * 9 * 16
SIZES: list[tuple[str, int, dict[str, Any], int, float]] = [
    # name, side of an image, options, parameters, multiply-accumulates; where a table rounds them: in billions
    *(
        # Every 3×3 convolution of a stage costs the same but the first of stages 2 and 3, which have half the inputs.
        (name, 32, {"shortcut": shortcut}, size, STEM + (6 * n - 1) * 16**2 * 9 * 32**2 + 64 * 10)
        for name, n, size in (("resnet20", 3, 269_722), ("resnet32", 5, 464_154), ("resnet44", 7, 658_586))
        for shortcut in ("normal", "per_conv")
    ),
    ("resnet56", 32, {}, 853_018, STEM + 53 * 16**2 * 9 * 32**2 + 64 * 10),
    ("resnet20", 32, {"downsample": "A"}, 269_722, 40_551_040),
    ("resnet20", 32, {"downsample": "avgpool"}, 269_722, 40_551_040),
    ("resnet20", 32, {"downsample": "B"}, 269_722 + 512 + 2048 + 64 + 128, 40_551_040 + 2 * 512 * 16**2),
    ("resnet18", 32, {"shortcut": "normal"}, 11_173_962, 555_422_720),
    ("resnet18", 32, {"shortcut": "per_conv"}, 11_173_962, 555_422_720),
    ("small_cnn", 8, {"in_channels": 3, "num_classes": 10, "width": 32}, 65_834 + 2 * 9 * 32, 2_415_232),
    ("torchvision_resnet", 224, {"depth": 18}, 11_689_512, 1.814),  # torchvision's table of weights
    ("torchvision_resnet", 224, {"depth": 34}, 21_797_672, 3.664),
    ("torchvision_resnet", 224, {"depth": 50}, 25_557_032, 4.089),
    ("torchvision_mobilenet_v2", 224, {}, 3_504_872, 0.301),
    ("birealnet34", 224, {}, 21_797_672, 3.664),  # of ResNet-34
    ("vgg_small", 32, {}, 4_660_106, 607_600_640),
    ("vgg7", 32, {}, 12_979_082, 615_917_568),
    # Bi-Real Net's shape differs from ResNet's in its shortcuts alone; the sum of what Larq Zoo prints of its own.
    ("birealnet18", 224, {}, 11_689_512, 1_676_279_808 + 137_793_536),
    # RPReLU has three parameters a channel.
    ("reactnet18", 224, {}, 11_689_512 + 3 * 4 * (64 + 128 + 256 + 512), 1_676_279_808 + 137_793_536),
    ("reactnet_a", 224, {}, 29_333_672, 4_816_896_000 + 11_862_016),  # the paper: 4.82 · 10⁹ and 0.12 · 10⁸
    # Larq Zoo's number of parameters also has the fixed filters of the blur, and mean and variance of the batch norm
    # that has no scale and shift.
    ("quicknet_small", 224, {}, 12_655_688 - 9 * (32 + 64 + 256) - 2 * 8, 1_171_544_576),
    ("quicknet", 224, {}, 13_234_088 - 9 * (64 + 128 + 256) - 2 * 16, 1_878_549_504),
    ("quicknet_large", 224, {}, 23_342_248 - 9 * (64 + 128 + 256) - 2 * 16, 3_728_237_568),
]


BY_DEFAULT = [row for row in SIZES if row[0] in ("resnet20", "small_cnn", "birealnet18", "quicknet", "vgg_small")]


@pytest.mark.parametrize(("name", "size", "options", "parameters", "macs"), mostly_nightly(SIZES, BY_DEFAULT), ids=str)
def test_networks_have_the_published_size(
    name: str, size: int, options: dict[str, Any], parameters: int, macs: float
) -> None:
    found = table(name, size, **options)
    counted = found.macs if isinstance(macs, int) else round(found.macs / 1e9, 3)
    assert (found.parameters, counted) == (parameters, macs)


def test_a_mobilenet_for_small_pictures() -> None:
    small = make("torchvision_mobilenet_v2", num_classes=10, small_pictures=True)
    assert sum(p.numel() for p in small.parameters()) == 3_504_872 - 990 * 1281
    features: Any = small.features
    assert features(images("vgg7", 1)).shape == (1, 1280, 4, 4)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "floats", "binary"),
    [
        ("birealnet18", ("conv1", "downsample"), 1_676_279_808),
        ("reactnet18", ("conv1", "downsample"), 1_676_279_808),
        ("reactnet_a", ("conv1",), 4_816_896_000),
    ],
)
def test_networks_have_the_published_binary_products(name: str, floats: tuple[str, ...], binary: int) -> None:
    rows = [row for row in table(name, 224).rows if row.type == "Conv2d"]
    assert sum(row.macs for row in rows if not any(word in row.name for word in floats)) == binary


# Every network, one step.


FAST = "resnet20", "reactnet18", "quicknet_small", "small_cnn"
"""Networks of each kind; the others are for the night."""


@pytest.mark.parametrize("name", mostly_nightly([name for name in NAMES if name != "timm_model"], FAST))  # of zeros
def test_gradients_reach_every_parameter(name: str) -> None:
    model = make(name, in_channels=3, num_classes=7)
    logits = model(images(name))
    assert logits.shape == (2, 7)
    F.cross_entropy(logits, torch.tensor([0, 5])).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
        assert parameter.grad.abs().sum() > 0, key


@pytest.mark.parametrize("name", mostly_nightly([path.stem for path in sorted((CONFIGS / "model").iterdir())], FAST))
def test_every_config_makes_a_network_that_converts_and_learns(name: str) -> None:
    cfg = config(f"model={name}", "run_dir=x")
    assert cfg.model._target_ == f"qconv.models.{name}"
    model: nn.Module = instantiate(cfg.model, in_channels=3, num_classes=5)
    qconv.convert(model, qconv.schemes.bnn(), skip=tuple(cfg.skip))
    quantized = {key for key, module in model.named_modules() if isinstance(module, qconv.QuantizedLayer)}
    assert quantized
    assert not any(word in key for key in quantized for word in ("pointwise",) if name.startswith("quicknet"))
    assert not any("stem" in key or key in ("conv1", "fc") for key in quantized)
    if name.startswith(("bireal", "react")):
        assert not any("downsample" in key for key in quantized)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    before = copy.deepcopy(model.state_dict())
    loss = F.cross_entropy(model(images(name)), torch.tensor([0, 3]))
    loss.backward()
    optimizer.step()
    assert loss.isfinite()
    moved = {key for key, parameter in model.named_parameters() if not torch.equal(parameter, before[key])}
    assert name == "timm_model" or {f"{key}.weight" for key in quantized} <= moved  # timm's blocks start as 0


def test_every_config_names_every_argument() -> None:
    """So that the command line can set each without a plus sign."""
    for name in NAMES:
        arguments = signature(getattr(models, name)).parameters
        assert set(config(f"model={name}", "run_dir=x").model) >= {*arguments} - {"in_channels", "num_classes"}, name


def test_there_is_a_config_for_every_network() -> None:
    assert {path.stem for path in (CONFIGS / "model").iterdir()} == set(NAMES)


@pytest.mark.nightly
def test_what_stays_float_in_the_published_networks() -> None:
    first_of_stages = {f"stages.{stage}.0.downsample.1" for stage in (1, 2, 3)}
    stem = {"stem.0", "stem.3", "stem.5"}
    pointwise = {f"sections.{section}.0.pointwise" for section in (1, 2, 3)}
    for name, expected in {
        "birealnet18": {"conv1", "fc"} | first_of_stages,
        "reactnet18": {"conv1", "fc"} | first_of_stages,
        "reactnet_a": {"conv1", "fc"},
        "quicknet": stem | pointwise | {"fc"},
        "vgg_small": {"blocks.0.conv", "fc"},
        "vgg7": {"fc"},
    }.items():
        model = make(name, num_classes=5)
        qconv.convert(model, qconv.schemes.bnn(), skip=tuple(config(f"model={name}", "run_dir=x").skip))
        layers = {key: module for key, module in model.named_modules() if isinstance(module, (nn.Conv2d, nn.Linear))}
        assert {key for key, layer in layers.items() if not isinstance(layer, qconv.QuantizedLayer)} == expected


@pytest.mark.parametrize(
    "name",
    mostly_nightly(
        [*CIFAR, "birealnet18", "reactnet_a", "quicknet_small", "torchvision_resnet", "torchvision_mobilenet_v2"],
        ["resnet20", "quicknet_small"],
    ),
)
def test_other_numbers_of_channels_and_classes(name: str) -> None:
    model = make(name, in_channels=1, num_classes=2).eval()
    assert model(images(name)[:, :1]).shape == (2, 2)
    assert model(images(name)[:0, :1]).shape == (0, 2)


@pytest.mark.parametrize("shortcut", ["normal", "per_conv"])
@pytest.mark.parametrize("downsample", ["A", "avgpool", "B"])
@pytest.mark.parametrize("size", [8, 9, 32])
def test_resnets_take_any_size(shortcut: str, downsample: str, size: int) -> None:
    arguments: Any = dict(shortcut=shortcut, downsample=downsample, activation=nn.Hardtanh)
    model = models.resnet20(1, 7, **arguments).eval()
    assert model(torch.randn(2, 1, size, size)).shape == (2, 7)
    assert not any(isinstance(module, nn.ReLU) for module in model.modules())


@pytest.mark.parametrize("name", ["birealnet18", "reactnet_a", "quicknet_small"])
@pytest.mark.parametrize("size", [(33, 64), (70, 47)])
def test_imagenet_networks_take_odd_sizes(name: str, size: tuple[int, int]) -> None:
    model = make(name, num_classes=3).eval()
    assert model(torch.randn(1, 3, *size)).shape == (1, 3)


def test_networks_run_in_bfloat16_and_float64() -> None:
    for dtype in (torch.bfloat16, torch.float64):
        for name in ("reactnet_a", "quicknet_small"):
            model = make(name, num_classes=3).eval().to(dtype)
            assert model(images(name, 1).to(dtype)).dtype == dtype


# What the blocks compute, and in which order.


def in_float64(module: nn.Module) -> Any:
    """The module with random running statistics and scales, in float64."""
    for child in module.modules():
        if isinstance(child, nn.BatchNorm2d):
            assert child.running_mean is not None
            assert child.running_var is not None
            nn.init.normal_(child.running_mean)
            nn.init.uniform_(child.running_var, 0.5, 2.0)
            if child.affine:
                nn.init.normal_(child.weight)
                nn.init.normal_(child.bias)
    return module.double().eval()


def batch_norm(module: nn.BatchNorm2d, input: Tensor) -> Tensor:
    assert module.running_mean is not None
    assert module.running_var is not None
    mean, var, weight, bias = (
        tensor[:, None, None] for tensor in (module.running_mean, module.running_var, module.weight, module.bias)
    )
    return (input - mean) / torch.sqrt(var + module.eps) * weight + bias


def test_order_of_the_blocks() -> None:
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)

    block = in_float64(BasicBlock(4, 4, 1, nn.Identity(), True, nn.Tanh))
    hidden = torch.tanh(batch_norm(block.bn1, F.conv2d(x, block.conv1.weight, padding=1)) + x)
    expected = torch.tanh(batch_norm(block.bn2, F.conv2d(hidden, block.conv2.weight, padding=1)) + hidden)
    torch.testing.assert_close(block(x), expected)

    block.per_conv = False
    hidden = torch.tanh(batch_norm(block.bn1, F.conv2d(x, block.conv1.weight, padding=1)))
    expected = torch.tanh(batch_norm(block.bn2, F.conv2d(hidden, block.conv2.weight, padding=1)) + x)
    torch.testing.assert_close(block(x), expected)

    block = in_float64(BiRealBlock(4, 8, 2, nn.Tanh))
    mean = (x[:, :, ::2, ::2] + x[:, :, 1::2, ::2] + x[:, :, ::2, 1::2] + x[:, :, 1::2, 1::2]) / 4
    side = batch_norm(block.downsample[2], F.conv2d(mean, block.downsample[1].weight))
    expected = torch.tanh(batch_norm(block.bn, F.conv2d(x, block.conv.weight, stride=2, padding=1)) + side)
    torch.testing.assert_close(block(x), expected)

    block = in_float64(ConvBlock(4, 5, pool=True, pool_first=True, act=nn.Hardtanh))
    maximum = F.max_pool2d(F.conv2d(x, block.conv.weight, padding=1), 2)
    torch.testing.assert_close(block(x), batch_norm(block.bn, maximum).clamp(-1, 1))
    block.pool_first = False
    expected = F.max_pool2d(batch_norm(block.bn, F.conv2d(x, block.conv.weight, padding=1)).clamp(-1, 1), 2)
    torch.testing.assert_close(block(x), expected)

    block = in_float64(ResidualBlock(4, nn.ReLU))
    expected = batch_norm(block.bn, F.conv2d(x, block.conv.weight, padding=1).clamp(min=0)) + x
    torch.testing.assert_close(block(x), expected)

    block = in_float64(Transition(4, 6, nn.ReLU))
    maximum = F.max_pool2d(x.clamp(min=0), 2, stride=1)
    line = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64)
    blurred = F.conv2d(maximum.flatten(0, 1)[:, None], (line[:, None] * line / 16)[None, None], stride=2, padding=1)
    blurred = blurred.view(2, 4, 3, 3)
    torch.testing.assert_close(block(x), batch_norm(block.bn, F.conv2d(blurred, block.pointwise.weight)))


def test_reactnet_doubles_its_channels_as_two_convolutions_would() -> None:
    block = in_float64(MobileBlock(4, 8, 2, models.RPReLU))
    x = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    mean = F.avg_pool2d(x, 2)
    hidden = block.act1(batch_norm(block.bn1, F.conv2d(x, block.conv.weight, stride=2, padding=1)) + mean)
    halves = []
    for part in (slice(0, 4), slice(4, 8)):
        own = nn.BatchNorm2d(4).double().eval()
        own.load_state_dict(
            {key: value[part] if value.dim() else value for key, value in block.bn2.state_dict().items()}
        )
        halves.append(batch_norm(own, F.conv2d(hidden, block.pointwise.weight[part])) + hidden)
    torch.testing.assert_close(block(x), block.act2(torch.cat(halves, 1)))


def test_option_a_takes_every_second_pixel_and_adds_zero_channels() -> None:
    block = cast(BasicBlock, cast(nn.Sequential, models.resnet20().stages[1])[0])
    images = torch.randn(2, 16, 5, 5)
    shortcut = block.downsample(images)
    assert torch.equal(shortcut[:, 8:24], images[:, :, ::2, ::2])
    assert shortcut[:, :8].abs().sum() == 0
    assert shortcut[:, 24:].abs().sum() == 0


def test_avgpool_takes_the_mean_of_the_pixels_that_are_there() -> None:
    shortcut = make_downsample("avgpool", 2, 5, 2)
    output = shortcut(torch.arange(18.0).view(1, 2, 3, 3))
    assert output.shape == (1, 5, 2, 2)
    assert torch.equal(output[0, 1], torch.tensor([[2.0, 3.5], [6.5, 8.0]]))
    assert torch.equal(output[0, 2], torch.tensor([[2.0, 3.5], [6.5, 8.0]]) + 9)
    assert output[0, [0, 3, 4]].abs().sum() == 0
    assert isinstance(make_downsample("avgpool", 4, 4, 1), nn.Identity)


def test_blur_keeps_a_constant_inside_and_is_not_stored() -> None:
    blur = Blur(3)
    assert torch.equal(blur(torch.ones(1, 3, 7, 7))[:, :, 1:-1, 1:-1], torch.ones(1, 3, 2, 2))
    assert not blur.state_dict()
    assert not list(blur.parameters())


@pytest.mark.parametrize(("shortcut", "shortcuts"), [("normal", 1), ("per_conv", 2)])
def test_a_block_has_its_shortcuts(shortcut: Any, shortcuts: int) -> None:
    model = models.resnet20(shortcut=shortcut, activation=nn.Identity).eval()
    block = cast(BasicBlock, cast(nn.Sequential, model.stages[0])[0])
    nn.init.zeros_(block.conv1.weight)
    nn.init.zeros_(block.conv2.weight)
    images = torch.randn(1, 16, 4, 4)
    # The convolutions add nothing: the block hands on its input, around both at once, or around one after the other.
    assert torch.equal(block(images), images)
    nn.init.ones_(block.bn1.bias)
    assert torch.equal(block(images), images + (shortcuts - 1))


@pytest.mark.parametrize("size", [8, 28, 32])
def test_small_cnn_hands_on_negative_values(size: int) -> None:
    model = models.small_cnn(3, 4, width=8)
    images = torch.randn(4, 3, size, size)
    assert model(images).shape == (4, 4)
    hidden = model.blocks[:2](images)
    assert 0.2 < (hidden < 0).float().mean() < 0.8


# Activations.


def rprelu(x: Tensor, before: Tensor, slope: Tensor, after: Tensor) -> Tensor:
    moved = x + before
    return torch.where(moved > 0, moved, slope * moved) + after


def maxout(x: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    return torch.where(x > 0, positive * x, negative * x)


ACTIVATIONS: dict[str, tuple[Callable[[int], nn.Module], Callable[..., Tensor]]] = {
    "LearnedBias": (models.LearnedBias, torch.add),
    "RPReLU": (models.RPReLU, rprelu),
    "Maxout": (models.Maxout, maxout),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("spatial", [(), (7,), (3, 5), (2, 3, 2)])
def test_activations_equal_their_formula_in_value_and_gradient(name: str, spatial: tuple[int, ...]) -> None:
    kind, formula = ACTIVATIONS[name]
    module = kind(4).double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(3, 4, *spatial, dtype=torch.float64, requires_grad=True)
    weight = torch.randn_like(x)
    parameters = list(module.parameters())
    columns = [parameter.view(1, 4, *[1] * len(spatial)) for parameter in parameters]
    if name == "RPReLU":  # a module's own parameters come before those of its children
        parameters = [module.get_parameter(key) for key in ("before.bias", "slope", "after.bias")]
        columns = [parameter.view(1, 4, *[1] * len(spatial)) for parameter in parameters]
    output, expected = module(x), formula(x, *columns)
    torch.testing.assert_close(output, expected)
    found, wanted = (
        list(torch.autograd.grad((value * weight).sum(), [x, *parameters])) for value in (output, expected)
    )
    torch.testing.assert_close(found, wanted)
    # A planted error is seen: a gradient that leaves out a hundredth of one channel.
    for index, gradient in enumerate(found):
        planted = [each.clone() for each in found]
        planted[index] = gradient * torch.where(torch.arange(gradient.numel()).view_as(gradient) == 1, 0.99, 1.0)
        with pytest.raises(AssertionError):
            torch.testing.assert_close(planted, wanted)


def test_activations_start_as_published() -> None:
    x = torch.tensor([[-4.0, -4.0], [8.0, 8.0], [0.0, 0.0]])
    assert torch.equal(models.LearnedBias(2)(x), x)
    for module in (models.RPReLU(2), models.Maxout(2), models.RPReLU(2, slope=0.25), nn.PReLU(2)):
        assert torch.equal(module(x), torch.tensor([[-1.0, -1.0], [8.0, 8.0], [0.0, 0.0]]))
    assert torch.equal(models.Maxout(2, 2.0, 0.5)(x), torch.tensor([[-2.0, -2.0], [16.0, 16.0], [0.0, 0.0]]))


def test_gradients_at_the_tie() -> None:
    x = torch.zeros(1, 1, requires_grad=True)
    assert torch.autograd.grad(models.RPReLU(1)(x).sum(), x)[0].item() == 0.25
    assert torch.autograd.grad(models.Maxout(1)(x).sum(), x)[0].item() == 0.0


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_keep_dtype_nan_and_emptiness(name: str) -> None:
    module = ACTIVATIONS[name][0](2)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert module(torch.randn(3, 2, 4, dtype=dtype)).dtype == dtype
    assert module(torch.empty(0, 2, 4, 4)).shape == (0, 2, 4, 4)
    assert module(torch.full((1, 2), torch.nan)).isnan().all()
    channels_last = torch.randn(2, 2, 3, 3).contiguous(memory_format=torch.channels_last)
    assert module(channels_last).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(2, 1, 4), (2, 6), (3,), (2, 4, 3)])
def test_activations_name_a_wrong_input(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"input \(of shape \(.*\)\) must have channels \(=3\) in its dimension 1"):
        ACTIVATIONS[name][0](3)(torch.randn(shape))
    with pytest.raises(ValueError, match=r"channels \(=0\) must be at least 1"):
        ACTIVATIONS[name][0](0)


def test_activations_compile() -> None:
    for kind, _ in ACTIVATIONS.values():
        module = kind(2)
        x = torch.randn(2, 2, 3)
        assert torch.equal(torch.compile(module, fullgraph=True, backend="eager")(x), module(x))


def test_torchs_activations_are_built_as_they_want() -> None:
    assert build_activation(nn.ReLU, 16).inplace is False
    assert build_activation(partial(nn.Hardtanh, -2.0), 16).extra_repr() == "min_val=-2.0, max_val=1.0"
    assert build_activation(nn.LeakyReLU, 16).extra_repr() == "negative_slope=0.01"
    assert build_activation(nn.PReLU, 16).extra_repr() == "num_parameters=16"
    assert build_activation(partial(nn.PReLU, init=0.1), 16).extra_repr() == "num_parameters=16"
    assert build_activation(partial(nn.PReLU, num_parameters=1), 16).extra_repr() == "num_parameters=1"
    assert build_activation(partial(nn.PReLU, 1), 16).extra_repr() == "num_parameters=1"
    own = partial(lambda channels, num_parameters: nn.PReLU(channels + num_parameters), num_parameters=1)
    assert build_activation(own, 16).extra_repr() == "num_parameters=17"
    assert isinstance(build_activation(nn.Identity, 16), nn.Identity)
    assert isinstance(build_activation(lambda channels: nn.PReLU(channels), 16), nn.PReLU)
    negative = build_activation(partial(models.Maxout, negative=0.5), 3).get_parameter("negative")
    assert torch.equal(negative, torch.full((3,), 0.5))


@pytest.mark.parametrize("activation", ["nn.ReLU", "nn.Hardtanh", "nn.PReLU", "models.RPReLU", "models.Maxout"])
def test_activations_can_be_named_in_a_config(activation: str) -> None:
    target = activation.replace("nn.", "torch.nn.").replace("models.", "qconv.models.")
    cfg = config("model=resnet20", f"model.activation._target_={target}", "run_dir=x")
    model: models.ResNet = instantiate(cfg.model, in_channels=3, num_classes=10)
    found = [module for module in model.modules() if type(module).__name__ == activation.partition(".")[2]]
    assert len(found) == 19
    widths = [16] * 7 + [32] * 6 + [64] * 6
    per_channel = {"PReLU": 1, "RPReLU": 3, "Maxout": 2}.get(activation.partition(".")[2], 0)
    assert sum(p.numel() for module in found for p in module.parameters()) == per_channel * sum(widths)
    assert table("resnet20", 32).parameters + per_channel * sum(widths) == sum(p.numel() for p in model.parameters())


# Wrong arguments.


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (partial(make, "resnet20", shortcut="both"), r"shortcut \(='both'\) must be 'normal' or 'per_conv'"),
        (partial(make, "resnet56", downsample="C"), r"downsample \(='C'\) must be 'A' or 'avgpool' or 'B'"),
        (partial(make, "small_cnn", in_channels=1, num_classes=10, width=0), r"width \(=0\) must be at least 1"),
        (partial(make, "vgg_small", image_size=30), r"image_size \(=30\) must be a multiple of 8"),
        (partial(make, "vgg7", image_size=0), r"image_size \(=0\) must be at least 1"),
        (partial(models.VGG, 3, 10, hidden=0, pool_first=True), r"hidden \(=0\) must be at least 1"),
        (partial(make, "torchvision_resnet", depth=20), r"depth \(=20\) must be one of 18, 34, 50, 101, 152"),
        (
            partial(models.torchvision_model, name="resnet19"),
            r"name \(='resnet19'\) must be a network of torchvision",
        ),
        (
            partial(models.timm_model, name="hf-hub:a/resnet18"),
            r"name \(='hf-hub:a/resnet18'\) must be a network of",
        ),
        (partial(make, "torchvision_mobilenet_v2", width=0), r"width \(=0\) must be positive and finite"),
        (partial(models.BiRealNet, 3, 10, blocks=(4, 4)), r"blocks \(=\(4, 4\)\) must be as many positive numbers"),
        (partial(models.QuickNet, 3, 10, widths=(), blocks=()), r"widths \(=\(\)\) and blocks"),
        (partial(models.QuickNet, 3, 10, widths=(8, 8), blocks=(1, 0)), r"blocks \(=\(1, 0\)\)"),
        (partial(models.QuickNet, 3, 10, widths=(6,), blocks=(1,)), r"widths\[0\] \(=6\) must be a multiple of 4"),
        (partial(make_downsample, "A", 8, 4, 2), r"downsample \(='A'\) cannot take 8 channels to 4: use 'B'"),
        (partial(make, "resnet20", activation=nn.ReLU()), r"activation \(=ReLU\(\)\) must make a module, not be one"),
        (partial(make, "birealnet18", activation=lambda n: n), "must make a torch.nn.Module from a number of channel"),
        (lambda: models.vgg_small()(torch.randn(1, 3, 8, 8)), r"input \(of shape \(1, 3, 8, 8\)\) must have image_si"),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "small_cnn"])
def test_every_network_checks_its_channels_and_classes(name: str) -> None:
    with pytest.raises(ValueError, match=r"in_channels \(=0\) must be at least 1"):
        make(name, in_channels=0)
    with pytest.raises(ValueError, match=r"num_classes \(=-1\) must be at least 1"):
        make(name, num_classes=-1)


def test_a_vgg_of_another_size() -> None:
    assert models.vgg_small(1, image_size=8).eval()(torch.randn(2, 1, 8, 8)).shape == (2, 10)


def test_norms_around_the_last_layer() -> None:
    model: Any = models.resnet20(norm_before_fc=True)
    assert sum(each.numel() for each in model.parameters()) == 269_722 + 2 * 64
    seen: list[Tensor] = []
    model.fc.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(3 + torch.randn(64, 3, 32, 32))
    torch.testing.assert_close(seen[0].mean(0), torch.zeros(64), atol=1e-5, rtol=0)
    model = qconv.convert(models.vgg_small(norm_outputs=True), qconv.schemes.bnn(), skip=("first",))
    logits = model(torch.randn(32, 3, 32, 32))
    assert logits.std() < 2  # sums of 8192 signs have a deviation of 90
    assert nn.functional.cross_entropy(logits, torch.arange(32) % 10) < 5


def test_weights_from_hes_distribution() -> None:
    model = models.he_normal_(models.resnet18(downsample="B"))
    kept = models.resnet18(downsample="B")
    assert model.bn1.weight.equal(kept.bn1.weight)
    for layer in model.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            weight = layer.weight.detach().flatten(1)
            wanted = (2 / weight.shape[1]) ** 0.5
            assert weight.std().item() == pytest.approx(wanted, rel=4 / weight.numel() ** 0.5)
            assert weight.abs().max() > 2.2 * wanted  # torch's own are uniform, and end at 0.71
    assert 0 < model.fc.bias.abs().max() < 0.05
    # Each group of a convolution has the inputs of its own.
    grouped = models.he_normal_(nn.Conv1d(64, 640, 5, groups=8))
    assert grouped.weight.std().item() == pytest.approx((2 / 40) ** 0.5, rel=0.02)
    transposed = nn.ConvTranspose2d(3, 4, 3)
    before = transposed.weight.clone()
    assert models.he_normal_(transposed).weight.equal(before)
    quantized = qconv.QConv2d(64, 64, 3, scheme=qconv.schemes.bwn())
    assert models.he_normal_(quantized).weight.std().item() == pytest.approx((2 / 576) ** 0.5, rel=0.02)
    parametrized = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)))
    with pytest.raises(
        ValueError, match=r"layer '0' \(ParametrizedLinear\) computes its weight: call he_normal_ before"
    ):
        models.he_normal_(parametrized)


def test_the_start_of_a_run() -> None:
    data = SimpleNamespace(in_channels=1, num_classes=10)
    for choice, layer in (("default", 0.41), ("he_normal", 1.0)):
        model, _ = quantized_model(config("model.width=32", f"weight_init={choice}"), data)
        weight = model.get_parameter("blocks.1.conv.weight").detach().flatten(1)
        assert weight.std().item() / (2 / weight.shape[1]) ** 0.5 == pytest.approx(layer, abs=0.02)
    with pytest.raises(ValueError, match=r"weight_init \(='he'\) must be 'default' or 'he_normal'"):
        quantized_model(config("weight_init=he"), data)
