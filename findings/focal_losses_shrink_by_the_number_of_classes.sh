#!/usr/bin/env bash
# kornia 0.9.0, monai 1.6.1: the mean of a focal loss is smaller by the number of classes.
#
# Expected: with gamma=0 and without alpha the loss is the cross entropy, as in the paper and as kornia's own formula
# says, FL(p) = -alpha * (1 - p) ** gamma * log(p); reduction="mean", monai's default, is over samples or pixels.
# Happens: the loss is kept for all classes, zero for those that are not the target's, and the mean is over these zeros,
# too. A weight of the loss, or a rate of learning, that suited one number of classes is off for another, and a sum with
# a second loss hardly holds the first. Nothing is said. reduction="sum" is right.
# Seen, gamma=0, divided by cross entropy: of 2 classes 0.5, of 10 0.1, of 1000 0.001, in both.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python kornia==0.9.0 monai==1.6.1 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import monai
import torch
from kornia.losses import FocalLoss, focal_loss

torch.manual_seed(0)
for classes in (2, 10, 1000):
    logits, target = torch.randn(64, classes), torch.randint(0, classes, (64,))
    right = float(torch.nn.functional.cross_entropy(logits, target))
    found = float(focal_loss(logits, target, alpha=None, gamma=0.0, reduction="mean"))
    layer = float(FocalLoss(alpha=None, gamma=0.0, reduction="mean")(logits, target))
    total = float(focal_loss(logits, target, alpha=None, gamma=0.0, reduction="sum"))
    other = float(monai.losses.FocalLoss(gamma=0.0, use_softmax=True, to_onehot_y=True)(logits, target[:, None]))
    print(f"{classes} classes: cross entropy {right:.4f}, kornia {found:.4f}, monai {other:.4f}, sum {total:.2f}")
    assert all(abs(loss / right * classes - 1) < 1e-3 for loss in (found, layer, other))
    assert abs(total / 64 / right - 1) < 1e-3
END
