#!/usr/bin/env bash
# optimum-quanto 0.2.7: with 8-bit floats as weights, a filter of zeros makes NaN.
#
# Filters of zeros come from pruning, and from weight decay behind a dead batch normalization.
# Expected: zeros stay zeros, as with qint8.
# Happens: qfloat8 divides a filter by its largest magnitude, here 0, and NaN has a code in 8-bit floats. The layer's
# weights and outputs are NaN there, and the next layer's are NaN in all places. Nothing is said.
# Seen, as NaN in weights of the zero filter, in those of the others, and in outputs of the next layer: qint8 no, no,
# 0 %; qfloat8 yes, no, 100 %.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python optimum-quanto==0.2.7 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from optimum.quanto import freeze, qfloat8, qint8, quantize

torch.set_num_threads(1)
for dtype, wanted in ((qint8, (False, False, 0)), (qfloat8, (True, False, 100))):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 8, 3))
    with torch.no_grad():
        model[0].weight[2] = 0
    quantize(model, weights=dtype)
    freeze(model)
    is_nan = model[0].weight.dequantize().isnan().flatten(1).any(1)
    outputs = model(torch.randn(2, 3, 8, 8)).isnan().float().mean().item()
    found = is_nan[2].item(), is_nan[[0, 1, 3]].any().item(), round(100 * outputs)
    print(f"{dtype.name}: NaN in the zero filter {found[0]}, in others {found[1]}, in {found[2]} % of outputs")
    assert found == wanted
END
