"""Signed or unsigned inputs: chosen by the data, kept by whatever copies a model, and told once."""

import copy
import logging
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qconv
from qconv import schemes
from qconv.check import watch
from qconv.layers import QuantizedLayer
from qconv.quantizers import LSQInput, Stages
from qconv.quantizers.chosen_sign import least_error

SIZE = (64, 3, 8, 8)


def network() -> nn.Sequential:
    """Its inner layers see normal inputs, those of a SiLU, and those of a ReLU."""
    torch.manual_seed(0)
    wide = nn.BatchNorm2d(8)  # whose SiLU has small negative values only
    nn.init.constant_(wide.weight, 3.0)
    parts = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), wide, nn.SiLU(), nn.Conv2d(8, 8, 1)]
    return nn.Sequential(*parts, nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.Flatten(), nn.Linear(288, 4))


def signs(model: nn.Module) -> dict[str, bool]:
    inputs = {name: layer.input_quantizer for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}
    return {name: each.signed for name, each in inputs.items() if isinstance(each, LSQInput)}


CHOSEN = {"2": True, "5": False, "8": False}


@pytest.fixture
def calibrated(caplog: pytest.LogCaptureFixture) -> nn.Module:
    model = qconv.convert(network(), schemes.lsq(4, 4))
    with caplog.at_level(logging.WARNING, "qconv"):
        qconv.calibrate(model, [torch.randn(SIZE)])
    (said,) = caplog.messages
    assert said.startswith("using signed levels in 1 layer, because inputs are negative: 2 (5")
    assert "; using unsigned levels in 5 (" in said
    return model.eval()


@pytest.mark.parametrize(("x", "signed"), [(torch.randn(999), True), (torch.randn(999).abs(), False)])
def test_the_smaller_error_decides(x: Tensor, signed: bool) -> None:
    for bits in (1, 2, 8):
        quantizer = LSQInput(bits)
        quantizer.initialize(x)
        assert quantizer.signed is signed
        fixed = LSQInput(bits, signed=signed)
        fixed.initialize(x)
        assert torch.equal(quantizer(x), fixed(x))
        assert quantizer.levels(*quantizer.tensors())[:2] == fixed.levels(*fixed.tensors())[:2]
        assert quantizer.whole_ends == fixed.whole_ends
    assert least_error(x[None], 0, 15, 2)[1] < least_error(x[None], 0, 3, 2)[1]


def test_the_first_batch_chooses_as_calibrate_does_and_arguments_win(
    calibrated: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    assert signs(calibrated) == CHOSEN
    caplog.clear()
    model = qconv.convert(network(), schemes.lsq(4, 4)).train()
    with caplog.at_level(logging.WARNING, "qconv"):
        for _ in range(4):
            model(torch.randn(SIZE))
    assert signs(model) == CHOSEN
    assert len(caplog.messages) == 1
    for asked in (True, False):
        for scheme in (schemes.lsq(4, 4, signed_input=asked), schemes.lsq(4, 4).with_signed_input(asked)):
            model = qconv.convert(network(), scheme)
            qconv.calibrate(model, [torch.randn(SIZE)])
            assert set(signs(model).values()) == {asked}
        assert set(signs(qconv.convert(network(), schemes.lsq(4, 4), signed_inputs=asked)).values()) == {asked}
    with pytest.raises(ValueError, match=r"signed_inputs \(=True\) must be None with pact"):
        qconv.convert(network(), schemes.pact(), signed_inputs=True)
    staged = schemes.staged([(0, schemes.lsq(4, 4)), (0.5, schemes.lsq(2, 2))])
    with pytest.raises(ValueError, match=r"set it in the schemes of its stages: lsq\(…, signed_input=True\)"):
        qconv.convert(network(), staged, signed_inputs=True)


def test_whatever_copies_a_model_copies_the_choice(calibrated: nn.Module, tmp_path: Path) -> None:
    images = torch.randn(SIZE)
    expected = calibrated(images)

    def fresh() -> nn.Module:
        return qconv.convert(network(), schemes.lsq(4, 4)).eval()

    loaded, written, average = fresh(), fresh(), fresh()
    loaded.load_state_dict(calibrated.state_dict())
    state = calibrated.state_dict()
    with torch.no_grad():
        for name, tensor in written.state_dict().items():
            tensor.copy_(state[name])
        for name, tensor in average.state_dict().items():
            if "is_signed" in name or "calibrated" in name:
                tensor.lerp_(state[name], 0.01)
    assert signs(average) == CHOSEN
    qconv.save_packed(calibrated, tmp_path / "packed")
    packed = qconv.load_packed(tmp_path / "packed", network())
    for model in (loaded, written, packed, copy.deepcopy(calibrated), qconv.freeze(calibrated)):
        torch.testing.assert_close(model(images), expected)
    assert signs(packed) == signs(loaded) == CHOSEN


def test_a_choice_that_is_written_over_is_read_again(calibrated: Any) -> None:
    """By an average of models, for one, which has been used before."""
    average = torch.optim.swa_utils.AveragedModel(calibrated)
    input = torch.randn(SIZE)
    assert torch.equal(average(input), calibrated(input))
    calibrated[2].calibrate_(torch.rand(64, 8, 6, 6))  # unsigned now
    average.n_averaged.zero_()
    average.update_parameters(calibrated)
    assert signs(average.module) == signs(calibrated) != CHOSEN
    assert torch.equal(average(input), calibrated(input))


def test_a_backward_keeps_the_choice_of_its_forward(calibrated: Any) -> None:
    quantizer = calibrated[2].input_quantizer
    x = torch.linspace(-1, 1, 9).requires_grad_()
    expected = torch.autograd.grad(quantizer(x).sum(), x)[0]
    output = quantizer(x).sum()
    quantizer.is_signed.zero_()
    assert torch.equal(torch.autograd.grad(output, x)[0], expected)
    assert quantizer(x).min() == 0


def test_a_state_dict_of_another_argument_is_refused(calibrated: nn.Module) -> None:
    state = calibrated.state_dict()
    with pytest.raises(ValueError, match=r"2.input_quantizer.is_signed \(=1\): inputs are signed in the checkpoint"):
        qconv.convert(network(), schemes.lsq(4, 4, signed_input=False)).load_state_dict(state)


def test_stages_choose_in_each_stage() -> None:
    stages = Stages([(0, partial(LSQInput, 8)), (0.5, partial(LSQInput, 2))])
    stages.initialize(torch.randn(500))
    assert stages.at_work.chosen_sign is True
    stages.set_progress_(0.6, None)
    assert stages.at_work.chosen_sign is None
    stages.initialize(torch.rand(500))
    assert stages.at_work.chosen_sign is False


def test_votes_decide_for_all_processes() -> None:
    """What `QuantizedLayer.calibrate_` does between processes: the sum decides, and the step follows."""
    mine, theirs, alone = LSQInput(4), LSQInput(4), LSQInput(4, signed=True)
    mine.initialize(x := torch.rand(500))
    alone.initialize(x)
    theirs.initialize(torch.randn(500))
    assert (mine.signed, theirs.signed) == (False, True)
    mine.decide(mine.vote() + theirs.vote())
    assert mine.signed
    torch.testing.assert_close(mine.step, alone.step)


@pytest.mark.parametrize("scheme", [schemes.pact(), schemes.dorefa(2, 2), schemes.apot(), schemes.n2uq()], ids=str)
def test_methods_without_negative_levels_warn_once(scheme: qconv.Scheme) -> None:
    model = qconv.convert(network(), scheme).train()
    model(torch.randn(SIZE))
    with pytest.warns(UserWarning, match=r"^negative inputs are clipped to 0 in 2 layers.*: [25] \(\d\d %\), [25] \("):
        model(torch.randn(SIZE))
    with warnings.catch_warnings(action="error"):
        for _ in range(3):
            model(torch.randn(SIZE))
    again = qconv.convert(network(), scheme).train()
    with pytest.warns(UserWarning, match="clipped to 0 in 2 layers"):
        assert qconv.calibrate(again, [torch.randn(SIZE)]) == []
    with warnings.catch_warnings(action="error"):
        for _ in range(4):
            again(torch.randn(SIZE))


def test_a_layer_of_its_own_has_no_name() -> None:
    layer = qconv.QConv2d(3, 4, 1, scheme=schemes.dorefa(2, 2))
    watch(layer)
    with warnings.catch_warnings(action="error"):
        layer(torch.randn(SIZE))
    with pytest.warns(UserWarning, match=r"clipped to 0 in 1 layer.*QConv2d\(3, 4"):
        layer(torch.randn(SIZE))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by the compiler, behind a break of the graph
def test_compiled_layers_choose_too() -> None:
    """Of several layers in one graph, whose votes are then symbols."""
    torch.manual_seed(0)
    model = qconv.convert(nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))), schemes.lsq(), skip=())
    eager = copy.deepcopy(model)
    input = torch.randn(4, 4, 6, 6)
    output = torch.compile(model, backend="aot_eager")(input)
    torch.testing.assert_close(output, eager(input))
    assert signs(model) == signs(eager) == {"0": True, "1": True, "2": True}
