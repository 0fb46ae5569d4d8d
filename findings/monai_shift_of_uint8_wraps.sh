#!/usr/bin/env bash
# MONAI 1.6.1: shifting the brightness of uint8 wraps around, and gradients of integers are all 0.
#
# Expected: numbers cut off at 0 and 255, or floats, or an error. Sobel gradients of an edge that are not 0, as from
# floats.
# Happens: ShiftIntensity and RandShiftIntensity cast the sum back: bright pixels turn dark, dark ones bright.
# SobelGradients casts its kernel, whose fractions become 0, to the type of the picture. RandHistogramShift makes a few
# pixels of int32 -2147483648, also of uint16, which becomes int32. Nothing is said. ScaleIntensityRange,
# NormalizeIntensity, GaussianSmooth and resizing of the same arrays are right.
# Seen: 100, 230, 10 by ShiftIntensity(50) 150, 24, 60; by -50 50, 180, 216; by RandShiftIntensity the same. Sobel of a
# step from 0 to 200: uint8, int16, int32 0 everywhere, float32 up to 100. RandHistogramShift of a ramp of uint16: 1
# pixel -2147483648.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python monai==1.6.1 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
from monai import transforms

pixels = np.array([[[100, 230, 10]]], np.uint8)


def ints(array):
    return np.asarray(array).astype(np.int64).reshape(-1).tolist()


def always(transform):
    return transform.set_random_state(0)


shifts = {
    "ShiftIntensity(50)": (transforms.ShiftIntensity(50), [150, 24, 60]),
    "ShiftIntensity(-50)": (transforms.ShiftIntensity(-50), [50, 180, 216]),
    "RandShiftIntensity": (always(transforms.RandShiftIntensity((50, 50), prob=1)), [150, 24, 60]),
}
for name, (transform, wanted) in shifts.items():
    found, floats = ints(transform(pixels)), ints(transform(pixels.astype(np.float32)))
    print(f"found {name}: uint8", *found, "float32", *floats)
    assert found == wanted and [number % 256 for number in floats] == wanted and floats != wanted
step = np.zeros((1, 8, 8), np.float32)
step[..., 4:] = 200
for kind in (np.uint8, np.int16, np.int32, np.float32):
    found = np.asarray(transforms.SobelGradients()(step.astype(kind)))
    print(f"found SobelGradients of {kind.__name__}: {found.min():.1f} to {found.max():.1f}")
    assert found.max() == (100 if kind == np.float32 else 0) and not (kind != np.float32 and found.any())
ramp = np.arange(4096, dtype=np.uint16).reshape(1, 64, 64) * 16
for kind, least in ((np.uint16, -(2**31)), (np.float32, 0)):
    found = np.asarray(always(transforms.RandHistogramShift(prob=1))(ramp.astype(kind)))
    print(f"found RandHistogramShift of {kind.__name__}: {found.dtype}, from {found.min():.0f}")
    assert found.min() == least
ranged = np.asarray(transforms.ScaleIntensityRange(0, 255, 0, 1)(pixels))
assert abs(ranged.reshape(-1) * 255 - pixels.reshape(-1)).max() < 1e-3
assert abs(ints(transforms.GaussianSmooth(1.0)(step.astype(np.uint8)))[0]) < 2
END
