#!/usr/bin/env bash
# datasets 5.2.0: Image() keeps the low byte of 16-bit colours, in place of the high one.
#
# Expected: 16 bits, as of pictures of one channel; or codes / 257, as white is 65535 and 255; or an error, as floats of
# three channels give one.
# Happens: the array is cast to uint8, so that numbers count modulo 256. What brightens evenly becomes stripes.
# A warning speaks of a downcast for Pillow, not of other numbers. int8 is cast so, too: -128 becomes 128.
# Seen, for the codes 0, 5000, 10000, 32768, 65535: uint16 of one channel: the same; of three channels uint8 0 136 16 0
# 255, right would be 0 19 39 128 255. For a ramp of 4096 brightnesses, the correlation with what was stored is 0.06.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python datasets==5.2.0 pillow==13.0.0 numpy==2.4.6
HF_HOME="$PWD" HF_HUB_OFFLINE=1 environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
from datasets import Dataset, Features, Image


def stored(array):
    return np.asarray(Dataset.from_dict({"image": [array]}, features=Features({"image": Image()}))[0]["image"])


grey = np.array([[0, 5000, 10000, 32768, 65535]], np.uint16)
colours = np.stack([grey] * 3, -1)
found = stored(grey)
print("one channel:", found.dtype, *found[0])
assert found.dtype == np.uint16 and (found == grey).all()
found = stored(colours)
right = np.rint(colours / 257)
print("three channels:", found.dtype, *found[0, :, 0], "right:", *right[0, :, 0].astype(int))
assert found.dtype == np.uint8 and (found == colours % 256).all() and not (found == right).all()
ramp = np.linspace(0, 65535, 4096).astype(np.uint16).reshape(64, 64, 1).repeat(3, 2)
correlation = np.corrcoef(ramp.ravel(), stored(ramp).ravel())[0, 1]
print(f"a ramp of 4096 brightnesses: correlation {correlation:.2f}")
assert abs(correlation) < 0.3
assert (stored(np.full((2, 2, 3), -128, np.int8)) == 128).all()
try:
    stored(np.zeros((2, 2, 3), np.float32))
except TypeError as error:
    print("floats:", str(error)[:60])
else:
    raise SystemExit("floats of three channels are not refused")
END
