#!/usr/bin/env bash
# lightning 2.6.6: the `frequency` of a scheduler with "interval": "step" counts batches of one epoch, not steps.
#
# Expected: frequency=1000 steps the scheduler after each 1000 optimizer steps, as the name and "interval" say.
# Happens: it steps after batches whose number in the epoch is a multiple, and only where the optimizer steps, too. The
# rest of an epoch is dropped; with fewer batches than `frequency`, the learning rate never changes. With
# accumulate_grad_batches=2, a frequency of 2 is each optimizer step, and 3 each third. Nothing is said.
# Seen, 6 batches an epoch, as steps of the optimizer before each step of the scheduler, in 4 epochs: frequency 4: 4,
# 10, 16, 22; 5: 5, 11, 17, 23; 7: none. Accumulating 2, frequency 2: 1, 2, 3, ... 12; 3: 3, 6, 9, 12. Accumulating 3,
# frequency 4: none.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python lightning==2.6.6 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import lightning
import torch


class Model(lightning.LightningModule):
    def __init__(self, frequency):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.frequency = frequency
        self.changes = []

    def training_step(self, batch, _):
        return (self.weight * batch).mean()

    def lr_scheduler_step(self, scheduler, _):
        self.changes.append(self.trainer.global_step)
        scheduler.step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        schedule = {"scheduler": scheduler, "interval": "step", "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


for frequency, accumulated, wanted in (
    (1, 1, list(range(1, 25))),
    (4, 1, [4, 10, 16, 22]),
    (5, 1, [5, 11, 17, 23]),
    (7, 1, []),
    (2, 2, list(range(1, 13))),
    (3, 2, [3, 6, 9, 12]),
    (4, 3, []),
):
    model = Model(frequency)
    trainer = lightning.Trainer(
        max_epochs=4,
        accelerator="cpu",
        accumulate_grad_batches=accumulated,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, torch.utils.data.DataLoader(torch.ones(6, 1)))
    print(f"frequency {frequency}, accumulated {accumulated}: scheduler steps after", *model.changes)
    assert model.changes == wanted
END
