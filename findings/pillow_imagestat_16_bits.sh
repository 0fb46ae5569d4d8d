#!/usr/bin/env bash
# Pillow 13.0.0: `ImageStat` of a 16-bit PNG image is not that of its pixels.
#
# Expected: mean and standard deviation of the pixels, as numpy computes them, here for normalization.
# Happens: `histogram` of mode "I;16" has 256 places and counts bytes, those of the first half of each row;
# `ImageStat.Stat` computes with it, without an error.
# Seen: numpy 32767.5, ImageStat 95.5.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python pillow==13.0.0 numpy==2.4.6
environment/bin/python - <<'END'
import io

import numpy as np
from PIL import Image, ImageStat

file = io.BytesIO()
Image.fromarray(np.arange(65_536, dtype=np.uint16).reshape(256, 256)).save(file, "PNG")
picture = Image.open(file)
pixels, stat = np.asarray(picture), ImageStat.Stat(picture)
print("mode", picture.mode, "places of the histogram", len(picture.histogram()))
print("mean by numpy", pixels.mean(), "by ImageStat", stat.mean[0])
assert pixels.mean() == 32767.5
assert stat.mean[0] == 95.5
END
