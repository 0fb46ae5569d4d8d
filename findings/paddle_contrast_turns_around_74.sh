#!/usr/bin/env bash
# PaddlePaddle 3.3.1: contrast of a NumPy picture turns around grey 74, not around the mean of the picture.
#
# Expected: factor 2 doubles the distance from the mean of the picture, as for Pillow pictures and tensors by the same
# function, and leaves a grey picture alone.
# Happens: adjust_contrast, ContrastTransform and ColorJitter of arrays use the fixed number 74. Bright pictures get
# brighter, dark ones darker: they turn white or black. Arrays are what OpenCV reads and what the cv2 backend hands on.
# Nothing is said.
# Seen, for a grey picture of 10, 74, 128, 200, factor 2: array 0, 74, 182, 255; Pillow and tensor 10, 74, 128, 200.
# Factor 0, which is grey of the mean: 74 always. Random picture of mean 200, factor 1.5: mean 243 in place of 200.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python paddlepaddle==3.3.1 opencv-python-headless==5.0.0.93 \
    numpy==2.4.6 pillow==13.0.0 setuptools==80.9.0
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import paddle
from paddle.vision.transforms import adjust_contrast, to_tensor
from PIL import Image


def adjusted(picture, factor):
    tensor = adjust_contrast(to_tensor(picture), factor).numpy().transpose(1, 2, 0) * 255
    pillow = np.asarray(adjust_contrast(Image.fromarray(picture), factor))
    assert abs(tensor - pillow).max() < 2
    return np.asarray(adjust_contrast(picture, factor)), pillow


for factor, wanted in ((2, [0, 74, 182, 255]), (0, [74, 74, 74, 74])):
    greys = [adjusted(np.full((8, 8, 3), grey, np.uint8), factor) for grey in (10, 74, 128, 200)]
    print(f"found factor {factor}: array", *(a.max() for a, _ in greys), "Pillow", *(b.max() for _, b in greys))
    assert [(a.min(), a.max()) for a, _ in greys] == [(grey, grey) for grey in wanted]
    assert [(b.min(), b.max()) for _, b in greys] == [(grey, grey) for grey in (10, 74, 128, 200)]
noise = np.random.default_rng(0).integers(160, 241, (64, 64, 3)).astype(np.uint8)
found, expected = adjusted(noise, 1.5)
print(f"found mean {found.mean():.0f}, Pillow {expected.mean():.0f}, picture {noise.mean():.0f}")
assert found.mean() > 240 and abs(expected.mean() - noise.mean()) < 2
END
