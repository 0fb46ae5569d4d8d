#!/usr/bin/env bash
# Pillow 13.0.0: white of 12 bits is 4,095 from a TIFF file, and 65,535 from a PGM file.
#
# Expected: one of the two for both: the stored numbers, or numbers of 16 bits.
# Happens: a PGM file with maxval 4095 is scaled to 16 bits; a TIFF file with BitsPerSample=12 is opened as "I;16"
# with its numbers from 0 to 4095, and nothing in the image says so. Its tag does.
# Seen: stored [0, 2048, 4095]: PGM [0, 32776, 65535], TIFF [0, 2048, 4095].
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python pillow==13.0.0 numpy==2.4.6
environment/bin/python - <<'END'
import io
import struct

import numpy as np
from PIL import Image

stored = [0, 2048, 4095]
numbers = "".join(f"{value:012b}" for value in stored).ljust(40, "0")
data = int(numbers, 2).to_bytes(5, "big")  # a row of 36 bits, filled up to bytes
tags = {256: 3, 257: 1, 258: 12, 259: 1, 262: 1, 273: 8 + 2 + 12 * 8 + 4, 277: 1, 279: len(data)}
tiff = struct.pack("<2sHIH", b"II", 42, 8, len(tags))
tiff += b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items()) + bytes(4) + data
pgm = b"P5 3 1 4095\n" + np.array(stored, ">u2").tobytes()
read = {}
for name, file in (("PGM", pgm), ("TIFF", tiff)):
    with Image.open(io.BytesIO(file)) as picture:
        read[name] = np.asarray(picture).tolist()[0]
        print(name, picture.mode, "stored", stored, "read", read[name])
assert read["PGM"] == [0, 32776, 65535]
assert read["TIFF"] == stored
END
