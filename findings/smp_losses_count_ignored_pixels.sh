#!/usr/bin/env bash
# segmentation-models-pytorch 0.6.0: ignored pixels pull losses toward 0; "multiclass" focal loss has no softmax.
#
# Expected: ignored pixels leave the mean, as in torch's cross_entropy. FocalLoss("multiclass") with gamma=0 and without
# alpha is the cross entropy of a softmax.
# Happens: SoftCrossEntropyLoss and SoftBCEWithLogitsLoss, whose ignore_index is -100 by default, set the loss of such
# pixels to 0, and divide by all. The less of a batch is labelled, the smaller are its gradients. FocalLoss takes each
# class by itself through a sigmoid, and takes the mean of the classes: another loss, of another size. Nothing is said.
# Seen, with half of the pixels ignored: cross entropy of torch 0.693, SoftCrossEntropyLoss 0.347, with 9 of 10 0.069;
# SoftBCEWithLogitsLoss 0.347. FocalLoss, gamma=0, of zeros and 3 classes 0.693, the cross entropy 1.099.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python segmentation-models-pytorch==0.6.0 torch==2.15.0 \
  torchvision==0.29.2 timm==1.0.31 numpy==2.4.6
environment/bin/python -W error::UserWarning - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from segmentation_models_pytorch.losses import FocalLoss, SoftBCEWithLogitsLoss, SoftCrossEntropyLoss
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

soft = SoftCrossEntropyLoss(smooth_factor=0.0)
for ignored in (0, 5, 9):
    true = torch.zeros(1, 1, 10, dtype=torch.long)
    true[..., :ignored] = -100
    logits = torch.zeros(1, 2, 1, 10)
    right, found = float(cross_entropy(logits, true)), float(soft(logits, true))
    binary = float(SoftBCEWithLogitsLoss()(logits[:, :1], true[None].float()))
    print(f"{ignored} of 10 ignored: torch {right:.3f}, soft {found:.3f}, binary {binary:.3f}")
    assert all(abs(loss - right * (10 - ignored) / 10) < 1e-5 for loss in (found, binary))

torch.manual_seed(0)
true = torch.randint(0, 3, (1, 8, 8))
for logits in (torch.zeros(1, 3, 8, 8), torch.randn(1, 3, 8, 8)):
    found = float(FocalLoss("multiclass", gamma=0.0)(logits, true))
    right = float(cross_entropy(logits, true))
    hot = torch.nn.functional.one_hot(true, 3).movedim(3, 1).float()
    sigmoids = float(binary_cross_entropy_with_logits(logits, hot))
    print(f"focal loss, gamma=0: {found:.3f}, of torch by softmax {right:.3f}, by sigmoids {sigmoids:.3f}")
    assert abs(found - sigmoids) < 1e-3 and found < right - 0.3
END
