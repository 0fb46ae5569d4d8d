#!/usr/bin/env bash
# segmentation-models-pytorch 0.6.0: a picture without a single right pixel has an accuracy of 0.90, of 21 classes.
#
# Expected: accuracy of "multiclass" is the share of right pixels, as scikit-learn, torchmetrics ("micro") and most
# papers have it.
# Happens: (tp + tn) / (tp + fp + fn + tn), summed over classes: each pixel is right for all classes but two. It is no
# lower than 1 - 2 / classes, so a network that has learned nothing seems good, and the more classes there are, the
# better. Balanced accuracy and specificity are alike. reduction="macro" has a second cause: classes that are in
# neither picture count as 1 in f1, IoU and more. Nothing is said.
# Seen, of pixels that are all wrong, 2 of 21 classes occur: accuracy 0.905 in all reductions, IoU 0 in "micro", 0.905
# in "macro" and "macro-imagewise". torchmetrics' accuracy and mean IoU are 0.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python segmentation-models-pytorch==0.6.0 torchmetrics==1.9.0 \
  torch==2.15.0 torchvision==0.29.2 timm==1.0.31 numpy==2.4.6
environment/bin/python -W error::UserWarning - 2>errors <<'END' || { cat errors; exit 1; }
import segmentation_models_pytorch as smp
import torch
from torchmetrics.classification import MulticlassAccuracy
from torchmetrics.segmentation import MeanIoU

CLASSES = 21
true = torch.arange(2).repeat(4, 8, 4)
wrong = 1 - true
counts = smp.metrics.get_stats(wrong, true, mode="multiclass", num_classes=CLASSES)
for reduction in ("micro", "macro", "macro-imagewise"):
    accuracy = float(smp.metrics.accuracy(*counts, reduction=reduction))
    iou = float(smp.metrics.iou_score(*counts, reduction=reduction))
    print(f"{reduction}: accuracy {accuracy:.3f}, IoU {iou:.3f}")
    assert abs(accuracy - 19 / 21) < 1e-3
    assert iou < 1e-3 if reduction == "micro" else abs(iou - 19 / 21) < 1e-3
others = (
    float(MulticlassAccuracy(CLASSES, average="micro")(wrong, true)),
    float(MeanIoU(CLASSES, input_format="index")(wrong, true)),
)
print("torchmetrics: accuracy, mean IoU", *others)
assert others == (0.0, 0.0)
END
