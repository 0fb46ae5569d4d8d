#!/usr/bin/env bash
# Pillow 13.0.0: TIFF images whose 0 is white are inverted with 8 bits, and not with 16.
#
# Expected: PhotometricInterpretation=WhiteIsZero is undone for both depths, as both are grey images with 0 as
# white.
# Happens: with 8 bits, Pillow gives 255 for a stored 0. With 16 bits it gives the stored 0, which is black to
# everyone after it; a data set of both depths has negatives among its images.
# Seen: 8 bits: stored 0 becomes 255; 16 bits: stored 0 becomes 0.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python pillow==13.0.0 numpy==2.4.6 tifffile==2026.3.3
environment/bin/python - <<'END'
import io

import numpy as np
import tifffile
from PIL import Image

read = {}
for kind in (np.uint8, np.uint16):
    stored = np.array([[0, 1], [2, np.iinfo(kind).max]], kind)
    file = io.BytesIO()
    tifffile.imwrite(file, stored, photometric="miniswhite")
    assert np.array_equal(tifffile.imread(io.BytesIO(file.getvalue())), stored)
    with Image.open(file) as picture:
        read[kind] = np.asarray(picture).tolist()
        print(kind.__name__, picture.mode, "stored", stored.tolist(), "read", read[kind])
assert read[np.uint8] == [[255, 254], [253, 0]]
assert read[np.uint16] == [[0, 1], [2, 65535]]
END
