#!/usr/bin/env bash
# aqtp 0.9.0: with 1 bit, a filter of zeros becomes 0.5 everywhere, and signs are halved.
#
# Filters of zeros come from pruning, and from weight decay behind a dead batch normalization.
# Expected: zeros have scale 0, or stay zeros, as with 2 bits and more; -s and s come back as they were.
# Happens: the scale is the largest magnitude, for zeros 1 in its place, and the two codes are -0.5 and 0.5. So the
# filter of zeros has weights far larger than all others, and adds half the sum of its inputs. Signs of size s become
# s / 2, and with 2 bits, whose largest code is 1 of 1.5, they become s / 1.5. Nothing is said.
# Seen, for filters of 0, of -0.02 and 0.02, as largest weight, by bits: 1: 0.5, 0.01; 2: 0, 0.0133; 4: 0, 0.0187;
# 8: 0, 0.0199.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python aqtp==0.9.0 jax==0.10.2 flax==0.12.8 numpy==2.4.6
JAX_PLATFORMS=cpu environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import jax.numpy as jnp
import numpy as np
from aqt.jax.v2.aqt_quantizer import quantizer_make

signs = np.where(np.arange(16) % 2 == 0, 0.02, -0.02)
weight = jnp.asarray(np.stack([np.zeros(16), signs]), jnp.float32)
for bits, wanted in ((1, [0.5, 0.01]), (2, [0, 0.0133]), (4, [0, 0.0187]), (8, [0, 0.0199])):
    quantizer = quantizer_make(bits, initialize_calibration=True)
    quantized, _ = quantizer.quant(weight, calibration_axes=(1,))
    found = np.asarray(quantized.dequant())
    print(bits, "bits: zeros become", np.unique(found[0]), "signs become", np.unique(found[1]).round(4))
    assert np.allclose(found[0], wanted[0])
    assert np.allclose(found[1], np.sign(signs) * wanted[1], atol=5e-5)
END
