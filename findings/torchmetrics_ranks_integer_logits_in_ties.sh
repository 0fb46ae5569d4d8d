#!/usr/bin/env bash
# torchmetrics 1.9.0: areas under ROC and precision curves shrink for logits that are integers, large, or bfloat16.
#
# Expected: these metrics depend on the order of the scores alone, so integers at the end of a quantized network give
# the same as they do times their step, and as scikit-learn gives.
# Happens: sigmoid is taken first, in the type of the scores. In float32 it is 1 for all above 17, in float16 above 8,
# in bfloat16 above 6, where it also has only 128 values from 0.5 on. The best scores are equal then. Nothing is said.
# Seen, where 5 % are ones and codes of 8 bits are 30 times the logit: average precision 0.39, torchmetrics 0.13; area
# under ROC 0.88, torchmetrics 0.81. Codes times 1 / 30 are right. Logits of up to 20 are right in float32, but average
# precision is 0.34 in float16, and 0.27 in bfloat16.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 torchmetrics==1.9.0 scikit-learn==1.7.2 \
    numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from sklearn.metrics import average_precision_score, roc_auc_score
from torchmetrics.functional.classification import binary_auroc, binary_average_precision

torch.manual_seed(0)
labels = (torch.rand(20000) < 0.05).long()
floats = torch.randn(20000) + 1.6 * labels
codes = (floats * 30).round().clamp(-128, 127)
scores = {
    "codes of 8 bits": codes,
    "codes times their step": codes / 30,
    "float32 times 4": floats * 4,
    "float16 times 4": (floats * 4).half(),
    "bfloat16 times 4": (floats * 4).bfloat16(),
}
for name, values in scores.items():
    exact = roc_auc_score(labels, values.double()), average_precision_score(labels, values.double())
    found = float(binary_auroc(values, labels)), float(binary_average_precision(values, labels))
    print(f"{name}: ROC {exact[0]:.3f}, found {found[0]:.3f}; average precision {exact[1]:.3f}, found {found[1]:.3f}")
    worse = exact[0] - found[0], exact[1] - found[1]
    if name == "codes of 8 bits":
        assert worse[0] > 0.05 and worse[1] > 0.2
    elif name == "bfloat16 times 4":
        assert worse[0] > 0.004 and worse[1] > 0.1
    elif name == "float16 times 4":
        assert worse[1] > 0.03
    else:
        assert max(map(abs, worse)) < 1e-3
END
