#!/usr/bin/env bash
# torchvision 0.29.2: the usual two transforms make a 16-bit PGM image black, and the same PNG image right.
#
# Expected: `v2.ToImage`, then `v2.ToDtype(torch.float32, scale=True)` gives 1 for white.
# Happens: Pillow has the PGM image in mode "I", which is int32 for torchvision, and its largest number is 2**31 -
# 1: 65,535 becomes 0.00003. From PNG it is uint16, and 65,535 becomes 1.
# Seen: PNG 1.0, PGM 3.05e-05.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 torchvision==0.29.2 pillow==13.0.0 numpy==2.4.6
environment/bin/python - <<'END'
import io

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

read = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
white = {}
for kind in ("PNG", "PPM"):  # which is PGM for grey
    file = io.BytesIO()
    Image.fromarray(np.full((4, 4), 65535, np.uint16)).save(file, kind)
    picture = Image.open(file)
    assert picture.getextrema() == (65535, 65535)
    white[kind] = read(picture).max().item()
    print(kind, picture.mode, white[kind])
assert white["PNG"] == 1
assert white["PPM"] < 1e-4
END
