#!/usr/bin/env bash
# lightning 2.6.6: StochasticWeightAveraging averages weights before epochs, never those after the last one.
#
# Expected: with swa_epoch_start=k, the weights after epochs k, k + 1, ... up to the last are averaged.
# Happens: weights are taken at the start of an epoch, from the k-th on. The first that count are those before the
# schedule of averaging began, with 1 the random ones of a new network, and the last epoch's training is thrown away.
# Where training ends early, by EarlyStopping or max_steps, the average is dropped, and the weights are plain ones.
# Checkpoints of ModelCheckpoint hold plain weights too, "last" among them. Nothing is said.
# Seen, for a weight that goes from 0 to -1, -2, ... by an epoch each: 3 epochs from 1 on give -1, the mean of 0, -1 and
# -2; 4 from 2 on -2 with "last.ckpt" -4; 10 from 2 on, stopped after the fifth, -5.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python lightning==2.6.6 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, StochasticWeightAveraging


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def training_step(self, batch, _):
        return (self.weight * batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1)


class StopAfterFive(Callback):
    def on_train_epoch_end(self, trainer, _):
        trainer.should_stop = trainer.current_epoch == 4


def train(start, *callbacks, **options):
    model = Model()
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=len(callbacks) > 0,
        callbacks=[StochasticWeightAveraging(swa_lrs=1.0, swa_epoch_start=start), *callbacks],
        **options,
    )
    trainer.fit(model, torch.utils.data.DataLoader(torch.ones(1, 1)))
    return float(model.weight)


saved = ModelCheckpoint("saved", save_last=True)
found = {
    "3 epochs from 1 on": train(1, max_epochs=3),
    "4 epochs from 2 on": train(2, saved, max_epochs=4),
    "its last checkpoint": float(torch.load("saved/last.ckpt", weights_only=False)["state_dict"]["weight"]),
    "stopped after 5 of 10": train(2, StopAfterFive(), max_epochs=10),
    "5 steps of 10 epochs": train(2, max_epochs=10, max_steps=5),
}
for name, weight in found.items():
    print(f"{name}: {weight:g}")
assert list(found.values()) == [-1, -2, -4, -5, -5]
END
