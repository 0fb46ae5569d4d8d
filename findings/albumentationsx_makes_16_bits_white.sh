#!/usr/bin/env bash
# AlbumentationsX 2.5.1: many transforms turn a uint16 picture into floats that are cut off at 1: into white.
#
# Expected: uint16 in, uint16 out, as by HorizontalFlip, Resize, GaussianBlur and CoarseDropout, or an error, as
# InvertImg, Solarize, GaussNoise and RGBShift raise it.
# Happens: the type is taken for floats from 0 to 1. All codes above 0 become 1 or next to it, and the type float32. A
# pipeline of flips, crops and colours goes on with a white picture. RandomGamma keeps uint16 and 17 of 4096 levels.
# Nothing is said.
# Seen, for a ramp of 4096 levels from 0 to 65535, mean in shares of white, 0.5: MedianBlur 1.0; CLAHE, AutoContrast,
# Equalize, ImageCompression, Downscale more than 0.99; HueSaturationValue and Posterize more than 0.8. HorizontalFlip,
# Resize, GaussianBlur 0.5.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python albumentationsx==2.5.1 opencv-python-headless==5.0.0.93 \
    torch==2.15.0 numpy==2.4.6
export ALBUMENTATIONS_NO_TELEMETRY=1 ALBUMENTATIONS_OFFLINE=1
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import albumentations
import numpy as np

ramp = np.linspace(0, 65535, 4096).astype(np.uint16).reshape(64, 64, 1).repeat(3, axis=2)


def applied(name, *arguments):
    transform = getattr(albumentations, name)(*arguments, p=1.0)
    return albumentations.Compose([transform], seed=0)(image=ramp)["image"]


white = ["MedianBlur", "CLAHE", "Equalize", "AutoContrast", "ImageCompression", "Downscale", "Posterize"]
white += ["HueSaturationValue"]
for name in white:
    found = applied(name)
    print(f"found {name}: {found.dtype}, mean {found.mean():.3f}, {len(np.unique(found))} levels")
    assert found.dtype == np.float32 and found.max() <= 1 and found.mean() > 0.8
assert (applied("MedianBlur") == 1).all()
for name, arguments in (("HorizontalFlip", ()), ("Resize", (32, 32)), ("GaussianBlur", ())):
    found = applied(name, *arguments)
    assert found.dtype == np.uint16 and abs(found.mean() / 65535 - 0.5) < 0.01
found = applied("RandomGamma", (200, 200))
print(f"found RandomGamma: {found.dtype}, {len(np.unique(found))} levels")
assert found.dtype == np.uint16 and len(np.unique(found)) == 17
for name in ("InvertImg", "Solarize", "GaussNoise", "RGBShift"):
    try:
        applied(name)
    except (KeyError, ValueError) as error:
        print(f"of {name}: {type(error).__name__}")
    else:
        raise AssertionError(f"{name} was done")
END
