#!/usr/bin/env bash
# ema-pytorch 0.8.3: calling the averaged network runs it in training mode, with dropout and with statistics that move.
#
# Expected: an average of weights is there to be evaluated: timm's ModelEmaV2 and V3 switch it to eval. The readme calls
# ema(data) after ema.update(), without more.
# Happens: the copy keeps the mode of the network at hand, mostly training, and stays there when that one is switched to
# eval. Dropout makes each call's output another, a batch normalization scales by the batch, not by its averages, and
# those averages move with every picture that is evaluated. Nothing is said. ema.eval() helps.
# Seen: after network.eval(), the same input twice gives two outputs, and running_mean goes from 0 to 0.58 by them.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python ema-pytorch==0.8.3 timm==1.0.31 torch==2.15.0 \
  torchvision==0.29.2 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from ema_pytorch import EMA
from timm.utils import ModelEmaV2, ModelEmaV3

torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Dropout(0.5))
ema = EMA(network)
ema.update()
network.eval()
pictures = torch.full((2, 3, 8, 8), 3.0) + torch.randn(2, 3, 8, 8)
with torch.no_grad():
    first, second = ema(pictures), ema(pictures)
moved = float(ema.ema_model[0].running_mean[0])
print("training", ema.ema_model.training, "same output", torch.equal(first, second), f"running_mean {moved:.3f}")
assert ema.ema_model.training and not torch.equal(first, second) and moved > 0.5
assert float(network[0].running_mean[0]) == 0
for kind in (ModelEmaV2, ModelEmaV3):
    copy = kind(network.train()).module
    print(kind.__name__, "training", copy.training)
    assert not copy.training
ema.eval()
with torch.no_grad():
    assert torch.equal(ema(pictures), ema(pictures))
END
