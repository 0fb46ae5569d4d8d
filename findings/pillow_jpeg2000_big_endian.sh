#!/usr/bin/env bash
# Pillow 13.0.0: a big-endian 16-bit TIFF image is stored as JPEG 2000 with other numbers.
#
# Expected: lossless JPEG 2000, the default, gives the stored numbers again, as it does for the same image with
# little-endian bytes.
# Happens: without an error, the numbers of an "I;16B" image come back with their bytes exchanged.
# Seen: stored [1, 2, 256, 4095]: little-endian [1, 2, 256, 4095], big-endian [256, 512, 1, 65295].
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python pillow==13.0.0 numpy==2.4.6 tifffile==2026.3.3
environment/bin/python - <<'END'
import io

import numpy as np
import tifffile
from PIL import Image

stored = np.tile(np.array([1, 2, 256, 4095], np.uint16), (16, 4))
read = {}
for order in "<>":
    tiff, jpeg = io.BytesIO(), io.BytesIO()
    tifffile.imwrite(tiff, stored, byteorder=order, photometric="minisblack")
    with Image.open(tiff) as picture:
        assert np.array_equal(np.asarray(picture), stored)
        picture.save(jpeg, "JPEG2000")
    read[order] = np.asarray(Image.open(jpeg))
    print(order, picture.mode, read[order][0, :4].tolist())
assert np.array_equal(read["<"], stored)
assert np.array_equal(read[">"], stored.byteswap())
END
