#!/usr/bin/env bash
# Pillow 13.0.0: `rotate` with a smooth filter gives small numbers for 16-bit PNG images.
#
# Expected: an image of a single value, 1000 everywhere, keeps it inside of the rotated image.
# Happens: in mode "I;16" BILINEAR and BICUBIC treat bytes, not numbers: no number above 255 is left. NEAREST is
# right, and so is BILINEAR after a conversion to "I".
# Seen: NEAREST 1000, BILINEAR 232, BICUBIC 232, BILINEAR in mode I 1000 (in the centre).
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python pillow==13.0.0 numpy==2.4.6
environment/bin/python - <<'END'
import io

import numpy as np
from PIL import Image

file = io.BytesIO()
Image.fromarray(np.full((33, 33), 1000, np.uint16)).save(file, "PNG")
picture = Image.open(file)
print(picture.mode, picture.getextrema())
way = Image.Resampling
turned = {
    "NEAREST": picture.rotate(5, way.NEAREST),
    "BILINEAR": picture.rotate(5, way.BILINEAR),
    "BICUBIC": picture.rotate(5, way.BICUBIC),
    "BILINEAR in mode I": picture.convert("I").rotate(5, way.BILINEAR),
}
centre = {name: int(np.asarray(image)[16, 16]) for name, image in turned.items()}
print(centre)
assert centre["NEAREST"] == centre["BILINEAR in mode I"] == 1000
assert centre["BILINEAR"] < 256
assert centre["BICUBIC"] < 256
END
