#!/usr/bin/env bash
# Brevitas 0.13.4: TruncAvgPool2d takes `padding` and ignores it.
#
# Expected: TruncAvgPool2d(3, stride=2, padding=1) is AvgPool2d(3, stride=2, padding=1), whose subclass it is, with its
# outputs rounded to codes; or it is refused.
# Happens: its signature lacks padding; the argument goes with **kwargs to the quantizer, which ignores it. The pool has
# padding 0 and gives fewer pixels, of other places. So does an argument with a typing error. Nothing is said.
# Seen, of 7 x 7 pixels: wanted 4 x 4, found 3 x 3, which is the pool without padding up to half a step.
# With a divisor of its own, divisor_override=2 for 2 x 2, sums above the input's range end at code 255: wanted 2.0,
# found 1.0. `TruncAvgPool2d(3, a_typing_error=1)` is accepted.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python brevitas==0.13.4 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import torch
from brevitas.nn import QuantIdentity, TruncAvgPool2d
from brevitas.quant import Uint8ActPerTensorFloat

torch.manual_seed(0)
quantize = QuantIdentity(act_quant=Uint8ActPerTensorFloat, return_quant_tensor=True)
image = torch.rand(1, 1, 7, 7)
image[0, 0, 0, :2] = image[0, 0, 1, :2] = 1
for _ in range(3):
    quantize(image)
codes = quantize.eval()(image)


def averages(array, padding):
    padded = np.pad(array.astype(np.float64), padding)
    rows = range(0, len(padded) - 2, 2)
    return np.array([[padded[i : i + 3, j : j + 3].mean() for j in rows] for i in rows])


array = codes.value[0, 0].detach().numpy()
found = TruncAvgPool2d(3, stride=2, padding=1).eval()(codes)
step = found.scale.item()
pixels = found.value[0, 0].detach().numpy()
print("wanted", averages(array, 1).shape, "found", pixels.shape, "padding", TruncAvgPool2d(3, padding=1).padding)
assert averages(array, 1).shape == (4, 4)
assert pixels.shape == (3, 3)
assert abs(pixels - averages(array, 0)).max() <= 0.51 * step

TruncAvgPool2d(3, a_typing_error=1)
wanted = array[:2, :2].astype(np.float64).sum() / 2
sums = TruncAvgPool2d(2, stride=2, divisor_override=2).eval()(codes).value[0, 0, 0, 0].item()
print(f"divisor 2: wanted {wanted:.1f}, found {sums:.1f}")
assert abs(wanted - 2) < 0.05
assert abs(sums - 1) < 0.05
END
