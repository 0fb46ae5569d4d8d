#!/usr/bin/env bash
# Pillow 13.0.0: resizing a 16-bit TIFF image depends on the order of its bytes.
#
# Expected: the same picture in both byte orders, resized by the same filter, has the same pixels.
# Happens: big-endian files open as "I;16B", and `resize` with BILINEAR, BICUBIC and LANCZOS gives noise for them,
# without an error. A smooth ramp of little-endian bytes stays a ramp.
# Seen: little-endian [6266, 7187, 8219, 9251], big-endian [43824, 54071, 55103, 56135].
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python pillow==13.0.0 numpy==2.4.6 tifffile==2026.3.3
environment/bin/python - <<'END'
import io

import numpy as np
import tifffile
from PIL import Image

ramp = np.linspace(0, 65535, 8 * 16).astype(np.uint16).reshape(8, 16)
resized = {}
for order in "<>":
    file = io.BytesIO()
    tifffile.imwrite(file, ramp, byteorder=order, photometric="minisblack")
    with Image.open(file) as picture:
        assert np.array_equal(np.asarray(picture), ramp)
        resized[order] = np.asarray(picture.resize((8, 4), Image.Resampling.BILINEAR)).astype(int)
    print(order, picture.mode, resized[order][0, :4].tolist())
assert (np.diff(resized["<"].flatten()) > 0).all()
assert abs(resized["<"] - resized[">"]).max() > 30_000
END
