#!/usr/bin/env bash
# torchmetrics 1.9.0: a network's .to(torch.bfloat16) takes the sums of its metrics along, and means go astray.
#
# Expected: metrics keep their precision when a module is converted; the library says that only set_dtype changes it.
# Happens: it keeps .half(), .bfloat16(), .float() and .double() off, but not .to(dtype), nor therefore Lightning's
# precision="bf16-true". Sums have 8 bits then, and adding 1 to 256 changes nothing, nor does 0.3 to 128. Nothing is
# said. Integers are counted rightly, so Accuracy is right, and so are means of Lightning's log.
# Seen, for 2000 batches with a loss of 0.3 and an error of 0.5: MeanMetric 0.5, MeanSquaredError 0.051 and not 0.25;
# with .to(torch.float16), 0.27 and 0.22.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 lightning==2.6.6 torchmetrics==1.9.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import logging

import lightning
import torch
import torchmetrics

BATCHES, LOSS = 2000, 0.3
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Network(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.loss = torchmetrics.MeanMetric()
        self.squares = torchmetrics.MeanSquaredError()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(2, average="micro")

    def validation_step(self, batch, index):
        zeros = torch.zeros(10, dtype=torch.float32)
        self.loss.update(torch.tensor(LOSS, dtype=torch.float32))
        self.squares.update(zeros + 0.5, zeros)
        self.accuracy.update(zeros.long(), torch.arange(10) % 2)
        if batch:
            self.log("log", LOSS)

    def on_validation_epoch_end(self):
        self.found = [float(metric.compute()) for metric in (self.loss, self.squares, self.accuracy)]


def by_torch(convert):
    network = Network()
    assert convert(network).layer.weight.dtype != torch.float32
    for index in range(BATCHES):
        network.validation_step(None, index)
    network.on_validation_epoch_end()
    return network.found


def by_lightning(precision):
    network = Network()
    trainer = lightning.Trainer(
        precision=precision,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(BATCHES, 4)))
    assert abs(trainer.validate(network, data, verbose=False)[0]["log"] - LOSS) < 0.005
    return network.found


found = {
    ".bfloat16()": by_torch(lambda network: network.bfloat16()),
    ".half()": by_torch(lambda network: network.half()),
    ".to(torch.bfloat16)": by_torch(lambda network: network.to(torch.bfloat16)),
    ".to(torch.float16)": by_torch(lambda network: network.to(torch.float16)),
    "Lightning, bf16-mixed": by_lightning("bf16-mixed"),
    "Lightning, bf16-true": by_lightning("bf16-true"),
}
for name, (loss, squares, accuracy) in found.items():
    print(f"{name}: mean loss {loss:.3g}, mean square {squares:.3g}, accuracy {accuracy}")
    assert accuracy == 0.5
    if name in (".to(torch.bfloat16)", "Lightning, bf16-true"):
        assert loss == 0.5 and 0.05 < squares < 0.052
    elif name != ".to(torch.float16)":
        assert abs(loss - LOSS) < 1e-4 and squares == 0.25
    else:
        assert 0.26 < loss < 0.28 and 0.21 < squares < 0.22
END
