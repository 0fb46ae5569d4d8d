#!/usr/bin/env bash
# Brevitas 0.13.4: with weight quantizers that normalize filters, a filter of zeros makes NaN in output and gradients.
#
# Filters of zeros come from pruning, and from weight decay behind a dead batch normalization.
# Expected: a filter of zeros stays one, as with Int8WeightPerChannelFloat, whose scale has a smallest value.
# Happens: Int8WeightPerChannelFloatDecoupled and Int8WeightNormL2PerChannelFixedPoint divide by the norm 0. Weights,
# outputs and gradients of the filter are NaN. Nothing is raised.
# Seen, for the third of four filters, as NaN in weights, outputs, gradients: Int8WeightPerChannelFloat no, no, no; the
# other two yes, yes, yes. The other filters have none.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python brevitas==0.13.4 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from brevitas.nn import QuantConv2d
from brevitas.quant import (
    Int8WeightNormL2PerChannelFixedPoint,
    Int8WeightPerChannelFloat,
    Int8WeightPerChannelFloatDecoupled,
)

ONLY_THIRD = [False, False, True, False]
for quantizer in (Int8WeightPerChannelFloat, Int8WeightPerChannelFloatDecoupled, Int8WeightNormL2PerChannelFixedPoint):
    torch.manual_seed(0)
    layer = QuantConv2d(4, 4, 3, weight_quant=quantizer, bias=False)
    with torch.no_grad():
        layer.weight[2] = 0
    output = layer(torch.randn(2, 4, 5, 5))
    output.nan_to_num().pow(2).sum().backward()
    weights = layer.quant_weight().value.isnan().flatten(1).any(1).tolist()
    outputs = output.isnan().transpose(0, 1).flatten(1).any(1).tolist()
    gradients = layer.weight.grad.isnan().flatten(1).any(1).tolist()
    print(f"{quantizer.__name__}: NaN in the filters' weights, outputs, gradients:", weights, outputs, gradients)
    wanted = [False] * 4 if quantizer is Int8WeightPerChannelFloat else ONLY_THIRD
    assert weights == outputs == gradients == wanted
END
