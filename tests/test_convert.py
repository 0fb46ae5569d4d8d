"""Swapping the layers of a model, and back."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torchvision
from settings import mostly_nightly
from torch import Tensor, nn
from torch.nn.utils import prune

import qconv
from qconv import schemes
from qconv.convert.decisions import QUANTIZED
from qconv.quantizers import FP8, ScaledSign


def small() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Conv1d(1, 1, 1), nn.Flatten(), nn.Linear(8, 2)
    )


def kinds(model: nn.Module) -> list[str]:
    return [type(module).__name__ for module in model.children()]


def test_first_and_last_stay(capsys: pytest.CaptureFixture[str]) -> None:
    model = small()
    plan = qconv.plan(model, schemes.bnn())
    assert kinds(model) == ["Conv2d", "ReLU", "Conv2d", "Conv1d", "Flatten", "Linear"]
    assert capsys.readouterr().out.splitlines() == [
        "0  Conv2d stays: the first layer",
        "2  Conv2d → QConv2d bnn()",
        "3  Conv1d → QConv1d bnn()",
        "5  Linear stays: the last layer",
        "1  ReLU → Identity (before the sign of 2)",
    ]
    assert repr(plan) == "Plan(2 of 4 layers change)"
    before = str(plan)
    assert qconv.convert(model, schemes.bnn()) is model
    assert str(plan) == before
    assert kinds(model) == ["Conv2d", "Identity", "QConv2d", "QConv1d", "Flatten", "Linear"]


def test_skip_and_overrides() -> None:
    model = small()
    overrides = {"0": schemes.shift_q(), "3": None, "[35]": schemes.bwn()}
    qconv.convert(model, schemes.bnn(), skip=("last", "2"), overrides=overrides)
    found = [layer.scheme.name for layer in model if isinstance(layer, qconv.QuantizedLayer)]
    assert found == ["shift_q(weight_bits=5)", "bwn()"]  # layer 5 by override, though it is the last
    assert kinds(model) == ["QConv2d", "ReLU", "Conv2d", "Conv1d", "Flatten", "QLinear"]


@pytest.mark.parametrize(
    ("first_last", "ends"),
    [
        ("float", None),
        ("w8", "minmax(weight_bits=8, input_bits=None)"),
        ("w8a8", "lsq(weight_bits=8, input_bits=8, signed_input=True)"),
        (schemes.dorefa(8, 8), "dorefa(weight_bits=8, input_bits=8)"),
    ],
    ids=str,
)
def test_first_and_last_of_more_bits(first_last: Any, ends: str | None) -> None:
    model = qconv.convert(small(), schemes.lsq(2, 2), first_last=first_last, overrides={"5": None})
    found = [layer.scheme.name if isinstance(layer, qconv.QuantizedLayer) else None for layer in model]
    others = "lsq(weight_bits=2, input_bits=2)"
    assert found == [ends, None, others, others, None, None]
    model = qconv.convert(small(), schemes.lsq(2, 2), first_last=first_last, skip=("last",))
    names = [layer.scheme.name for layer in model if isinstance(layer, qconv.QuantizedLayer)]
    assert names == [others, others, others, *([ends] if ends else [])]


def test_a_quantizer_of_the_gradient_for_every_layer() -> None:
    own = schemes.dorefa(2, 2, grad_bits=4)
    model = qconv.convert(
        small(), schemes.bnn(), first_last="w8", overrides={"3": own}, grad_quantizer=partial(FP8, "e5m2")
    )
    explicit = qconv.convert(small(), own, grad_quantizer=partial(FP8, "e5m2"))[2]
    assert isinstance(explicit, qconv.QConv2d)
    assert isinstance(explicit.grad_quantizer, FP8)
    fp8 = " + grad FP8(format='e5m2', scale='dynamic')"
    assert [layer.scheme.name for layer in model if isinstance(layer, qconv.QuantizedLayer)] == [
        "minmax(weight_bits=8, input_bits=None)" + fp8,
        "bnn()" + fp8,
        own.name,
        "minmax(weight_bits=8, input_bits=None)" + fp8,
    ]
    first, second = (layer for layer in model if isinstance(layer, qconv.QConv2d))
    assert isinstance(first.grad_quantizer, FP8)
    assert first.grad_quantizer is not second.grad_quantizer


def test_weights_hooks_and_mode_are_kept() -> None:
    model = small().eval()
    layer = model[2]
    seen: list[str] = []
    layer.register_forward_hook(lambda *_: seen.append("called"))
    layer.requires_grad_(False)
    before = dict(model.state_dict(keep_vars=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    qconv.convert(model, schemes.bnn())
    assert model[2] is layer
    assert not layer.training
    assert [p for group in optimizer.param_groups for p in group["params"]] == list(model.parameters())
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is tensor for name, tensor in before.items())
    layer(torch.randn(1, 8, 5, 5))
    assert seen == ["called"]
    assert not layer.weight.requires_grad
    qconv.to_float(model)
    assert not layer.weight.requires_grad


def test_shared_layers_stay_shared(capsys: pytest.CaptureFixture[str]) -> None:
    shared = nn.Conv2d(8, 8, 3, padding=1)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), shared, nn.ReLU(), shared, nn.Conv2d(8, 2, 3))
    qconv.plan(model, schemes.bnn(), overrides={"3": schemes.bwn()})
    assert "1, 3  Conv2d → QConv2d bwn() (overrides '3')" in capsys.readouterr().out
    qconv.convert(model, schemes.bnn())
    assert model[1] is model[3] is shared
    assert isinstance(shared, qconv.QConv2d)


def test_a_model_that_is_one_layer(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Conv2d(3, 4, 3)
    with pytest.raises(ValueError, match=r"has nothing left to convert:\n.*stays: the"):
        qconv.convert(model, schemes.bnn())
    assert type(qconv.convert(model, schemes.bnn(), skip=())) is qconv.QConv2d
    qconv.to_float(model)
    qconv.plan(model, schemes.bnn(), skip=())
    assert capsys.readouterr().out == "(the model itself)  Conv2d → QConv2d bnn()\n"


class Special(nn.Conv2d):
    """A subclass, whose forward may be anything."""


def test_subclasses_and_quantized_layers_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), Special(4, 4, 3), nn.LazyConv2d(4, 3), nn.Conv2d(4, 4, 1), nn.Linear(4, 2)
    )
    prune.l1_unstructured(model[0], "weight", 0.5)
    with pytest.warns(UserWarning, match=r"layer '0' stays float: its weight is computed \(pruning\).* keeps no zeros"):
        qconv.convert(model, schemes.bnn(), skip=("last",))
    assert type(model[1]) is Special
    capsys.readouterr()
    qconv.plan(model, schemes.bwn(), skip=())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("0  Conv2d stays: its weight is computed (pruning), and ScaledSign")
    assert lines[1] == "1  Special stays: a subclass of Conv2d, see subclasses={Special: qconv.QConv2d}"
    assert (
        lines[2]
        == "2  LazyConv2d stays: a subclass of Conv2d, whose weight has no shape yet: run the model once before"
    )
    assert lines[3] == "3  QConv2d stays: quantized already, bnn()"


def test_to_float_undoes_convert(scheme: qconv.Scheme) -> None:
    model = small()[:3]
    input = torch.randn(2, 3, 8, 8)
    expected, state = model(input), model.state_dict()
    qconv.convert(model, scheme, skip=("first",))
    (quantized := model(input)).sum().backward()  # until then, learned tensors replace no weight
    assert qconv.to_float(model) is model
    assert kinds(model) == ["Conv2d", "ReLU", "Conv2d"]
    assert model.state_dict().keys() == state.keys()
    assert all(parameter.requires_grad for parameter in model.parameters())
    if scheme.name.startswith("shift_ps"):
        torch.testing.assert_close(model(input), quantized)
    else:
        assert model(input).equal(expected)


MODELS: dict[str, tuple[Any, int, int, int]] = {
    # how many layers, how many of them converted, image size
    "resnet18": (torchvision.models.resnet18, 21, 19, 64),
    "mobilenet_v2": (torchvision.models.mobilenet_v2, 53, 51, 64),
    "convnext_tiny": (torchvision.models.convnext_tiny, 59, 57, 64),
}


@pytest.mark.parametrize(
    ("build", "layers", "converted", "size"), mostly_nightly(MODELS.values(), [MODELS["resnet18"]])
)
def test_models_of_torchvision(build: Any, layers: int, converted: int, size: int) -> None:
    model = build(weights=None).eval()
    input = torch.randn(2, 3, size, size)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    expected = model(input).detach()
    qconv.convert(model, schemes.identity())
    steps = [module for module in model.modules() if isinstance(module, qconv.QuantizedLayer)]
    others = [module for module in model.modules() if type(module) in QUANTIZED]
    assert (len(steps), len(steps) + len(others)) == (converted, layers)
    assert model(input).equal(expected)

    qconv.convert(qconv.to_float(model), schemes.bnn())
    model.train()(input).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not model.eval()(input).equal(expected)

    qconv.to_float(model)
    model.load_state_dict(before)
    assert model(input).equal(expected)


def test_an_override_that_would_have_no_effect() -> None:
    class Own(nn.Conv2d):
        """Computes something that nobody here knows."""

    def model(*, second: nn.Module) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, 4, 3), second, nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(16, 4))

    computed = prune.l1_unstructured(nn.Conv2d(4, 4, 3), "weight", 0.5)
    quantized = qconv.QConv2d(4, 4, 3, scheme=schemes.bwn())
    for second, reason in ((computed, "pruning"), (Own(4, 4, 3), "subclass of Conv2d"), (quantized, "already")):
        with pytest.raises(ValueError, match=rf"overrides '1': layer '1' \(.*\) can't be quantized: .*{reason}"):
            qconv.plan(model(second=second), schemes.bnn(), overrides={"1": schemes.bwn()})
        plan = qconv.plan(model(second=second), schemes.bnn(), overrides={"[12]": schemes.bwn(), "0": None})
        assert [step.scheme.name if step.scheme else None for step in plan.steps] == [None, None, "bwn()", None]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            dict(skip=("layer1.*",)),
            ValueError,
            r"skip pattern 'layer1\.\*' matches no layer; the layers are 0, 2, 3, 5",
        ),
        (dict(overrides={"nine": schemes.bwn()}), ValueError, "overrides pattern 'nine' matches no layer"),
        (dict(overrides={"(": schemes.bwn()}), ValueError, r"overrides pattern '\(' is not a regular expression"),
        (dict(overrides={"2": "bwn"}), TypeError, r"overrides\['2'\] \(='bwn'\) must be a qconv.Scheme"),
        (dict(skip="first"), TypeError, r"skip \(='first'\) must be a sequence of patterns, such as \('first',\)"),
        (dict(skip=None), TypeError, r"skip \(=None\) must be a sequence of patterns, \(\) for none"),
        (dict(overrides=["2"]), TypeError, r"overrides \(=\['2'\]\) must be a dictionary of patterns and schemes"),
        (dict(subclasses=[nn.Conv2d]), TypeError, r"subclasses \(=\[.*\) must be a dictionary of classes and their q"),
        *(
            (dict(example=example), TypeError, rf"(?s)example \(={said}.*\) must be an input .* a tuple of its inputs")
            for example, said in (([torch.ones(1, 3, 9, 9)], r"\['Tensor"), (torch.ones(1, 3, 9, 9).numpy(), "array"))
        ),
        (dict(scheme="bnn"), TypeError, r"scheme \(='bnn'\) must be a qconv.Scheme"),
        (dict(skip=(".*",)), ValueError, "has nothing left to convert:\n0  Conv2d stays: skip"),
        ({"first_last": "w9"}, ValueError, r"first_last \(='w9'\) must be one of 'float', 'w8', 'w8a8', or a"),
        ({"first_last": ["w8"]}, ValueError, r"first_last \(=\['w8'\]\) must be one of 'float', 'w8', 'w8a8', or a"),
        ({"first_last": "w8", "skip": ()}, ValueError, r"first_last \(='w8'\) needs 'first' or 'last' in skip"),
        ({"grad_quantizer": FP8()}, TypeError, r"grad_quantizer \(=FP8\(.*\)\) must make a quantizer, not be one"),
        ({"grad_quantizer": "fp8"}, TypeError, r"grad_quantizer \(='fp8'\) must make a quantizer, not str"),
        ({"grad_quantizer": nn.ReLU}, TypeError, r"grad_quantizer .* must make a quantizer, not ReLU"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    model = small()
    with pytest.raises(error, match=message):
        qconv.convert(model, arguments.pop("scheme", schemes.bnn()), **arguments)
    assert kinds(model) == kinds(small())


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.ReLU()), r"model \(Sequential\) has no layer to convert: it has none of Conv1d, Conv2d"),
        (
            nn.Sequential(Special(1, 1, 1)),
            r"left to convert:\n0  Special stays: .*see subclasses={Special: qconv.QConv2d}",
        ),
    ],
)
def test_a_model_with_nothing_to_convert(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        qconv.convert(model, schemes.bnn())
    with pytest.raises(ValueError, match=r"model \(Sequential\) has no quantized layer"):
        qconv.to_float(model)


def test_a_layer_that_cannot_follow_is_named_before_anything_changes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.ConvTranspose2d(8, 8, 3), nn.Linear(8, 2))
    with pytest.raises(ValueError, match=r"layer '2' \(ConvTranspose2d\): scale_map \(=True\) is defined for conv"):
        qconv.convert(model, schemes.xnor(scale_map=True))
    assert kinds(model) == ["Conv2d", "Conv2d", "ConvTranspose2d", "Linear"]


def test_a_model_that_is_distributed_already_is_refused() -> None:
    class Wrapped(nn.parallel.DistributedDataParallel):
        def __init__(self, module: nn.Module) -> None:  # without other processes
            nn.Module.__init__(self)
            self.module = module

    model = Wrapped(nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)))
    with pytest.raises(ValueError, match=r"wrapped in DistributedDataParallel, .* convert the model first, then wrap"):
        qconv.convert(model, schemes.lsq(4, 4), skip=())
    assert kinds(model.module) == ["Conv2d", "Conv2d"]


def test_tied_weights_that_a_scheme_would_replace_are_refused() -> None:
    first, second = nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    with pytest.raises(ValueError, match=r"layer '0' \(Conv2d\): its weight is tied to another module's, and shift_ps"):
        qconv.convert(model, schemes.shift_ps(), skip=())
    qconv.convert(model, schemes.bnn(), skip=())
    assert second.weight is first.weight


def test_tied_weights_that_steps_would_change_are_refused() -> None:
    def model() -> nn.Sequential:
        embedding, head = nn.Embedding(10, 16), nn.Linear(16, 10)
        head.weight = embedding.weight
        return nn.Sequential(embedding, nn.Linear(16, 16), head)

    for scheme, word in ((schemes.bwn(), "bwn()"), (schemes.shift_q(), "shift_q"), (schemes.inq(), "inq")):
        with pytest.raises(
            ValueError, match=r"layer '2' \(Linear\): its weight is tied to that of layer '0' \(Embedding\)"
        ):
            qconv.convert(model(), scheme, skip=())
        assert word in scheme.name
    for scheme, skip in ((schemes.lsq(4, 4), ()), (schemes.bwn(), ("last",))):
        converted = qconv.convert(model(), scheme, skip=skip)
        assert converted[0].weight is converted[2].weight
    qconv.plan(model().to("meta"), schemes.lsq(4, 4), skip=())
    two = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    two[1].weight = two[0].weight
    with pytest.raises(ValueError, match=r"layer '0' \(Linear\): its weight is tied to that of layer '1' \(Linear\)"):
        qconv.plan(two, schemes.lsq(2, 2), skip=(), overrides={"0": schemes.bwn()})
    qconv.plan(two, schemes.bwn(), skip=())


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_plan_says_which_computed_weights_stay(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Conv2d(3, 4, 3)), nn.Conv2d(4, 4, 3))
    qconv.plan(model, schemes.shift_ps(), skip=())
    assert (
        capsys.readouterr()
        .out.splitlines()[0]
        .startswith("0  Conv2d stays: its weight is computed (WeightNorm): call torch.nn")
    )


def fix_kernel(layer: nn.Conv2d) -> Tensor:
    """Make the weight a buffer, with values beyond those of a sign's weight."""
    kernel = 3 * layer.weight.detach().sign()
    del layer.weight
    layer.register_buffer("weight", kernel)
    return kernel.clone()


def test_a_fixed_kernel_stays() -> None:
    """It is no parameter, so it is neither quantized nor clamped, and nobody need name it in ``skip``."""
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3))
    kernel = fix_kernel(model[0])
    with pytest.warns(UserWarning, match="layer '0' stays float: its weight is not a parameter"):
        qconv.convert(model, schemes.bnn(), skip=())
    assert type(model[0]) is nn.Conv2d
    later = fix_kernel(model[1])
    for layer in (model[1], model[2]):
        with torch.no_grad():
            layer.weight.mul_(100)
        layer.after_step_()
    assert model[0].weight.equal(kernel)
    assert model[1].weight.equal(100 * later)
    assert model[2].weight.abs().max() == 1


def test_padding_that_was_changed_after_construction() -> None:
    layer = nn.Conv2d(4, 4, 3, padding=1)
    layer.padding, layer.dilation = (2, 2), (2, 2)
    input = torch.randn(1, 4, 8, 8)
    expected = layer(input)
    assert qconv.convert(layer, schemes.identity(), skip=())(input).equal(expected)


@pytest.mark.parametrize("scheme", [schemes.bnn(stochastic=True), schemes.shift_ps(rounding="stochastic")], ids=str)
def test_a_model_in_evaluation_stays_there(scheme: qconv.Scheme) -> None:
    model = qconv.convert(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)).eval(), scheme, skip=())
    assert not any(module.training for module in model.modules())
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(model(images), model(images))


def test_layers_that_quantize_nothing_count_as_float(scheme: qconv.Scheme) -> None:
    torch.manual_seed(0)
    model = small()[:3]
    layer, input = model[2], torch.randn(2, 3, 8, 8)
    expected = qconv.convert(copy.deepcopy(model), scheme, skip=("first",))
    qconv.convert(model, schemes.identity(), skip=("first",))
    plan = qconv.plan(model, scheme, skip=("first",))
    assert [step.becomes for step in plan.steps] == [None, qconv.QConv2d]
    assert repr(layer).endswith("scheme=identity())")
    qconv.convert(model, scheme, skip=("first",))
    assert model[2] is layer
    assert repr(layer) == repr(expected[2])
    assert model.state_dict().keys() == expected.state_dict().keys()
    torch.manual_seed(1)
    output = model(input)
    torch.manual_seed(1)
    assert torch.equal(output, expected(input))
    assert kinds(qconv.to_float(model)) == ["Conv2d", "ReLU", "Conv2d"]


def test_a_conversion_that_fails_leaves_layers_that_quantize_nothing() -> None:
    class Choosy(ScaledSign):
        def initialize(self, x: Tensor) -> None:
            if len(x) == 5:
                raise ValueError("not this filter")

    model = nn.Sequential(*(nn.Conv2d(4, width, 3) for width in (4, 4, 5)))
    model[2].weight.requires_grad_(False)
    qconv.convert(model, schemes.identity(), skip=("first",))
    model[1].weight.requires_grad_(False)
    input = torch.randn(1, 4, 9, 9)
    expected = model(input)
    for skip in (("first",), ("first", "1")):  # the layer that fails is the second or the first one
        with pytest.raises(ValueError, match=r"layer '2' \(QConv2d, identity\(\)\): not this filter"):
            qconv.convert(model, qconv.Scheme("choosy", weight=Choosy), skip=skip)
        assert [type(layer) for layer in model] == [nn.Conv2d, qconv.QConv2d, qconv.QConv2d]
        assert all(repr(layer).endswith("scheme=identity())") for layer in model[1:])
        assert [layer.weight.requires_grad for layer in model] == [True, False, False]
        assert torch.equal(model(input), expected)
