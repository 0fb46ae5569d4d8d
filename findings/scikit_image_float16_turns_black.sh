#!/usr/bin/env bash
# scikit-image 0.26.0: img_as_uint of a float16 picture is all 0, and img_as_int turns white into -32768.
#
# Expected: 0.5 becomes about 32768, 1.0 the largest number, as from float32, or to within the 11 bits of float16.
# Happens: the factor 65535 is infinite in float16, and what is infinite becomes 0: the picture is black. The factor of
# img_as_int is rounded to 32768, and white wraps. Neither NumPy's warning nor scikit-image stops it; img_as_ubyte is
# right.
# Seen, for 0, 0.25, 0.5, 0.75, 1: img_as_uint of float16 0 0 0 0 0, of float32 0 16384 32768 49151 65535; img_as_int of
# float16 0 8192 16384 24576 -32768, of float32 32767 at the end; img_as_ubyte of float16 0 64 128 191 255.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python scikit-image==0.26.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
from skimage import img_as_int, img_as_ubyte, img_as_uint

levels = np.array([0, 0.25, 0.5, 0.75, 1])
wanted = {
    (img_as_uint, np.float16): [0, 0, 0, 0, 0],
    (img_as_uint, np.float32): [0, 16384, 32768, 49151, 65535],
    (img_as_int, np.float16): [0, 8192, 16384, 24576, -32768],
    (img_as_int, np.float32): [0, 8191, 16383, 24575, 32767],
    (img_as_ubyte, np.float16): [0, 64, 128, 191, 255],
}
for (function, kind), numbers in wanted.items():
    found = function(levels.astype(kind))
    print(f"found {function.__name__} of {kind.__name__}:", *found)
    assert found.tolist() == numbers
ramp = np.linspace(0, 1, 4096).astype(np.float16)
assert not img_as_uint(ramp).any() and img_as_uint(ramp.astype(np.float32)).max() == 65535
END
