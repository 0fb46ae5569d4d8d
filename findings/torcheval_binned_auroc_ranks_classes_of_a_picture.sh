#!/usr/bin/env bash
# torcheval 0.0.7: multiclass_binned_auroc has one number for each picture, not for each class.
#
# Expected: for each class, the probability that a picture of it has a larger score than one of another class, as
# multiclass_auroc has it, up to the bins; average=None gives as many numbers as classes. multiclass_binned_auprc does.
# Happens: hits are summed over the classes, not over the pictures. average=None gives as many numbers as pictures, and
# the default average is that of each picture's rank of its class. It looks like an AUROC, but a network that gives all
# pictures the same scores, the frequencies of the classes, is not at 0.5. The same is true of MulticlassBinnedAUROC.
# Seen, 1000 pictures of 5 classes, one of which is 80 %, multiclass_auroc and multiclass_binned_auroc with 1001
# thresholds: the frequencies of the classes for all pictures 0.500, 0.886; a good network 0.989, 0.965; each class
# apart, but the first with larger scores 1.000, 0.954; 5 and 1000 numbers without average.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torcheval==0.0.7 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
from importlib.metadata import version

import torch
from torcheval.metrics import MulticlassBinnedAUROC
from torcheval.metrics.functional import (
    multiclass_auprc,
    multiclass_auroc,
    multiclass_binned_auprc,
    multiclass_binned_auroc,
)

print("torcheval", version("torcheval"), "torch", torch.__version__)
generator = torch.Generator().manual_seed(0)
frequencies = torch.tensor([0.8, 0.05, 0.05, 0.05, 0.05])
classes = torch.multinomial(frequencies, 1000, replacement=True, generator=generator)
thresholds = torch.linspace(0, 1, 1001)
noise = torch.randn(1000, 5, generator=generator)
good = (2.5 * torch.nn.functional.one_hot(classes, 5) + noise).softmax(1)
# Each class is recognized by its own score, but those of the first are larger for all pictures.
shifted = (torch.nn.functional.one_hot(classes, 5) * 0.1 + 0.05 + 0.6 * torch.tensor([1.0, 0, 0, 0, 0])).clamp(0, 1)
for name, scores in (
    ("frequencies of the classes", frequencies.expand(1000, 5) + 0.0005),
    ("good network", good),
    ("each class apart, first score larger", shifted),
):
    exact = multiclass_auroc(scores, classes, num_classes=5, average=None)
    pairs = torch.stack(
        [
            (scores[classes == c, c][:, None] > scores[classes != c, c]).double().mean()
            + (scores[classes == c, c][:, None] == scores[classes != c, c]).double().mean() / 2
            for c in range(5)
        ]
    )
    assert (exact - pairs).abs().max() < 1e-4
    single, _ = multiclass_binned_auroc(scores, classes, num_classes=5, threshold=thresholds, average=None)
    mean, _ = multiclass_binned_auroc(scores, classes, num_classes=5, threshold=thresholds)
    metric = MulticlassBinnedAUROC(num_classes=5, threshold=thresholds)
    metric.update(scores, classes)
    print(f"{name}: multiclass_auroc {exact.mean():.3f}, binned {mean:.3f},", end=" ")
    print(f"numbers without average: {len(exact)} and {len(single)}")
    assert len(exact) == 5 and len(single) == 1000 and abs(single.mean() - mean) < 1e-5
    assert abs(metric.compute()[0] - mean) < 1e-6 and abs(mean - exact.mean()) > 0.02
    # Of each picture: the share of other classes with a smaller score than its own class.
    own = scores.gather(1, classes[:, None])
    ranks = (((scores < own).double().sum(1) + ((scores == own).double().sum(1) - 1) / 2) / 4).mean()
    print(f"    mean rank of a picture's class among the classes: {ranks:.3f}")
    assert abs(ranks - mean) < 0.02
precision = multiclass_auprc(good, classes, num_classes=5, average=None)
binned, _ = multiclass_binned_auprc(good, classes, num_classes=5, threshold=thresholds, average=None)
print("multiclass_auprc", precision.numpy().round(3), "binned", binned.numpy().round(3))
assert binned.shape == (5,) and (binned - precision).abs().max() < 0.02
END
