#!/usr/bin/env bash
# torch 2.15.0, Lightning 2.6.6, timm 1.0.31, ema-pytorch 0.8.3: averages of weights keep a quantizer's first zero
# point, but average its step.
#
# Expected: a moving average of a network that trains with fake quantizers follows their steps and zero points, so it
# quantizes as the network does once this has settled.
# Happens: zero points are integers. AveragedModel with use_buffers=True, Lightning's EMAWeightAveraging, for which that
# is the default, and ModelEmaV2 cut off the decimals of each average: it grows only if the newest is 1 / (1 - decay)
# larger, which 8 bits seldom are. ema-pytorch leaves out integers. Steps are averaged. Nothing is said.
# AveragedModel without buffers, and ModelEmaV3, copy zero points.
# Seen: first activations are positive, later ones also negative; 2000 steps after, the network's zero point is 127 or
# so, that of the averages 0, and all negative activations become 0.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 torchvision==0.29.2 lightning==2.6.6 timm==1.0.31 \
    ema-pytorch==0.8.3 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import logging

import lightning
import torch
from ema_pytorch import EMA
from lightning.pytorch.callbacks import EMAWeightAveraging
from timm.utils import ModelEmaV2, ModelEmaV3
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

DECAY, STEPS = 0.999, 2000
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Network(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.tensor(3.0))
        self.quantizer = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8)

    def forward(self, x):
        return self.quantizer(x + self.bias)

    def training_step(self, batch, index):
        with torch.no_grad():
            self.bias.fill_(0.0)
        return self(batch[0]).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.0)


def started():
    network = Network()
    network(torch.rand(8) * 2 - 1)
    assert network.quantizer.zero_point == 0
    return network


def settled(network):
    quantizer = network.quantizer
    quantizer.disable_observer()
    x = torch.linspace(-1, 1, 101)
    return int(quantizer.zero_point), float(quantizer.scale), float(quantizer(x).min())


torch.manual_seed(0)
batches = (torch.rand(STEPS, 8) * 2 - 1).clamp(-0.9, 0.9)
batches[:, :2] = torch.tensor([-1.0, 1.0])
network = started()
averages = {
    "AveragedModel": AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(DECAY)),
    "AveragedModel with buffers": AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(DECAY), use_buffers=True),
    "ModelEmaV2": ModelEmaV2(network, DECAY),
    "ModelEmaV3": ModelEmaV3(network, DECAY),
    "ema-pytorch": EMA(network, beta=DECAY, update_after_step=0, update_every=1),
}
for batch in batches:
    network.training_step([batch], 0)
    for average in averages.values():
        if isinstance(average, AveragedModel):
            average.update_parameters(network)
        elif isinstance(average, EMA):
            average.update()
        else:
            average.update(network)
found = {
    name: settled(average.ema_model if isinstance(average, EMA) else average.module)
    for name, average in averages.items()
}

trained = started()
callback = EMAWeightAveraging(decay=DECAY)
lightning.Trainer(
    max_epochs=1,
    accelerator="cpu",
    callbacks=[callback],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
).fit(trained, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(batches)))
found["Lightning"] = settled(trained)  # the callback puts the average into the network once training has ended
exact = settled(network)
print(f"the network: zero point {exact[0]}, step {exact[1]:.4f}, -1 becomes {exact[2]:.2f}")
assert 120 < exact[0] < 136 and exact[2] < -0.95
for name, (zero_point, step, least) in found.items():
    print(f"{name}: zero point {zero_point}, step {step:.4f}, -1 becomes {least:.2f}")
    assert abs(step / exact[1] - 1) < 0.3
    if name in ("AveragedModel", "ModelEmaV3"):
        assert zero_point == exact[0] and least < -0.95
    else:
        assert zero_point == 0 and least == 0
END
