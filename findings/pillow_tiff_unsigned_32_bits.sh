#!/usr/bin/env bash
# Pillow 13.0.0: unsigned 32-bit numbers in a TIFF image become negative from 2**31 on.
#
# Expected: 3,000,000,000 stays so, or an error: the file says that its numbers have no sign.
# Happens: mode "I" has a sign, and the number is read as -1,294,967,296 without an error.
# Seen: stored [1, 2147483647, 3000000000], read [1, 2147483647, -1294967296].
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python pillow==13.0.0 numpy==2.4.6 tifffile==2026.3.3
environment/bin/python - <<'END'
import io

import numpy as np
import tifffile
from PIL import Image

stored = np.array([[1, 2**31 - 1, 3_000_000_000]], np.uint32)
file = io.BytesIO()
tifffile.imwrite(file, stored, photometric="minisblack")
assert np.array_equal(tifffile.imread(io.BytesIO(file.getvalue())), stored)
with Image.open(file) as picture:
    read = np.asarray(picture).tolist()[0]
    print(picture.mode, "stored", stored.tolist()[0], "read", read)
assert read == [1, 2_147_483_647, -1_294_967_296]
END
