#!/usr/bin/env bash
# PaddlePaddle 3.3.1: saturation of a NumPy picture is a random number, and of the other order of colours.
#
# Expected: adjust_saturation(picture, 0) is grey, and 1 changes nothing, as its documentation says, and as it is for
# Pillow pictures and tensors.
# Happens: for arrays it draws a number from 1 - factor, 0 at least, to 1 + factor, and takes that as the factor; so do
# SaturationTransform and ColorJitter, after their own draw. Greys for it, and adjust_hue, take the first channel as
# blue, but to_grayscale takes it as red, as DatasetFolder does. Nothing is said.
# Seen, for a picture of red, green and blue: with factor 0 it stays as it was; with factor 1, ten calls give nine
# pictures; hue by a third of the circle makes green of red in a Pillow picture, and blue in an array.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python paddlepaddle==3.3.1 opencv-python-headless==5.0.0.93 \
    pillow==13.0.0 numpy==2.4.6 setuptools==84.2.1
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import paddle
from paddle.vision.transforms import SaturationTransform
from paddle.vision.transforms.functional import adjust_hue, adjust_saturation, to_grayscale
from PIL import Image

picture = np.array([[[200, 0, 0], [0, 200, 0], [0, 0, 200]]], np.uint8)


def all_ways(function):
    tensor = paddle.to_tensor(picture.transpose(2, 0, 1) / np.float32(255))
    return {
        "array": np.asarray(function(picture.copy())),
        "Pillow": np.asarray(function(Image.fromarray(picture))),
        "tensor": np.round(function(tensor).numpy().transpose(1, 2, 0) * 255).astype(int),
    }


np.random.seed(0)
for factor in (0.0, 1.0, 1.5):
    for way, first in all_ways(lambda x: adjust_saturation(x, factor)).items():
        others = [all_ways(lambda x: adjust_saturation(x, factor))[way] for _ in range(9)]
        count = len({y.tobytes() for y in (first, *others)})
        print(f"saturation {factor}, {way}: {count} pictures in 10 calls, first red {first[0, 0].tolist()}")
        assert count > 5 if way == "array" and factor > 0 else count == 1
        if way != "array" and factor == 0:
            assert (first.max(2) - first.min(2) <= 1).all()
        elif factor < 1 or way != "array" and factor == 1:
            assert (first == picture).all()
transform = SaturationTransform((0.0, 0.0))
assert (transform(picture) == picture).all()

for way, y in all_ways(lambda x: adjust_hue(x, 1 / 3)).items():
    print(f"hue of red by a third, {way}: {y[0, 0].tolist()}")
    assert y[0, 0].argmax() == (2 if way == "array" else 1)
greys = to_grayscale(picture).ravel()
print("greys of an array's red, green and blue:", *greys.tolist())
assert greys[0] > 2 * greys[2]
END
