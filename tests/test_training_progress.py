"""Schedules in a run: set once an epoch, saved, and the same after a restart."""

import math
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from pytorch_lightning import Callback, Trainer

import qconv
from qconv import Scheme
from qconv.data import DigitsDataModule
from qconv.models import small_cnn
from qconv.quantizers import EDE, Identity, ReSTE, Sign, Stages
from qconv.training import Checkpoints, Classifier, Progress, RandomState, load_checkpoint, make_trainer


def classifier() -> Classifier:
    torch.manual_seed(0)
    input = partial(Sign, partial(EDE, t_min=0.01), stochastic=True)
    weight = partial(Stages, [(0.0, Identity), (0.5, partial(Sign, ReSTE))])
    model = qconv.convert(small_cnn(1, 10, width=4), Scheme("scheduled", input, weight))
    return Classifier(model, partial(torch.optim.SGD, lr=0.05, momentum=0.9))


def trainer(*callbacks: Callback, epochs: int = 4) -> Trainer:
    return make_trainer(accelerator="cpu", max_epochs=epochs, callbacks=callbacks)


class Seen(Callback):
    """The schedule's values at each training step."""

    def __init__(self) -> None:
        self.values: list[tuple[int, float, float, int]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module, batch, batch_idx: int) -> None:
        layer: Any = pl_module.get_submodule("model.blocks.1.conv")
        surrogate, weight = layer.input_quantizer.surrogate, layer.weight_quantizer
        step = int(layer.input_quantizer.stream.step)
        assert step == trainer.global_step
        self.values.append(
            (trainer.current_epoch, float(surrogate.t), float(weight.quantizers[1].surrogate.o), weight.stage)
        )


def test_once_an_epoch() -> None:
    seen = Seen()
    trainer(Progress(), seen).fit(classifier(), datamodule=DigitsDataModule(batch_size=256))
    by_epoch = {epoch: values for epoch, *values in seen.values}
    assert [values[2] for values in by_epoch.values()] == [0, 0, 1, 1]
    for epoch, (t, o, _) in by_epoch.items():
        assert t == pytest.approx(0.01 * 1000 ** (epoch / 4), rel=1e-6)
        assert o == pytest.approx(
            1 if epoch < 2 else 3 - 2 * math.cos(math.pi / 2 * (epoch - 2) / 2), rel=1e-6
        )  # from its stage's start
    assert len(set(seen.values)) == 4  # nothing moves within an epoch


class StopAfter(Callback):
    def on_train_epoch_end(self, trainer: Trainer, pl_module) -> None:
        trainer.should_stop = trainer.current_epoch == 2


def test_a_resumed_run_has_the_same_weights_schedules_and_random_numbers(tmp_path: Path) -> None:
    data = partial(DigitsDataModule, batch_size=256)
    trainer(Progress(), RandomState(), Checkpoints(tmp_path / "whole")).fit(classifier(), datamodule=data())
    half = trainer(Progress(), RandomState(), Checkpoints(tmp_path / "half"), StopAfter())
    half.fit(classifier(), datamodule=data())
    last = tmp_path / "half/last.ckpt"
    assert load_checkpoint(last)["epoch"] == 2
    torch.rand(7)
    resumed = trainer(Progress(), RandomState(), Checkpoints(tmp_path / "rest"))
    resumed.fit(classifier(), datamodule=data(), ckpt_path=last, weights_only=True)
    one, other = (load_checkpoint(tmp_path / name / "last.ckpt")["state_dict"] for name in ("whole", "rest"))
    assert one.keys() == other.keys()
    assert any("surrogate.t" in name for name in one)
    for name in one:
        assert one[name].equal(other[name]), name


def test_all_go_on_with_the_first_random_state_if_the_processes_are_others() -> None:
    one = RandomState().state_dict()
    expected = torch.rand(3)
    other = RandomState().state_dict()
    for state in (one, {**one, "processes": [one, other]}):
        resumed = RandomState()
        resumed.load_state_dict(state)
        resumed.on_train_epoch_start(cast(Any, None), cast(Any, None))
        assert torch.rand(3).equal(expected)


def test_epochs_must_be_known() -> None:
    endless = make_trainer(accelerator="cpu", max_epochs=-1, callbacks=[Progress()])
    with pytest.raises(ValueError, match=r"max_epochs \(=-1\) must be given"):
        endless.fit(classifier(), datamodule=DigitsDataModule(batch_size=256))
