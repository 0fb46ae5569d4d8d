#!/usr/bin/env bash
# torchvision 0.29.2: `decode_jpeg` of a CMYK file gives inverted inks where Pillow does not.
#
# Expected: `ImageReadMode.UNCHANGED` gives the inks, 0 for none, as Pillow and as torchvision's own conversion to
# RGB take them.
# Happens: files with Adobe's marker hold 255 - ink, and UNCHANGED returns just that; ImageReadMode.RGB undoes it.
# Seen: white paper: Pillow [0, 0, 0, 0], UNCHANGED [255, 255, 255, 255], RGB [255, 255, 255].
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 torchvision==0.29.2 pillow==13.0.0 numpy==2.4.6
environment/bin/python - <<'END'
import io

import numpy as np
import torch
from PIL import Image
from torchvision.io import ImageReadMode, decode_jpeg

file = io.BytesIO()
Image.new("CMYK", (16, 16), (0, 0, 0, 0)).save(file, "JPEG")
data = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
pillow = np.asarray(Image.open(file))[0, 0].tolist()
unchanged = decode_jpeg(data, ImageReadMode.UNCHANGED)[:, 0, 0].tolist()
rgb = decode_jpeg(data, ImageReadMode.RGB)[:, 0, 0].tolist()
print("Pillow", pillow, "UNCHANGED", unchanged, "RGB", rgb)
assert pillow == [0, 0, 0, 0]
assert unchanged == [255, 255, 255, 255]
assert rgb == [255, 255, 255]
END
