#!/usr/bin/env bash
# PaddlePaddle 3.3.1: affine of a NumPy picture turns, scales and shears around its upper left corner.
#
# Expected: the centre stays in place, as for Pillow pictures and tensors by the same function, as its documentation
# says, and as for rotate of arrays.
# Happens: for arrays, which are what OpenCV reads and what the cv2 backend hands on, the translation asked for replaces
# the shift that keeps the centre in place, and `center` is without effect. A shear along x is one along y. So
# RandomAffine moves much of a picture out of sight, and places of objects do not fit. Nothing is said.
# Seen: a spot in the middle of 65 x 65 pixels stays there for Pillow, tensors and rotate. In an array, turned by 180
# degrees it is gone, scaled by 1.5 it moves to 48, 48, sheared by 45 degrees from 32, 32 to 31, 63. A grey picture
# turned by 90 degrees becomes black, all but one of its lines.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python paddlepaddle==3.3.1 opencv-python-headless==5.0.0.93 \
    pillow==13.0.0 numpy==2.4.6 setuptools==84.2.1
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import paddle
from paddle.vision.transforms import functional
from PIL import Image

SIZE, MIDDLE = 65, 32
spot = np.zeros((SIZE, SIZE, 3), np.uint8)
spot[MIDDLE - 2 : MIDDLE + 3, MIDDLE - 2 : MIDDLE + 3] = 200
above = np.roll(spot, -10, 0)
grey = np.full((SIZE, SIZE, 3), 100, np.uint8)


def centre(picture):
    """Where the spot's mean is, as column and row, or None."""
    weights = picture[..., 0].astype(float)
    if not weights.any():
        return None
    places = np.arange(SIZE)
    return [round(float((weights.sum(axis) * places).sum() / weights.sum())) for axis in (0, 1)]


def all_ways(function, picture):
    tensor = paddle.to_tensor(picture.transpose(2, 0, 1).astype(np.float32))
    return {
        "array": np.asarray(function(picture)),
        "Pillow": np.asarray(function(Image.fromarray(picture))),
        "tensor": function(tensor).numpy().transpose(1, 2, 0),
    }


OPTIONS = {
    "turned by 180": (180, (0, 0), 1.0, (0, 0)),
    "scaled by 1.5": (0, (0, 0), 1.5, (0, 0)),
    "sheared by 45": (0, (0, 0), 1.0, (45, 0)),
    "shifted by 5, -3": (0, (5, -3), 1.0, (0, 0)),
}
EXPECTED = {"turned by 180": None, "scaled by 1.5": [48, 48], "sheared by 45": [31, 63], "shifted by 5, -3": [37, 29]}
for name, options in OPTIONS.items():
    found = {way: centre(y) for way, y in all_ways(lambda x: functional.affine(x, *options), spot).items()}
    print(f"middle {name}:", ", ".join(f"{way} {place}" for way, place in found.items()))
    assert found["array"] == EXPECTED[name]
    assert found["Pillow"] == found["tensor"] == ([37, 29] if "shifted" in name else [32, 32])
assert functional.affine(spot, *OPTIONS["turned by 180"], center=(MIDDLE, MIDDLE)).max() == 0
for way, y in all_ways(lambda x: functional.affine(x, *OPTIONS["sheared by 45"]), above).items():
    print(f"10 above the middle, sheared by 45, {way}: {centre(y)}")
    assert centre(y)[1] > 50 if way == "array" else centre(y)[1] == 22
for way, y in all_ways(lambda x: functional.rotate(x, 180), spot).items():
    print(f"middle, rotate by 180, {way}: {centre(y)}")
    assert max(abs(place - MIDDLE) for place in centre(y)) <= 1
for way, y in all_ways(lambda x: functional.affine(x, 90, (0, 0), 1.0, (0, 0)), grey).items():
    print(f"grey turned by 90, {way}: {(y > 0).mean():.0%} is left")
    assert (y > 0).mean() < 0.02 if way == "array" else y.min() > 0
END
