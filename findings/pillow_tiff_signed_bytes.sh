#!/usr/bin/env bash
# Pillow 13.0.0: signed bytes in a TIFF image are read as unsigned ones.
#
# Expected: -1 is -1, or an error, as the file says SampleFormat=2; the 16-bit signed numbers beside it are read
# right, in mode "I".
# Happens: the image is in mode "L", and -128 to -1 are 128 to 255: what is darkest becomes brightest.
# Seen: stored [-128, -1, 0, 127]: 8 bits read as [128, 255, 0, 127], 16 bits as [-128, -1, 0, 127].
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
for kind in (np.int8, np.int16):
    stored = np.array([[-128, -1, 0, 127]], kind)
    file = io.BytesIO()
    tifffile.imwrite(file, stored, photometric="minisblack")
    assert tifffile.imread(io.BytesIO(file.getvalue())).tolist() == stored.tolist()
    with Image.open(file) as picture:
        read[kind] = np.asarray(picture).tolist()[0]
        print(kind.__name__, picture.mode, "stored", stored.tolist()[0], "read", read[kind])
assert read[np.int16] == [-128, -1, 0, 127]
assert read[np.int8] == [128, 255, 0, 127]
END
