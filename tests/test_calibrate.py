"""Tensors of input quantizers set from data: by hand, by the first training step, the same after a restart."""

import copy
import warnings
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qconv
from qconv import Scheme
from qconv.check import watch
from qconv.layers.placement import on_device_of
from qconv.quantizers import Identity, Quantizer


class Scaled(Quantizer):
    """``x / scale``, the scale set to the largest magnitude of the first data."""

    def __init__(self, start: float = 1.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(start))
        self.calibrated = False

    def initialize(self, x: Tensor) -> None:
        if x.numel():
            with torch.no_grad():
                self.scale.copy_(x.abs().max())
            self.calibrated = True

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.scale,)

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return x / tensors[0]

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return grad / tensors[0], -(grad * x).sum() / tensors[0].square()


SCHEME = Scheme("scaled", input=Scaled)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = qconv.QConv2d(3, 4, 3, padding=1, padding_mode="reflect", scheme=SCHEME), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, qconv.QLinear(4 * 25, 2, scheme=SCHEME), nn.Dropout(0.5))


def scales(model: nn.Module) -> list[float]:
    return [module.scale.item() for module in model.modules() if isinstance(module, Scaled)]


def batches() -> list[Tensor]:
    return [torch.randn(4, 3, 5, 5), 3 * torch.randn(4, 3, 5, 5)]


def test_every_layer_sees_what_comes_before_it_without_quantized_inputs() -> None:
    model, inputs = network(), batches()
    expected = network()
    for layer in (expected[0], expected[3]):
        layer.input_quantizer = Identity()
    joined = torch.cat(inputs)
    hidden = expected[:3](joined)
    assert qconv.calibrate(model, iter(inputs)) == ["0", "3"]
    assert scales(model) == [joined.abs().max().item(), hidden.abs().max().item()]
    assert model.training
    assert all(not module._forward_pre_hooks for module in model.modules())
    before = scales(model)
    model(100 * inputs[0])
    assert scales(model) == before  # calibrated: the first training step leaves them


def test_the_first_training_step_calibrates() -> None:
    model, (first, second) = network(), batches()
    model.eval()(first)
    assert scales(model) == [1.0, 1.0]  # evaluation leaves a quantizer as it was made
    model.train()
    model(first[:0])
    assert scales(model) == [1.0, 1.0]  # nothing to see yet
    model(first)
    assert scales(model)[0] == first.abs().max().item()
    assert scales(model)[1] != 1.0
    model(second).sum().backward()  # no gradient has come before: the first forward was a dry run
    before = scales(model)
    assert before[0] == second.abs().max().item()
    model(first)
    assert scales(model) == before


IMAGES = torch.randn(2, 3, 6, 6)


# Evaluation before calibration


def evaluated(model: nn.Module, input: Tensor) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model(input)
    return [str(each.message) for each in found]


def test_evaluation_before_calibration_is_told_once_by_layer() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)).eval()
    qconv.convert(model, qconv.schemes.minmax(4, 4), skip=["0"])
    qconv.calibrate(nn.Sequential(model[2]), [torch.randn(2, 4, 6, 6)])
    images = torch.randn(2, 3, 9, 9)
    assert evaluated(model, images[:0]) == []
    (message,) = evaluated(model, images)
    layer = "layer '1' (QConv2d, minmax(weight_bits=4, input_bits=4))"
    assert message.startswith(f"{layer} is evaluated before MinMaxInput has had data")
    assert "Call qconv.calibrate(model, batches)" in message
    assert evaluated(model, images) == []
    assert evaluated(copy.deepcopy(model), images) == []


def test_a_part_in_evaluation_while_the_rest_trains_is_told() -> None:
    model = nn.Sequential(qconv.QConv2d(3, 4, 3, scheme=SCHEME).eval(), qconv.QConv2d(4, 4, 3, scheme=SCHEME))
    watch(model)
    (message,) = evaluated(model, IMAGES)
    assert message.startswith("layer '0' (QConv2d, ")
    assert "is evaluated before Scaled has had data" in message
    assert scales(model)[0] == 1.0
    qconv.calibrate(model, [IMAGES])
    assert scales(model)[0] == IMAGES.abs().max().item()
    assert [module.training for module in model] == [False, True]


def test_what_is_no_evaluation_is_not_warned_of() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qconv.convert(model, SCHEME, skip=()).eval()
        qconv.summary(model, (3, 6, 6))
        copy.deepcopy(model).to("meta")(IMAGES.to("meta"))
        qconv.calibrate(model, [IMAGES])
        model(IMAGES)
        qconv.convert(nn.Sequential(nn.Conv2d(3, 4, 3)), qconv.schemes.bnn(), skip=()).eval()(IMAGES)  # needs no data
        training = nn.Sequential(qconv.QConv2d(3, 4, 3, scheme=SCHEME))
        training(IMAGES)
        training.eval()(IMAGES)


def test_a_compiled_model_stays_whole_and_is_not_watched() -> None:
    model = nn.Sequential(qconv.QConv2d(3, 4, 3, scheme=qconv.schemes.minmax(4, 4))).eval()
    watch(model)
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    assert evaluated(compiled, IMAGES) == []


def test_a_whole_graph_asks_for_the_range_of_a_stage_that_begins() -> None:
    staged = qconv.schemes.staged([(0, qconv.schemes.identity()), (0.5, qconv.schemes.lsq())])
    model = nn.Sequential(qconv.QConv2d(3, 4, 3, scheme=staged))
    compiled: Any = torch.compile(model, fullgraph=True, backend="eager")
    qconv.calibrate(model, [IMAGES])
    compiled(IMAGES)
    qconv.set_progress(model, 0.5)
    with pytest.raises(Exception, match=r"qconv.calibrate\(model, batches\) before .*, and where a stage begins"):
        compiled(IMAGES)
    qconv.calibrate(model, [IMAGES])
    compiled(IMAGES)


def test_what_needs_no_data_quantizes_while_others_are_calibrated() -> None:
    """In the first call as in the second."""
    model: Any = nn.Sequential(nn.Conv2d(1, 1, 1, bias=False), nn.Flatten(), nn.Linear(4, 2))
    nn.init.ones_(model[0].weight)
    qconv.convert(model, qconv.schemes.dorefa(8, 8), skip=(), overrides={"2": qconv.schemes.minmax(8, 8)})
    for _ in range(2):
        qconv.calibrate(model, [10 * torch.rand(64, 1, 2, 2)])
        assert model[2].input_quantizer.high.item() == pytest.approx(1)  # where DoReFa clips


def test_layers_without_an_input_are_named() -> None:
    """As auxiliary heads, which evaluation does not call."""

    class WithHead(nn.Sequential):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return self[0](input)

    model = qconv.convert(WithHead(*(nn.Conv2d(3, 3, 1) for _ in range(3))), qconv.schemes.lsq(), skip=())
    with pytest.warns(UserWarning, match=r"calibrate: the model did not call layers '1', '2'"):
        assert qconv.calibrate(model, [torch.randn(2, 3, 4, 4)]) == ["0"]


def test_batches_are_moved_to_the_device_of_the_model() -> None:
    model, x = nn.Linear(2, 2, device="meta"), torch.zeros(2)
    batch = on_device_of(model, (x, [x], {"a": x, "b": 3}, "name"))
    assert [each.device.type for each in (batch[0], batch[1][0], batch[2]["a"])] == ["meta"] * 3
    assert (batch[2]["b"], batch[3]) == (3, "name")
    assert on_device_of(model, UserDict(images=x))["images"].is_meta
    both = nn.Sequential(model, nn.Linear(2, 2))  # which of them takes the input is not known
    assert all(on_device_of(other, x) is x for other in (both, nn.Linear(2, 2), nn.ReLU()))
