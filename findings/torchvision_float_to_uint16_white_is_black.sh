#!/usr/bin/env bash
# torchvision 0.29.2: as 16-bit integers, white float32 pixels are 0, so `adjust_gamma` and `adjust_hue` make holes.
#
# Expected: `to_dtype(image, torch.uint16, scale=True)` makes 1.0 the largest number, 65535, as it does 255 of uint8, or
# refuses, as it does for int32.
# Happens: the factor, 65536 - 0.001, is 65536 in float32, and 1.0 becomes 65536, which wraps to 0. Operators that
# compute in floats and go back, do the same: white areas turn black. No message. float64 is right.
# Seen: 1.0 in uint8 255, in uint16 0, from float64 65535; of all 65536 numbers, after float32 and back 128 differ, most
# by 65535; white with gamma 1 is 0, and with hue 0 it is 0.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torchvision==0.29.2 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - <<'END'
import torch
from torchvision.transforms.v2 import functional

one = torch.ones(3, 8, 8)
white = torch.full((3, 8, 8), 65535).to(torch.uint16)
found = {
    "1.0 as uint8": functional.to_dtype(one, torch.uint8, scale=True),
    "1.0 as uint16": functional.to_dtype(one, torch.uint16, scale=True),
    "1.0 as uint16, from float64": functional.to_dtype(one.double(), torch.uint16, scale=True),
    "white, gamma 1": functional.adjust_gamma(white, 1.0),
    "white, hue 0": functional.adjust_hue(white, 0.0),
}
found = {name: image.int().unique().tolist() for name, image in found.items()}
print(found)
assert list(found.values()) == [[255], [0], [65535], [0], [0]]

every = torch.arange(65_536).to(torch.uint16).view(1, 256, 256)
floats = functional.to_dtype(every, torch.float32, scale=True)
change = functional.to_dtype(floats, torch.uint16, scale=True).int() - every.int()
print("differ:", change.ne(0).sum().item(), "by", change.unique().tolist())
assert change.unique().tolist() == [-65535, 0, 1]
assert change.ne(0).sum() == 128
END
