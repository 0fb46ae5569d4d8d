#!/usr/bin/env bash
# torchvision 0.29.2: `v2.ToImage` refuses 16-bit TIFF images by the order of their bytes.
#
# Expected: uint16 numbers, as for the same image with little-endian bytes; the order in the file is that of the
# program which wrote it.
# Happens: a ValueError of torch about numpy's byte order, with no word of the image.
# Seen: little-endian torch.uint16; big-endian "given numpy array has byte order different from the native byte
# order".
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
from torchvision.transforms import v2


def read(order):
    file = io.BytesIO()
    tifffile.imwrite(file, np.array([[0, 1000, 65535]], np.uint16), byteorder=order, photometric="minisblack")
    return v2.ToImage()(Image.open(file))


print("little-endian", read("<").dtype)
assert read("<").dtype == torch.uint16
try:
    read(">")
except ValueError as error:
    print("big-endian", error)
    assert "byte order different from the native" in str(error)
else:
    raise SystemExit("it is read now")
END
