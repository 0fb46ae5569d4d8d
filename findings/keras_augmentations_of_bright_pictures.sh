#!/usr/bin/env bash
# keras 3.15.1: for pictures from 0 to 255, brightness wraps, saturation leaves the range, solarization takes too much.
#
# Expected: what the layers' docstrings say: integers allowed and outputs clipped; the same pictures for a range from 0
# to 255 as for one from 0 to 1; with threshold_factor=(0.5, 0.5), only pixels above half of the range are inverted.
# Happens: RandomBrightness adds to uint8 in uint8, modulo 256, and clips afterwards, so that white becomes dark.
# RandomSaturation clips saturations, which end at 1, to 255: colours go far below 0. Solarization multiplies only the
# upper end of its factors by 255, so that the threshold is any number from 0.5 to 127.5. Nothing is said.
# Seen, RandomBrightness((0.2, 0.2)) of 0 100 204 230 255: as uint8 51 151 255 25 50, as float32 51 151 255 255 255.
# RandomSaturation((0.8, 0.8)) of 1000 random colours, lowest output by range: 0 to 1 0; 0 to 255 -2.9 times the range.
# Solarization(threshold_factor=(0.5, 0.5)) of the code 100, 200 times: inverted in 72 %, right would be 0 %.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python keras==3.15.1 jax==0.10.2 numpy==2.4.6
export JAX_PLATFORMS=cpu
KERAS_BACKEND=jax environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
from keras import layers

codes = np.array([0, 100, 204, 230, 255], np.uint8)
brighter = layers.RandomBrightness((0.2, 0.2), value_range=(0, 255), seed=0)
for dtype, wanted in (("uint8", [51, 151, 255, 25, 50]), ("float32", [51, 151, 255, 255, 255])):
    found = np.asarray(brighter(codes.reshape(1, 1, 5, 1).repeat(3, 3).astype(dtype), training=True))
    print("brightness of", dtype, *found[0, 0, :, 0])
    assert np.allclose(found[0, 0, :, 0], wanted)

colours = np.random.default_rng(0).uniform(size=(1, 10, 100, 3)).astype(np.float32)
for most, lowest, highest in ((1, -0.001, 0.001), (255, -10, -0.5)):
    layer = layers.RandomSaturation((0.8, 0.8), value_range=(0, most), seed=0)
    found = np.asarray(layer(colours * most, training=True)) / most
    print(f"saturation, range 0 to {most}: lowest {found.min():.1f} of the range")
    assert lowest <= found.min() <= highest

grey = np.full((200, 1, 1, 3), 100, np.float32)
layer = layers.Solarization(threshold_factor=(0.5, 0.5), value_range=(0, 255), seed=0)
found = np.asarray(layer(grey, training=True))[:, 0, 0, 0]
inverted = (found == 155).mean()
print(f"solarization of 100, threshold at half of the range: {100 * inverted:.0f} % are inverted")
assert set(found) == {100, 155} and 0.3 < inverted < 0.95
END
