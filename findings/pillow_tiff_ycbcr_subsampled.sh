#!/usr/bin/env bash
# Pillow 13.0.0: an uncompressed YCbCr TIFF file with TIFF's default subsampling is "truncated".
#
# Expected: it is read. TIFF 6.0, section 21, stores 4 Y, one Cb and one Cr for each 2x2 pixels unless a tag says
# otherwise; libtiff, which Pillow has within it, reads the same bytes.
# Happens: Pillow's own decoder expects 3 bytes for each pixel, whatever the subsampling, and says that a whole
# file is cut off.
# Seen: "image file is truncated (0 bytes not processed)"; by libtiff RGB [231, 197, 133] everywhere.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python pillow==13.0.0 numpy==2.4.6
environment/bin/python - <<'END'
import io
import struct

import numpy as np
from PIL import Image, TiffImagePlugin

width, height = 16, 8
blocks = bytes([200, 200, 200, 200, 90, 150]) * (width // 2 * height // 2)
tags = [(256, width), (257, height), (258, None), (259, 1), (262, 6), (273, 8 + 2 + 12 * 9 + 4 + 6), (277, 3), (278, height)]
tags.append((279, len(blocks)))
tiff = struct.pack("<2sHIH", b"II", 42, 8, len(tags))
for tag, value in tags:
    three = value is None  # bits of the three channels, which stand behind the tags
    tiff += struct.pack("<HHII", tag, 3 if three else 4, 3 if three else 1, 8 + 2 + 12 * 9 + 4 if three else value)
tiff += bytes(4) + struct.pack("<3H", 8, 8, 8) + blocks

try:
    Image.open(io.BytesIO(tiff)).load()
except OSError as error:
    said = str(error)
else:
    raise SystemExit("it is read now")
print("by Pillow:", said)
TiffImagePlugin.READ_LIBTIFF = True
pixels = np.asarray(Image.open(io.BytesIO(tiff)))
print("by libtiff:", pixels.shape, np.unique(pixels.reshape(-1, 3), axis=0).tolist())
assert "truncated" in said
assert np.unique(pixels.reshape(-1, 3), axis=0).tolist() == [[231, 197, 133]]
END
