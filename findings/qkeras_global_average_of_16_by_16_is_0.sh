#!/usr/bin/env bash
# qkeras 0.9.0: QGlobalAveragePooling2D with 8 bits is 0 for 16 x 16 pixels, and 15 % too large for 7 x 7.
#
# Expected: average_quantizer=quantized_bits(8, 0, 1) gives means of 8 bits, within 1/256 of the right ones.
# Happens: it quantizes 1 / (height width), the factor of the sum. With 7 bits behind the point, 1/49 is 3/128, 1/64
# right, 1/100 is 1/128, and from 256 pixels on all is 0. The mean itself is not quantized. Nothing is said.
# QAveragePooling2D does the same with its windows, which are smaller.
# Seen, of pixels that are all 0.5, for 4 x 4, 7 x 7, 8 x 8, 10 x 10, 14 x 14, 16 x 16, 17 x 17: 0.5 0.574 0.5 0.391
# 0.766 0 0; with no quantizer 0.5.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python qkeras==0.9.0 tensorflow-cpu==2.21.0 tf-keras==2.21.0 \
    pyparsing==3.2.5 numpy==1.26.4
export TF_USE_LEGACY_KERAS=1 TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import qkeras

found, plain = {}, {}
for side in (4, 7, 8, 10, 14, 16, 17):
    x = np.full((1, side, side, 1), 0.5, np.float32)
    layer = qkeras.QGlobalAveragePooling2D(average_quantizer=qkeras.quantized_bits(8, 0, 1, alpha=1.0))
    found[side] = float(layer(x))
    plain[side] = float(qkeras.QGlobalAveragePooling2D()(x))
    print(f"{side} x {side} pixels of 0.5: 8 bits {found[side]:.3f}, without quantizer {plain[side]:.3f}")
assert np.allclose(list(plain.values()), 0.5)
for side, mean in found.items():
    assert np.isclose(mean, 0.5 * side**2 * np.round(128 / side**2) / 128)
assert found[16] == found[17] == 0 and found[7] > 0.57
END
