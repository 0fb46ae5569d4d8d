#!/usr/bin/env bash
# torcheval 0.0.7: with k above 1, a class is among the best k if no k others are larger: NaN and ties are all right.
#
# Expected: at most k of the classes are hits, so that a network that knows nothing has a top-k accuracy of k / classes;
# a network that has diverged to NaN is seen.
# Happens: multiclass_accuracy and MulticlassAccuracy with k > 1, hit_rate and reciprocal_rank count the logits that are
# larger than the right one. Nothing is larger than NaN, or than its equals. So all logits NaN, or all 0, as of a dead
# network, give 100 %. Quantized logits with few levels have many ties, and look better than they are. Nothing is said.
# k=1 takes the first of the largest, and is right.
# Seen, 1000 pictures of 10 classes, multiclass_accuracy with k of 1, 2 and 5 in %, and mean reciprocal_rank: random
# logits 9.6, 19.3, 48.9, 0.29; all 0, and all NaN, 10.9, 100, 100, 1.00; random logits of two levels 9.7, 48.1, 73.5,
# 0.58; rounded to steps of 1 10.9, 34.9, 65.9, 0.41. hit_rate is as multiclass_accuracy. By torch.topk at most 49.4.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torcheval==0.0.7 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
from importlib.metadata import version

import torch
from torcheval.metrics import MulticlassAccuracy
from torcheval.metrics.functional import hit_rate, multiclass_accuracy, reciprocal_rank

print("torcheval", version("torcheval"), "torch", torch.__version__)
generator = torch.Generator().manual_seed(0)
classes = torch.randint(0, 10, (1000,), generator=generator)
noise = torch.randn(1000, 10, generator=generator)


def chosen(logits, k):
    """Share of pictures whose class is one of the k that torch.topk chooses."""
    return (logits.topk(k, 1).indices == classes[:, None]).any(1).double().mean().item()


for name, logits in (
    ("random logits", noise),
    ("all 0", torch.zeros(1000, 10)),
    ("all NaN", torch.full((1000, 10), torch.nan)),
    ("random logits of two levels", (noise > 0).float()),
    ("random logits in steps of 1", noise.round()),
):
    tops = [multiclass_accuracy(logits, classes, k=k).item() for k in (1, 2, 5)]
    metric = MulticlassAccuracy(k=5)
    metric.update(logits, classes)
    hits, ranks = hit_rate(logits, classes, k=2).double().mean().item(), reciprocal_rank(logits, classes).mean().item()
    best = [chosen(logits, k) for k in (1, 2, 5)]
    print(f"{name}: top 1, 2, 5", *(f"{top:.1%}" for top in tops), end="; ")
    print(f"hit_rate {hits:.1%}, reciprocal_rank {ranks:.2f}; torch.topk", *(f"{share:.1%}" for share in best))
    assert metric.compute() == tops[2] and abs(hits - tops[1]) < 1e-6
    assert max(best) < 0.6 and tops[0] < 0.15
    if name == "random logits":
        assert max(abs(top - share) for top, share in zip(tops, best)) < 1e-6 and ranks < 0.35
    elif name.startswith("all"):
        assert tops[1:] == [1.0, 1.0] and hits == 1 and ranks == 1
    else:
        assert tops[1] - best[1] > 0.1 and tops[2] - best[2] > 0.05
END
