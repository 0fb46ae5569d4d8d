"""Whatever surrounds a model gives for a lean one what it gives for one that is not: files, graphs, plans."""

import copy
import pickle
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from settings import mostly_nightly
from test_lean import Block, are_equal, assert_same, gradients
from torch import Tensor, fx, nn
from torch.func import functional_call, grad
from torch.fx.proxy import TraceError
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel

import qconv
from qconv import schemes
from qconv.layers import QuantizedLayer
from qconv.lean import is_lean
from qconv.models import resnet20
from qconv.models.activations import RPReLU

IMAGES = (4, 3, 16, 16)


def network(scheme: qconv.Scheme | None = None, **options: Any) -> nn.Module:
    """A residual network that has seen a batch."""
    torch.manual_seed(0)
    options = {"activation": nn.Hardtanh, "shortcut": "per_conv", **options}
    model = qconv.convert(resnet20(3, 10, **options), schemes.bireal() if scheme is None else scheme)
    model(torch.randn(IMAGES))
    return model


def both(exact: bool = True, **options: Any) -> tuple[nn.Module, nn.Module, Tensor]:
    """A network, the same one made lean, and a batch."""
    model = network(**options)
    return model, qconv.lean(copy.deepcopy(model), exact=exact), torch.randn(IMAGES)


def kinds(model: nn.Module) -> list[type[nn.Module]]:
    return [type(module) for module in model.modules()]


def modes(model: nn.Module) -> dict[str, str]:
    return {name: module.__dict__["lean"] for name, module in model.named_modules() if is_lean(module)}


class Net(nn.Module):
    """With an activation before signs, and names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.act = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.conv, self.head = nn.Conv2d(8, 8, 3), nn.Linear(8, 2)
        self.lean = "the user's own"

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(self.act(self.norm(self.stem(x)))).mean((2, 3)))


def test_convert_makes_a_model_lean() -> None:
    model, other = network(), resnet20(3, 10, activation=nn.Hardtanh, shortcut="per_conv")
    assert qconv.convert(other, schemes.bireal(), lean=True) is other
    assert kinds(other) == kinds(qconv.lean(model))
    assert set(modes(other).values()) == {"fast"}
    assert not modes(qconv.convert(Net(), schemes.bnn(), lean=False))
    with pytest.raises(TypeError, match=r"lean \(='true'\) must be True or False"):
        qconv.convert(Net(), schemes.bnn(), lean="true")  # pyright: ignore


@pytest.mark.parametrize("exact", [False, True])
def test_layers_that_are_converted_later_become_lean(exact: bool, capsys: pytest.CaptureFixture[str]) -> None:
    plain, model = Net(), qconv.lean(Net(), exact=exact)
    before = modes(model)
    steps = [str(qconv.plan(net, schemes.bnn(), skip=())) for net in (plain, model)]
    assert steps[0] == steps[1]
    assert capsys.readouterr().out == f"{steps[0]}\n{steps[0]}\n"
    assert modes(model) == before
    qconv.convert(model, schemes.lsq(), skip=("conv", "head"))
    qconv.convert(model, schemes.bnn(), skip=())
    assert modes(model).keys() == {"stem", "norm", "conv", "head"}  # the ReLU before a sign has become the identity
    assert set(modes(model).values()) == {"exact" if exact else "fast"}
    assert type(model.act) is nn.Identity
    assert kinds(qconv.to_float(model)) == kinds(Net())
    assert model.lean == "the user's own"


def test_a_conversion_that_fails_leaves_a_model_lean() -> None:
    model = qconv.lean(Net())
    before = kinds(model), modes(model)
    with pytest.raises(ValueError, match="matches no layer"):
        qconv.convert(model, schemes.bnn(), skip=("nowhere",))
    assert (kinds(model), modes(model)) == before


def test_back_to_float() -> None:
    model, lean, _ = both(activation=RPReLU)
    for name, tensor in qconv.float_state_dict(model).items():
        assert torch.equal(tensor, qconv.float_state_dict(lean)[name])
    assert kinds(qconv.to_float(lean)) == kinds(qconv.to_float(model))
    assert not modes(lean)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("activation", [nn.Hardtanh, RPReLU, lambda channels: nn.PReLU(channels)])
def test_evaluation_is_the_same(activation: Any, exact: bool) -> None:
    model, lean, x = both(exact, activation=activation)
    with torch.no_grad():
        assert torch.equal(model(x), lean(x))
        assert torch.equal(model.eval()(x), lean.eval()(x))


@pytest.mark.nightly
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("activation", [nn.Hardtanh, lambda channels: nn.PReLU(channels)])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace:FutureWarning")
def test_graphs(activation: Any, exact: bool) -> None:
    """Of `torch.fx`, `torch.jit` and `torch.export`: equal, to their nodes."""
    model, lean, x = both(exact, activation=activation)
    traced: Any = fx.symbolic_trace(lean)
    assert str(traced.graph) == str(fx.symbolic_trace(model).graph)
    if exact:
        assert_same(gradients(copy.deepcopy(traced), x), gradients(copy.deepcopy(model), x))
    for net in (model, lean):
        net.eval()
    expected = model(x)
    jitted: Any = torch.jit.trace(lean, x)
    assert torch.equal(jitted(x), expected)
    exported = [torch.export.export(net, (x,)) for net in (model, lean)]
    assert torch.equal(exported[1].module()(x), expected)
    nodes = [[node.target for node in program.graph.nodes if node.op == "call_function"] for program in exported]
    assert [str(target) for target in nodes[0]] == [str(target) for target in nodes[1]]


@pytest.mark.parametrize("kind", [nn.ReLU, nn.PReLU, nn.BatchNorm2d, nn.Conv2d])
def test_a_lean_module_as_the_root_of_a_graph(kind: Any) -> None:
    arguments = {nn.BatchNorm2d: (3,), nn.Conv2d: (3, 4, 3)}.get(kind, ())
    module = kind(*arguments)
    graphs = []
    for net in (module, qconv.lean(copy.deepcopy(module))):
        try:
            graphs.append(str(fx.symbolic_trace(net.eval()).graph))
        except (TraceError, TypeError) as error:
            graphs.append(type(error).__name__)
    assert graphs[0] == graphs[1]


@pytest.mark.nightly
@pytest.mark.parametrize(("exact", "scheme"), [(False, schemes.bireal()), (True, schemes.lsq())], ids=str)
def test_files_and_frozen_models(scheme: qconv.Scheme, exact: bool, tmp_path: Path) -> None:
    model, lean, x = both(exact, scheme=scheme)
    for name, net in (("plain", model.eval()), ("lean", lean.eval())):
        qconv.save_packed(net, tmp_path / name)
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "lean").read_bytes()
    into = qconv.lean(resnet20(3, 10, activation=nn.Hardtanh, shortcut="per_conv"), exact=exact)
    loaded = qconv.load_packed(tmp_path / "lean", into)
    assert modes(loaded) == modes(lean)
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
    frozen, of_lean = qconv.freeze(model, example=x), qconv.freeze(lean, example=x)
    assert torch.equal(frozen(x), of_lean(x))
    assert frozen.layers == of_lean.layers
    assert not modes(of_lean)
    assert str(qconv.verify(lean, of_lean, x)) == str(qconv.verify(model, frozen, x))
    assert qconv.verify(lean, tmp_path / "plain", x).equal
    assert modes(lean), "it stays as it is"


@pytest.mark.parametrize("exact", mostly_nightly([False, True], (False,)))
def test_onnx(exact: bool, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    net = qconv.convert(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)),
        schemes.lsq(),
        skip=("first",),
    )
    net(x := torch.randn(2, 3, 8, 8).abs())
    qconv.export_onnx(net.eval(), tmp_path / "plain", x)
    qconv.export_onnx(qconv.lean(net, exact=exact), tmp_path / "lean", x)
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "lean").read_bytes()


def test_calibration() -> None:
    torch.manual_seed(0)
    model = qconv.convert(resnet20(3, 10), schemes.minmax())
    lean = qconv.lean(copy.deepcopy(model))
    for net in (model, lean):
        qconv.calibrate(net, [torch.randn(IMAGES, generator=torch.Generator().manual_seed(1))])
    torch.testing.assert_close(lean.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_parameter_groups() -> None:
    model, lean, _ = both(activation=lambda channels: nn.PReLU(channels), scheme=schemes.lsq())
    rules = {"norms": {"weight_decay": 0.0}, "quantizers": {"lr": 1e-3}, "quantized_weights": {"lr": 1e-2}}
    sizes = [
        [
            (len(group["params"]), group.get("lr"), group.get("weight_decay"))
            for group in qconv.parameter_groups(net, rules)
        ]
        for net in (model, lean)
    ]
    assert sizes[0] == sizes[1]


def test_wrappers_and_copies() -> None:
    model, lean, x = both()
    expected = gradients(model, x)
    average = AveragedModel(lean)
    average.update_parameters(lean)
    assert modes(average.module) == modes(lean)
    assert_same(gradients(average, x), expected)
    for name, module in lean.named_modules():
        replica = module._replicate_for_data_parallel()  # what DataParallel makes copies by
        assert (type(replica), replica.__dict__.get("lean")) == (type(module), module.__dict__.get("lean")), name
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(lean))
    assert not any(isinstance(module, nn.BatchNorm2d) for module in synchronized.modules())


class Own(nn.BatchNorm2d):
    """May compute anything."""


def test_subclasses_stay_as_they_are() -> None:
    model = qconv.lean(nn.Sequential(Own(3), nn.LazyBatchNorm2d(), nn.GELU()))
    assert kinds(model)[1:] == [Own, nn.LazyBatchNorm2d, nn.GELU]


@pytest.mark.parametrize("name", ["stages.0.0.conv1", "bn1", "conv1"])
def test_pruned_layers(name: str) -> None:
    model, lean, x = both()
    for net in (model, lean):
        prune.random_unstructured(net.get_submodule(name), "weight", amount=0.0)
    assert_same(gradients(lean, x), gradients(model, x))
    qconv.lean(lean, False)
    assert kinds(lean) == kinds(model)
    assert_same(gradients(lean, x), gradients(model, x))


def test_parametrized_layers() -> None:
    model, lean, x = both()
    for net in (model, lean):
        parametrizations.weight_norm(net.get_submodule("conv1"))
    assert_same(gradients(lean, x), gradients(model, x))
    qconv.lean(lean, False)
    assert isinstance(lean.conv1, nn.Conv2d)
    assert type(lean.conv1).__mro__[1] is nn.Conv2d
    assert_same(gradients(lean, x), gradients(model, x))
    parametrize.remove_parametrizations(lean.conv1, "weight")
    assert type(lean.conv1) is nn.Conv2d


def small_head(model: Any) -> nn.Module:
    """VGG without its hundred million weights."""
    model.classifier = nn.Sequential(
        nn.Linear(25088, 8), nn.ReLU(True), nn.Linear(8, 8), nn.ReLU(True), nn.Linear(8, 10)
    )
    return model


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    **{
        name: lambda name=name: torchvision.models.get_model(name, num_classes=10)
        for name in ("resnet18", "mobilenet_v2", "regnet_y_400mf", "densenet121")
    },
    "vgg11_bn": lambda: small_head(torchvision.models.vgg11_bn(num_classes=10)),
    **{
        f"timm's {name}": lambda name=name: timm.create_model(name, num_classes=10)
        for name in ("resnet10t", "mobilenetv3_small_050", "regnetx_002")
    },
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", mostly_nightly(NETWORKS, ("densenet121", "timm's mobilenetv3_small_050")))
def test_networks_of_others(name: str) -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of layers that stay, and of signs that do
        model = qconv.convert(NETWORKS[name](), schemes.bireal())
    lean = qconv.lean(copy.deepcopy(model), exact=True)
    x = torch.randn(2, 3, 32, 32)
    for autocast in (False, True):
        results = []
        for net in (model, lean):
            torch.manual_seed(1)  # of dropout
            results.append(gradients(net, x, autocast))
        assert_same(*results)
    torch.testing.assert_close(lean.state_dict(), model.state_dict(), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(2, 8, 1, 1), (2, 8, 3, 3), (2, 1, 4, 4), (2, 8, 5, 1)])
@pytest.mark.parametrize("outputs", [1, 8])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("exact", [False, True])
def test_strides(shape: tuple[int, ...], outputs: int, kernel: int, exact: bool) -> None:
    """The next layer may choose its algorithm by them, where a side is 1, too, and a user's ``x.view`` needs them."""
    layer = qconv.QConv2d(shape[1], outputs, kernel, padding=kernel // 2, scheme=schemes.bireal())
    for weights in (torch.contiguous_format, torch.channels_last):
        layer = layer.to(memory_format=weights)
        lean = qconv.lean(copy.deepcopy(layer), exact=exact)
        for inputs in (torch.contiguous_format, torch.channels_last):
            x = torch.randn(shape).contiguous(memory_format=inputs)
            assert lean(x.clone().requires_grad_()).stride() == layer(x).stride(), (weights, inputs)


class Viewing(nn.Module):
    """A network that flattens the output of one of its modules by ``x.view``, and notes the strides of its images."""

    def __init__(self, place: str, channels: int, scheme: qconv.Scheme) -> None:
        super().__init__()
        self.place, self.seen = place, []
        conv = qconv.QConv2d(8, 8, 3, padding=1, scheme=scheme)
        self.parts = nn.ModuleDict(
            {
                "stem": nn.Conv2d(channels, 8, 3, padding=1, bias=False),
                "norm": nn.BatchNorm2d(8),
                "conv": conv,
                "act": nn.Hardtanh(),
                "pool": nn.MaxPool2d(2),
            }
        )

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x.stride())
        for name, part in self.parts.items():
            x = part(x)
            if name == self.place:
                return x.view(x.size(0), -1)
        return x.flatten(1)


@pytest.mark.parametrize("place", ["stem", "norm", "conv", "act", "pool"])
@pytest.mark.parametrize("scheme", [schemes.bnn(), schemes.bwn(), schemes.lsq()], ids=str)
def test_a_forward_that_views_images(place: str, scheme: qconv.Scheme) -> None:
    torch.manual_seed(0)
    model, x = Viewing(place, 3, scheme), torch.randn(4, 3, 8, 8)
    model(x)
    lean = qconv.lean(copy.deepcopy(model))
    assert_close(gradients(lean, x), gradients(model, x))
    assert lean.seen == model.seen == 2 * [x.stride()]


@pytest.mark.parametrize("channels", [1, 3])
def test_a_forward_that_views_no_images(channels: int) -> None:
    """It has them in the format of the kernels; in evaluation it has what came in."""
    torch.manual_seed(0)
    model, x = Viewing("", channels, schemes.bnn()), torch.randn(4, channels, 8, 8)
    model(x)
    last = x.clone(memory_format=torch.channels_last).stride()
    lean = pickle.loads(pickle.dumps(qconv.lean(copy.deepcopy(model))))
    assert_close(gradients(lean, x), gradients(model, x))
    assert_close(gradients(copy.deepcopy(lean), x), gradients(model, x))
    with torch.no_grad():
        assert torch.equal(lean(x), model(x))
    assert lean.seen == [x.stride(), last, x.stride()]
    gradients(qconv.lean(lean, False), x)
    assert lean.seen[-1] == x.stride()
    assert not lean._forward_pre_hooks


def test_images_that_a_lean_model_returns() -> None:
    """Their format is that of the images that it got: what follows may view them."""
    model = qconv.lean(nn.Sequential(nn.Conv2d(3, 8, 3), qconv.QConv2d(8, 8, 3, scheme=schemes.bnn()), nn.ReLU()))
    for form in (torch.contiguous_format, torch.channels_last):
        x = torch.randn(4, 3, 8, 8).contiguous(memory_format=form)
        assert model(x).is_contiguous(memory_format=form)


def test_a_model_that_cannot_be_copied_keeps_the_format() -> None:
    model = Viewing("", 3, schemes.bnn())
    model.lock = threading.Lock()  # pyright: ignore[reportArgumentType]
    assert qconv.lean(model)(torch.randn(4, 3, 8, 8)).requires_grad
    assert model.seen == [(192, 64, 8, 1)]


def assert_close(one: Any, other: Any) -> None:
    torch.testing.assert_close((one[0], *one[1]), (other[0], *other[1]), rtol=1e-4, atol=1e-4)


def laid_out(*shape: int) -> dict[str, Tensor]:
    """Images whose memory is not that of a fresh tensor: parts of larger ones, and rows or channels exchanged."""
    n, c, h, w = shape
    last = torch.channels_last
    return {
        "part of channels": torch.randn(n, 2 * c, h, w).contiguous(memory_format=last).chunk(2, 1)[1],
        "part of pixels": torch.randn(n, c, h + 1, w + 1).contiguous(memory_format=last)[..., 1:, 1:],
        "tokens": torch.randn(n, h * w + 1, c)[:, 1:].transpose(1, 2).unflatten(2, (h, w)),
        "rows exchanged": torch.randn(n, c, w, h).transpose(2, 3),
        "channels behind": torch.randn(n, w, h, c).permute(0, 3, 2, 1),
    }


@pytest.mark.parametrize("shape", [(2, 16, 4, 5), (8, 16, 1, 1), (3, 4, 1, 4), (4, 1, 5, 4)], ids=str)
@pytest.mark.parametrize(
    "scheme", [schemes.bnn(), schemes.adabin(), schemes.lsq(), schemes.minmax(), schemes.dorefa(2, 2)], ids=str
)
def test_inputs_of_any_layout(scheme: qconv.Scheme, shape: tuple[int, ...]) -> None:
    """By the layout of an operand a convolution chooses how it adds up, and the next operator its own."""
    torch.manual_seed(0)
    count = shape[1]
    layers: list[nn.Module] = [
        *(qconv.QConv2d(count, count, 3, padding=1, groups=groups, scheme=scheme) for groups in (1, count)),
        *(nn.ReLU(), nn.Hardtanh(), nn.MaxPool2d(1)),
        nn.Sequential(qconv.QConv2d(count, count, 1, scheme=scheme), nn.BatchNorm2d(count)),
    ]
    for layer in layers:
        layer(torch.randn(shape))
        lean = qconv.lean(copy.deepcopy(layer), exact=True)
        for name, x in laid_out(*shape).items():
            outputs, grads = [], []
            for net in (layer, lean):
                given = x.detach().requires_grad_()
                outputs.append(net(given))
                weights = torch.linspace(-1, 2, x.numel()).view(shape)
                grads.append(torch.autograd.grad(outputs[-1], (given, *net.parameters()), weights))
            for one, other in zip((outputs[0], *grads[0]), (outputs[1], *grads[1]), strict=True):
                assert torch.equal(one, other), (layer, name)
                assert one.stride() == other.stride(), (layer, name)


def test_gradients_of_functions() -> None:
    """`torch.func` changes what a call means: a lean model is then as one that is not."""
    torch.manual_seed(0)
    model = Block(nn.Hardtanh, schemes.bireal(), False).eval()
    lean = qconv.lean(copy.deepcopy(model), exact=True)
    x = torch.randn(2, 3, 6, 6)
    results = []
    for net in (model, lean):

        def loss(parameters: dict[str, Tensor], net: nn.Module = net) -> Tensor:
            return functional_call(net, parameters, (x,)).square().sum()

        results.append(grad(loss)({name: p.detach() for name, p in net.named_parameters()}))
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())


@pytest.mark.nightly
@pytest.mark.parametrize("exact", [False, True])
def test_compiled(exact: bool, device: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, bias=False), nn.BatchNorm2d(8)]
    net = qconv.convert(nn.Sequential(*layers, nn.Hardtanh(), nn.Conv2d(8, 4, 3)), schemes.bireal(), skip=("first",))
    model, x = qconv.lean(net, exact=exact).to(device), torch.randn(4, 3, 8, 8).to(device)
    expected = gradients(copy.deepcopy(model), x)
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    got = gradients(compiled, x)
    for one, other in zip((got[0], *got[1]), (expected[0], *expected[1]), strict=True):
        assert other is not None
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))
    torch._dynamo.reset()


def test_streams_in_bfloat16(device: str) -> None:
    """Values that are computed backwards are rounded more coarsely there, which is no change by somebody else."""
    model, lean, x = both(exact=False, activation=nn.Identity)
    x = x.to(device)
    (output, expected), (got, grads) = (gradients(net.to(device), x, True) for net in (model, lean))
    assert (output - got).norm() < 0.05 * output.norm()
    for one, other in zip(expected[1:], grads[1:], strict=True):
        assert one is not None
        assert other is not None
        assert (one - other).norm() < 0.1 * one.norm() + 1e-3


def test_scaled_gradients_in_bfloat16(device: str) -> None:
    model, lean, x = both()
    x = x.to(device)
    for net in (model.to(device), lean.to(device)):
        scaler = torch.amp.GradScaler(device, init_scale=2.0**8)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast(device, torch.bfloat16):
                loss = net(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 2.0**8, "no gradient was infinite"
    assert all(map(are_equal, model.parameters(), lean.parameters()))
    assert any(isinstance(module, QuantizedLayer) for module in lean.modules())


def test_each_lean_module_is_traced() -> None:
    model = qconv.lean(torchvision.models.resnet18(num_classes=10))
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(fx.symbolic_trace(model).eval()(x), model.eval()(x))


def test_a_parametrized_weight_is_computed_once() -> None:
    """`spectral_norm` takes a step of power iteration each time it is asked for."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), qconv.QConv2d(8, 8, 3, scheme=schemes.bnn()))
    lean = qconv.lean(copy.deepcopy(model), exact=True)
    for network in (model, lean):
        torch.manual_seed(1)
        parametrizations.spectral_norm(network[0])
    for _ in range(4):
        input = torch.randn(2, 3, 8, 8)
        assert model(input).equal(lean(input))
