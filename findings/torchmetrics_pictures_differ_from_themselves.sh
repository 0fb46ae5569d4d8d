#!/usr/bin/env bash
# torchmetrics 1.9.0: the universal quality index of a picture and itself is 0.59 if half of it is of one colour.
#
# Expected: 1, as structural_similarity_index_measure gives it: nothing differs. The spectral angle of a picture and
# itself is 0.
# Happens: where a window has no variance, the index is 0 / 0, which becomes 0 by a small number in the denominator. So
# pictures with sky, margins or clipped white score low, and lower the less there is in them, whatever the network does.
# The spectral angle of a black pixel is 0 / 0, too: one such pixel makes the mean of the whole batch NaN. Nothing is
# said.
# Seen, for a picture and itself: noise 1.000, its half white 0.593, all white 0; SSIM 1 for all. Spectral angle 0.0001,
# with one black pixel NaN.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torchmetrics==1.9.0 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from torchmetrics.functional import image

torch.manual_seed(0)
noise = torch.rand(1, 3, 64, 64)
half = noise.clone()
half[..., 32:] = 1
white = torch.ones_like(noise)
found = {}
for name, picture in (("noise", noise), ("half white", half), ("white", white)):
    index = float(image.universal_image_quality_index(picture, picture))
    similarity = float(image.structural_similarity_index_measure(picture, picture, data_range=1.0))
    print(f"{name}: quality index {index:.4f}, structural similarity {similarity:.4f}")
    assert similarity > 0.999
    found[name] = index
assert found["noise"] > 0.999 and 0.5 < found["half white"] < 0.7 and found["white"] < 0.01
batch = torch.rand(8, 3, 64, 64)
angle = float(image.spectral_angle_mapper(batch, batch))
batch[0, :, 0, 0] = 0
black = float(image.spectral_angle_mapper(batch, batch))
print(f"spectral angle {angle:.4f}, with one black pixel {black}")
assert angle < 0.001 and black != black
END
