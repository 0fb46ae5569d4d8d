#!/usr/bin/env bash
# Pillow 13.0.0: `convert` cuts 16-bit grey values off at 255, while 16-bit colours are scaled.
#
# Expected: PNG says that 65,535 is white in an image of 16 bits; as RGB of 8 bits a grey image of 32,768 has 128
# everywhere, as a colour image with these values in each channel has.
# Happens: the grey one becomes white. So does every 16-bit grey image in torchvision's ImageFolder, which
# converts to RGB.
# Seen: grey 255, colours 128.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python pillow==13.0.0 numpy==2.4.6
environment/bin/python - <<'END'
import io
import struct
import zlib

import numpy as np
from PIL import Image


def png(pixels, kind):
    """A PNG file of 16 bits, of which Pillow writes no colours."""
    height, width = pixels.shape[:2]
    rows = b"".join(bytes(1) + row.tobytes() for row in pixels.astype(">u2"))
    file = b"\x89PNG\r\n\x1a\n"
    head = struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)
    for name, data in ((b"IHDR", head), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        file += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return io.BytesIO(file)


grey = Image.open(png(np.full((4, 4), 32768), 0))
colours = Image.open(png(np.full((4, 4, 3), 32768), 2))
found = {picture.mode: np.unique(np.asarray(picture.convert("RGB"))).tolist() for picture in (grey, colours)}
print(found)
assert found == {"I;16": [255], "RGB": [128]}
END
