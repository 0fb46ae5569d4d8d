#!/usr/bin/env bash
# qtorch 0.3.0 (QPyTorch): floats with fewer than 8 bits of exponent turn NaN and infinity into their largest number.
#
# Expected: NaN stays NaN, as in float_quantize with 8 bits of exponent, fixed_point_quantize and block_quantize, so
# that a run that diverges shows it, and a loss scaler that looks for infinity finds it.
# Happens: NaN has the largest exponent, and becomes the largest number with its sign, as infinity does. Nothing is
# said. The largest exponent is one for numbers: exp=5, man=10 ends at 131008, float16 at 65504, and exp=5, man=2 at
# 114688, E5M2 at 57344.
# Seen: a layer whose filter holds NaN has an output of 480 with exp=4, man=3, a loss that is finite, and gradients that
# are; a scaled gradient of 70000, too large for float16, is finite with exp=5, man=10.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python qtorch==0.3.0 torch==2.15.0 numpy==2.4.6 ninja==1.13.0 \
    setuptools==80.9.0
export TORCH_EXTENSIONS_DIR="$PWD/extensions" PATH="$PWD/environment/bin:$PATH"  # qtorch builds its C++ when imported
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import math

import torch
from qtorch import FloatingPoint
from qtorch.quant import Quantizer, block_quantize, fixed_point_quantize, float_quantize

x = torch.tensor([math.nan, math.inf, -math.inf, 70000.0])
for exp, man, dtype in ((4, 3, None), (5, 2, torch.float8_e5m2), (5, 10, torch.float16), (8, 7, torch.bfloat16)):
    for rounding in ("nearest", "stochastic"):
        found = float_quantize(x, exp, man, rounding=rounding)
        print(f"exp={exp}, man={man}, {rounding}: {x[:3].tolist()} become {found[:3].tolist()}")
        largest = (2 - 2.0**-man) * 2.0 ** (2 ** (exp - 1))
        if exp < 8:
            assert found[:3].tolist() == [largest, largest, -largest]
            assert dtype is None or largest == 2 * torch.finfo(dtype).max
        else:
            assert found[0].isnan() and found[1:3].tolist() == [math.inf, -math.inf]
        if dtype is not None:
            assert x.to(dtype).float()[0].isnan() and x.to(dtype).float()[1] == math.inf
assert fixed_point_quantize(x, 8, 4, rounding="nearest")[0].isnan()
assert block_quantize(x, 8, rounding="nearest")[0].isnan()

torch.manual_seed(0)
layer = torch.nn.Conv2d(3, 2, 3)
with torch.no_grad():
    layer.weight[0, 0, 0, 0] = math.nan
number = FloatingPoint(exp=4, man=3)
quantize = Quantizer(number, number, forward_rounding="nearest", backward_rounding="nearest")
output = layer(torch.randn(1, 3, 5, 5))
assert output[0, 0].isnan().all()
quantized = quantize(output)
loss = torch.nn.functional.cross_entropy(quantized.mean((2, 3)), torch.tensor([1]))
loss.backward()
finite = bool(layer.bias.grad.isfinite().all())
print(f"output {float(quantized[0, 0, 0, 0]):g}, loss {float(loss):g}, gradients finite: {finite}")
assert (quantized[0, 0] == 480).all() and loss.isfinite() and finite

gradient = torch.tensor([70000.0])  # too large for float16
finite = {
    "float16": bool(gradient.half().isfinite().all()),
    "qtorch, exp=5, man=10": bool(float_quantize(gradient, 5, 10, rounding="nearest").isfinite().all()),
}
print(f"a scaled gradient of {float(gradient):g} is finite: {finite}")
assert finite == {"float16": False, "qtorch, exp=5, man=10": True}
END
