"""The moving average of the weights: against a loop of its own, with stages, and through a kill."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from test_train import QUICK, config, place, run_until
from torch import Tensor

from qconv.cli import train as program
from qconv.training import MovingAverage, load_checkpoint

ITS = ("callbacks=ema", "callbacks.ema.decay=0.9")


class Follow(Callback):
    """Averages the state dict of each step by hand."""

    average: dict[str, Tensor]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 1:
            Follow.average = {name: value.clone() for name, value in pl_module.state_dict().items()}
            return
        n = trainer.global_step - 1
        decay = min(0.9, (1 + n) / (10 + n))
        for name, value in pl_module.state_dict().items():
            now = Follow.average[name]
            Follow.average[name] = decay * now + (1 - decay) * value if value.is_floating_point() else value.clone()


@pytest.mark.parametrize("scheme", ["lsq", "inq", "recu"])
def test_the_average_is_validated_and_tested(scheme: str, tmp_path: Path) -> None:
    follow = "+callbacks.follow={_target_:test_weight_averaging.Follow}"
    arguments = (*QUICK, *ITS, f"scheme={scheme}")
    result = program.train(config(*arguments, follow, f"run_dir={tmp_path}"))
    last = load_checkpoint(tmp_path / "checkpoints/last.ckpt")
    for name, value in Follow.average.items():
        torch.testing.assert_close(last["state_dict"][name], value, rtol=1e-4, atol=1e-6)
    differ = [not torch.equal(last["state_dict"][k], last["current_model_state"][k]) for k in last["state_dict"]]
    assert any(differ)
    best = tmp_path / "checkpoints/best.ckpt"
    again = program.evaluate(config(*arguments, f"evaluate={best}", f"run_dir={tmp_path / 'again'}"))
    assert (again.test_accuracy, again.test_loss) == (result.test_accuracy, result.test_loss)
    assert again.val_accuracy == result.val_accuracy_best


def test_the_average_of_stages_is_in_their_last(tmp_path: Path) -> None:
    result = program.train(config(*QUICK, *ITS, "scheme=two_stage", "scheme.start=0.5", f"run_dir={tmp_path}"))
    assert result.quantized
    assert result.best_epoch >= 2


@pytest.mark.nightly
def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    arguments = (*ITS, "scheme=lsq", "callbacks.checkpoints.every_steps=4")
    program.train(config(*QUICK, *arguments, f"run_dir={tmp_path / 'whole'}"))
    run_until(signal.SIGKILL, 2, 7, tmp_path / "cut", *arguments)
    assert place(tmp_path / "cut/checkpoints/last.ckpt") == (2, 6)
    program.train(config(*QUICK, *arguments, f"run_dir={tmp_path / 'cut'}", "ckpt_path=last"))
    whole, cut = (load_checkpoint(tmp_path / name / "checkpoints/last.ckpt") for name in ("whole", "cut"))
    for state in ("state_dict", "current_model_state"):
        assert all(torch.equal(whole[state][name], cut[state][name]) for name in whole[state])
    assert (tmp_path / "cut/metrics.csv").read_text() == (tmp_path / "whole/metrics.csv").read_text()


@pytest.mark.nightly
def test_the_average_of_other_precisions(tmp_path: Path) -> None:
    double = (*QUICK, *ITS, "trainer.max_epochs=2", "trainer.precision=64-true")
    program.train(config(*double, "+callbacks.stop={_target_:test_train.StopAfter,epoch:0}", f"run_dir={tmp_path}"))
    result = program.train(config(*double, f"run_dir={tmp_path}", "ckpt_path=last"))
    whole = program.train(config(*double, f"run_dir={tmp_path / 'whole'}"))
    assert (result.test_loss, result.val_accuracy_best) == (whole.test_loss, whole.val_accuracy_best)
    with pytest.raises(ValueError, match=r"precision \(=bf16-true\) keeps weights in 16 bits.*: take bf16-mixed"):
        program.train(config(*QUICK, *ITS, "trainer.precision=bf16-true", f"run_dir={tmp_path / '16'}"))


@pytest.mark.parametrize("decay", [1.0, -0.1])
def test_a_decay_out_of_range(decay: float) -> None:
    with pytest.raises(ValueError, match=rf"decay \(={decay}\) must be at least 0 and below 1"):
        MovingAverage(decay)
