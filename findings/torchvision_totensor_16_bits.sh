#!/usr/bin/env bash
# torchvision 0.29.2: `ToTensor` makes 16-bit PNG images negative, and the same TIFF image by its byte order.
#
# Expected: numbers from 0 to 1, as for 8 bits, or at least the stored numbers.
# Happens: mode "I;16" (PNG, little-endian TIFF) becomes int16, in which 32,768 and more are negative: white is
# -1. Of mode "I;16B" (big-endian TIFF) the lower byte is left, as float32 from 0 to 1.
# Seen: stored [0, 32767, 32768, 65535]: PNG [0, 32767, -32768, -1], big-endian TIFF [0.0, 1.0, 0.0, 1.0].
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 torchvision==0.29.2 pillow==13.0.0 numpy==2.4.6 tifffile==2026.3.3
environment/bin/python - <<'END'
import io

import numpy as np
import tifffile
import torch
from PIL import Image
from torchvision.transforms import ToTensor

stored = np.array([[0, 32767, 32768, 65535]], np.uint16)
png, tiff = io.BytesIO(), io.BytesIO()
Image.fromarray(stored).save(png, "PNG")
tifffile.imwrite(tiff, stored, byteorder=">", photometric="minisblack")
found = {name: ToTensor()(Image.open(file)) for name, file in (("PNG", png), ("big-endian TIFF", tiff))}
for name, tensor in found.items():
    print(name, tensor.dtype, tensor.flatten().tolist())
assert found["PNG"].flatten().tolist() == [0, 32767, -32768, -1]
assert found["big-endian TIFF"].dtype == torch.float32
assert found["big-endian TIFF"].flatten().tolist() == [0, 1, 0, 1]
END
