#!/usr/bin/env bash
# lightning 2.6.6: an average of weights that starts after the last step leaves a network as it was before training.
#
# Expected: EMAWeightAveraging(update_starting_at_step=100) averages from step 100 on; until then, and where training
# ends earlier, the weights are the trained ones, as timm's ModelEmaV3 copies them until it starts.
# Happens: the average is a copy from before the first step, and stays so until it is first updated. Validation runs
# with it, so each epoch before the start is scored by random weights, and early stopping, best checkpoints and plateaus
# go by that. At the end of fit it is copied over the trained weights: they are lost. Checkpoints hold them as the
# weights, too. update_starting_at_epoch=100 puts off nothing: steps still update, and from that epoch on each epoch's
# end updates once more. Nothing is said.
# Seen, for a weight that goes by -1 a step: after 8 steps with a start at 100 it is 0, both validations saw 0, and
# "last.ckpt" holds 0; with a start at 5 validations saw 0 and -7.25; with a start at epoch 100 all is as with none, at
# epoch 1 the last average is updated once more, to -7.5.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python lightning==2.6.6 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import tempfile

import lightning
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.validated = []

    def training_step(self, batch, _):
        return (self.weight * batch).mean()

    def validation_step(self, batch, _):
        self.validated.append(float(self.weight))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1)


def train(**options):
    model, folder = Model(), tempfile.mkdtemp(dir=".")
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        max_epochs=2,
        callbacks=[EMAWeightAveraging(decay=0.5, **options), ModelCheckpoint(folder, save_last=True)],
    )
    trainer.fit(model, torch.utils.data.DataLoader(torch.ones(4, 1)), torch.utils.data.DataLoader(torch.ones(1, 1)))
    saved = torch.load(f"{folder}/last.ckpt", weights_only=False)["state_dict"]
    print(options, "weight", float(model.weight), "validated", *model.validated, "saved", float(saved["weight"]))
    return float(model.weight), model.validated, float(saved["weight"])


plain = train()
assert plain[0] < -6 and plain[1][0] < -3
assert train(update_starting_at_step=100) == (0.0, [0.0, 0.0], 0.0)
assert train(update_starting_at_epoch=100) == plain
assert train(update_starting_at_epoch=1)[0] < plain[0] - 0.4
late = train(update_starting_at_step=5)
assert late[1][0] == 0 and late[0] < -5
END
