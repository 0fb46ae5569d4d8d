#!/usr/bin/env bash
# timm 1.0.31: DropBlock2d(0.1, 7) sets 9 of 10 places of a picture of 7 x 7 to zero.
#
# Expected: a tenth of the places, as drop_prob says and as torchvision's DropBlock2d has it.
# Happens: the chance of a block's centre is worked out for the centres whose block fits into the picture, of which one
# of 7 x 7 has a single one; but centres are drawn at all places, 49 here. The smaller the picture, the more is lost:
# at the end of a network, where DropBlock is used, most. Means stay at 1, since what is left is multiplied. Nothing is
# said.
# Seen, shares of zeros for 0.1 and blocks of 7, timm and torchvision: of 7 x 7 0.92 and 0.09, 14 x 14 0.20 and 0.09,
# 28 x 28 0.13 and 0.09, 56 x 56 0.11 and 0.09. With 0.3 a picture of 7 x 7 is all zeros, nearly always. In resnet50
# with drop_block_rate=0.1, blocks of 3 at 7 x 7: 0.15.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python timm==1.0.31 torch==2.15.0 torchvision==0.29.2 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import timm
import torch
import torchvision
from timm.layers import DropBlock2d

torch.manual_seed(0)


def zeros(layer, size):
    return float((layer.train()(torch.ones(256, 16, size, size)) == 0).float().mean())


for size in (7, 14, 28, 56):
    found, other = (zeros(kind(0.1, 7), size) for kind in (DropBlock2d, torchvision.ops.DropBlock2d))
    print(f"{size} x {size}: timm {found:.3f}, torchvision {other:.3f}")
    assert 0.08 < other < 0.11
    assert found > {7: 0.88, 14: 0.17, 28: 0.11, 56: 0.1}[size]
found = zeros(DropBlock2d(0.3, 7), 7)
print(f"7 x 7 with 0.3: {found:.4f}")
assert found > 0.99
network = timm.create_model("resnet50", drop_block_rate=0.1)
last = [layer for layer in network.modules() if type(layer) is DropBlock2d][-1]
found = zeros(last, 7)
print(f"last of resnet50: drop_prob {last.drop_prob:g}, block {last.block_size}, {found:.3f}")
assert last.drop_prob == 0.1 and last.gamma_scale == 1 and found > 0.13
END
