#!/usr/bin/env bash
# qkeras 0.9.0: quantized_bits of one bit makes NaN with alpha="auto", and zeros with alpha="auto_po2".
#
# Expected: signs times a scale of each filter, as binary(alpha="auto") gives them and as two and more bits do; without
# alpha, one bit is the sign.
# Happens: both find the scale by dividing by the largest code of a number with a sign bit, which is 0 for one bit. So
# all weights are NaN, or with powers of two all are 0 and the layer gives its bias alone, for every input. One meets it
# in a search over the number of bits. Nothing is said.
# Seen, for 288 normal weights, as share of NaN, of zeros, and relative error: 1 bit auto 100 % 0 % nan; 1 bit auto_po2
# 0 % 100 % 1.000; 1 bit without alpha 0 % 0 % 0.622; 2 bits auto_po2 0.526; binary auto 0 % 0 % 0.593.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python qkeras==0.9.0 tensorflow-cpu==2.21.0 tf-keras==2.21.0 \
    pyparsing==3.2.5 numpy==1.26.4
export TF_USE_LEGACY_KERAS=1 TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import tensorflow as tf
from qkeras import binary, quantized_bits

weight = np.random.default_rng(0).normal(size=(3, 3, 8, 4)).astype(np.float32)
quantizers = {
    "1 bit, auto": quantized_bits(1, 0, alpha="auto"),
    "1 bit, auto_po2": quantized_bits(1, 0, alpha="auto_po2"),
    "1 bit, no alpha": quantized_bits(1, 0),
    "2 bits, auto": quantized_bits(2, 0, alpha="auto"),
    "2 bits, auto_po2": quantized_bits(2, 0, alpha="auto_po2"),
    "binary, auto": binary(alpha="auto"),
}
for name, quantizer in quantizers.items():
    found = quantizer(tf.constant(weight)).numpy()
    nan, zero = np.isnan(found).mean(), (found == 0).mean()
    error = np.linalg.norm(found - weight) / np.linalg.norm(weight)
    print(f"{name}: {nan:.0%} NaN, {zero:.0%} zeros, relative error {error:.3f}")
    assert nan == (name == "1 bit, auto")
    assert (zero == 1) == (name == "1 bit, auto_po2")
    assert nan or zero == 1 or 0.5 < error < 0.8
END
