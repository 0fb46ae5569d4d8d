#!/usr/bin/env bash
# torch 2.15.0: update_bn weighs a short last batch like a full one, and ends the freezing of layers.
#
# Expected: means and variances of the whole data set; layers of batch normalization that were put in eval mode, frozen,
# keep their statistics and their mode, as update_bn puts back the mode of the network.
# Happens: the mean over batches is taken, whatever their size, so that one picture that is left counts as much as a
# batch of 64. Frozen layers get new statistics, too. At the end model.train(was_training) puts all layers in the mode
# of the outermost module, so frozen ones train from then on. Nothing is said.
# Seen, for 256 zeros in 4 batches and one sample of 100 that is left, alone: mean 20.0, of the data 0.39; a frozen
# layer's mean of 5 becomes 20.0, and its eval mode is gone.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from torch.optim.swa_utils import update_bn

data = torch.cat((torch.zeros(256, 1, 4, 4), torch.full((1, 1, 4, 4), 100.0)))
layer = torch.nn.BatchNorm2d(1)
model = torch.nn.Sequential(layer).train()
update_bn(data.split(64), model)
print("mean found", layer.running_mean.item(), "of the data", data.mean().item())
assert abs(layer.running_mean.item() - 20) < 0.01

frozen = torch.nn.BatchNorm2d(1)
model = torch.nn.Sequential(frozen, torch.nn.BatchNorm2d(1)).train()
frozen.eval().requires_grad_(False)
frozen.running_mean.fill_(5)
update_bn(data.split(64), model)
print("frozen layer: mean", frozen.running_mean.item(), "in training", frozen.training)
assert abs(frozen.running_mean.item() - 20) < 0.01
assert frozen.training
END
