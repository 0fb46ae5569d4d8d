#!/usr/bin/env bash
# pytorch-ignite 0.5.5, kornia 0.9.0, torchmetrics 1.9.0 and two more: a perfect picture has a mean IoU of 0.1 or 1.
#
# Expected: mean IoU passes over classes that are in neither picture; so 1 for a perfect picture, 0 for one all wrong.
# Happens: 2 of 21 classes occur. ignite counts the 19 absent ones as 0, kornia and segmentation-models-pytorch as 1,
# torchmetrics leaves them out, scikit-learn does so unless it is given labels, and then counts 0. With the same network
# and pictures, numbers of papers and programs are not comparable, and best checkpoints differ. Only scikit-learn warns.
# Seen, for a perfect picture and one all wrong: ignite 0.095 and 0, kornia 1 and 0.905, segmentation-models-pytorch 1
# and 0.905, torchmetrics 1 and 0, scikit-learn 1 and 0, with labels 0.095 and 0.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python pytorch-ignite==0.5.5 kornia==0.9.0 torchmetrics==1.9.0 \
  segmentation-models-pytorch==0.6.0 scikit-learn==1.7.2 torch==2.15.0 torchvision==0.29.2 timm==1.0.31 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import kornia
import segmentation_models_pytorch as smp
import torch
from ignite.metrics import ConfusionMatrix, mIoU
from sklearn.metrics import jaccard_score
from torchmetrics.segmentation import MeanIoU

CLASSES = 21
true = torch.arange(2).repeat(4, 8, 4)


def ignite(guess):
    metric = mIoU(ConfusionMatrix(CLASSES))
    metric.update((torch.nn.functional.one_hot(guess, CLASSES).movedim(3, 1).float(), true))
    return metric.compute()


def of_smp(guess):
    counts = smp.metrics.get_stats(guess, true, mode="multiclass", num_classes=CLASSES)
    return smp.metrics.iou_score(*counts, reduction="macro")


def scikit_learn(guess, labels=None):
    return jaccard_score(true.ravel(), guess.ravel(), average="macro", labels=labels)


readers = {
    "ignite": (ignite, 2 / 21, 0),
    "kornia": (lambda guess: kornia.metrics.mean_iou(guess, true, CLASSES).mean(), 1, 19 / 21),
    "smp": (of_smp, 1, 19 / 21),
    "torchmetrics": (lambda guess: MeanIoU(CLASSES, input_format="index")(guess, true), 1, 0),
    "scikit-learn": (scikit_learn, 1, 0),
    "scikit-learn, labels": (lambda guess: scikit_learn(guess, range(CLASSES)), 2 / 21, 0),
}
for name, (read, perfect, wrong) in readers.items():
    found = float(read(true)), float(read(1 - true))
    print(f"{name}: perfect {found[0]:.3f}, all wrong {found[1]:.3f}")
    assert abs(found[0] - perfect) < 1e-3 and abs(found[1] - wrong) < 1e-3
END
