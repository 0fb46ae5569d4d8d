"""Sensitivity: each layer alone, against a plain computation of the same."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune

import qconv
from qconv import schemes
from qconv.ground.table import read_csv
from qconv.layers import QuantizedLayer


def test_pixels_and_labels_that_are_no_classes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 5, 1)).eval()
    images, masks = torch.randn(4, 3, 8, 8), torch.randint(5, (4, 8, 8))
    masks[0, 0] = -100
    found = qconv.sensitivity(model, images, masks, scheme=schemes.lsq(2, 2))
    assert found.loss == pytest.approx(F.cross_entropy(model(images), masks).item(), rel=1e-6)
    assert all(row.accuracy is not None and -1 <= row.accuracy <= 1 for row in found.rows)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 1)).eval()
    found = qconv.sensitivity(model, [(images, torch.rand(4, 1))], scheme=schemes.lsq(2, 2))
    assert found.loss is None
    assert all(cost > 0 for cost in found.costs.values())
    with pytest.raises(ValueError, match=r"outputs \(of shape \(4, 1\)\) tell no classes apart"):
        qconv.assign_bits(model, images, choices=[schemes.lsq(2, 2), schemes.lsq(8, 8)], max_bytes=10**6, skip=())


def test_pruned_and_normalized_models_are_copied() -> None:
    model = network()
    prune.l1_unstructured(model[0], "weight", 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch about weight_norm
        nn.utils.weight_norm(model[2])
        model(IMAGES).sum().backward()  # they have computed weights with gradients, which can't be copied as they are
        found = qconv.sensitivity(model, IMAGES, scheme=schemes.lsq(4, 4), skip=("0", "2"))
    assert [row.layer for row in found.rows] == ["5"]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    middle = [nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), *middle, nn.Linear(4 * 36, 5)).eval()


IMAGES = torch.randn(40, 3, 8, 8, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(40) % 5


def test_each_layer_is_quantized_alone() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    found = qconv.sensitivity(model, IMAGES, LABELS, scheme=schemes.minmax(2, None), batch_size=16)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(isinstance(module, QuantizedLayer) for module in model.modules())
    assert sorted(found.costs) == ["0", "2", "5"]
    with torch.no_grad():
        y = model(IMAGES)
        for row in found.rows:
            alone = network()
            layer: Any = alone.get_submodule(row.layer)
            layer.weight.copy_(schemes.minmax(2, None).weight()(layer.weight))
            y_q = alone(IMAGES)
            assert row.error == pytest.approx(((y_q - y).square().sum() / y.square().sum()).item(), rel=1e-4)
            p = y.softmax(1)
            assert row.kl == pytest.approx((p * (p / y_q.softmax(1)).log()).sum(1).mean().item(), rel=1e-3)
            expected = F.cross_entropy(y_q, LABELS) - F.cross_entropy(y, LABELS)
            assert row.loss == pytest.approx(expected.item(), abs=1e-5)
            changed = (y_q.argmax(1) == LABELS).float().mean() - (y.argmax(1) == LABELS).float().mean()
            assert row.accuracy == pytest.approx(changed.item(), abs=1e-6)
    assert [row.cost for row in found.rows] == sorted((row.cost for row in found.rows), reverse=True)
    assert found.together.error > min(row.error for row in found.rows)


def test_a_converted_model_is_measured_against_its_latent_weights_and_other_samples_do_not_count() -> None:
    model = qconv.convert(network(), schemes.lsq(3, 3), skip=())
    qconv.calibrate(model, [IMAGES])
    batches = [(IMAGES[:24], LABELS[:24]), (IMAGES[24:], LABELS[24:])]
    found = qconv.sensitivity(model, batches, max_samples=32)
    assert (found.samples, len(found.rows)) == (32, 3)
    assert found.together.loss is not None
    with torch.no_grad():
        y, y_q = network()(IMAGES[:32]), model.eval()(IMAGES[:32])
    expected = ((y_q - y).square().sum() / y.square().sum()).item()
    assert found.together.error == pytest.approx(expected, rel=1e-4)
    nothing = qconv.sensitivity(network(), [IMAGES], scheme=schemes.identity())
    assert {row.error for row in nothing.rows} == {0.0}
    assert (nothing.rows[0].sqnr, nothing.loss) == (float("inf"), None)
    of_float = qconv.sensitivity(qconv.convert(network(), schemes.identity()), [IMAGES], scheme=schemes.lsq(2, 2))
    assert of_float.costs == qconv.sensitivity(network(), [IMAGES], scheme=schemes.lsq(2, 2)).costs


class Same(nn.Conv2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def test_a_subclass_that_calls_its_parent_is_measured_as_its_parent() -> None:
    model = network()
    model[2] = Same(4, 4, 3, padding=1)
    model.load_state_dict(network().state_dict())
    found = qconv.sensitivity(model, IMAGES, scheme=schemes.lsq(2, 2), subclasses={Same: qconv.QConv2d})
    assert found.rows == qconv.sensitivity(network(), IMAGES, scheme=schemes.lsq(2, 2)).rows


@pytest.mark.drawn
def test_what_it_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = qconv.sensitivity(network(), IMAGES, scheme=schemes.bnn())
    found.to_csv(tmp_path / "s.csv")
    rows = read_csv(tmp_path / "s.csv")
    assert [row["layer"] for row in rows] == [*(row.layer for row in found.rows), "(all together)"]
    found.plot(tmp_path / "s.png")
    assert (tmp_path / "s.png").read_bytes()[:4] == b"\x89PNG"
    assert "by KL divergence, 40 samples" in str(found)
    plan = qconv.plan(network(), schemes.bnn(), costs=found.costs)
    shown = capsys.readouterr().out
    worst = found.rows[0]
    assert shown.splitlines()[-1].startswith(f"costs most: {worst.layer} ({worst.cost:.4g})")
    assert f"{found.costs['2']:.4g}" in next(line for line in shown.splitlines() if line.startswith("2 "))
    assert plan.costs == found.costs
    qconv.summary(network(), (3, 8, 8), costs=found.costs)
    assert "costs most: " in capsys.readouterr().out


def test_wrong_arguments() -> None:
    model = network()
    with pytest.raises(ValueError, match=r"is float: give scheme="):
        qconv.sensitivity(model, IMAGES)
    with pytest.raises(ValueError, match="is converted already: leave scheme out"):
        qconv.sensitivity(qconv.convert(network(), schemes.bwn()), IMAGES, scheme=schemes.bwn())
    with pytest.raises(ValueError, match=r"labels \(of shape \(3,\)\) must be one for each"):
        qconv.sensitivity(model, IMAGES, LABELS[:3], scheme=schemes.bwn())
    with pytest.raises(ValueError, match="at least one sample"):
        qconv.sensitivity(model, IMAGES[:0], scheme=schemes.bwn())
    with pytest.raises(ValueError, match=r"scheme: layer .*two_stage.* changes in the course of the training"):
        qconv.sensitivity(model, IMAGES, scheme=schemes.two_stage(schemes.lsq(4, 4)))
    with pytest.raises(TypeError, match="labels go with a tensor"):
        qconv.sensitivity(model, [IMAGES], LABELS, scheme=schemes.bwn())
