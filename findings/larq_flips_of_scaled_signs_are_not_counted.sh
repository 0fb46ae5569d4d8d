#!/usr/bin/env bash
# larq 0.14.0: the metric flip_ratio is 0 for MagnitudeAwareSign, and for most weights of DoReFa, whatever they do.
#
# Expected: the part of the quantized weights that changed since the step before; it tells whether a binary network
# still learns, and when a rate is too high. It is a metric of all quantizers: metrics=["flip_ratio"], or a scope.
# Happens: values are cast to int8 before they are compared. That is right for -1, 0 and 1. MagnitudeAwareSign gives -s
# and s for a mean size s, which is below 1 for any usual layer, so all become 0, and nothing ever flips. Of DoReFa's
# weights, those between -1 and 1 become 0. The type is an option of the metric alone, not of the quantizers. Nothing is
# said.
# Seen, as flip_ratio if the sign of each weight of a convolution changes in each step: SteSign 1.00, SteTern 1.00,
# MagnitudeAwareSign 0.00, DoReFa of weights of 1, 2, 3 and 4 bits 1.00, 0.01, 0.00, 0.00. If none changes, all are 0.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python larq==0.14.0 tensorflow==2.21.0 tf-keras==2.21.0 numpy==1.26.4
export CUDA_VISIBLE_DEVICES="" TF_USE_LEGACY_KERAS=1 TF_CPP_MIN_LOG_LEVEL=3
environment/bin/python -W ignore - >output 2>errors <<'END' || { cat output errors; exit 1; }
from importlib.metadata import version

import larq
import numpy as np
import tensorflow as tf

print("larq", version("larq"), "tensorflow", version("tensorflow"))
random = np.random.default_rng(0)
kernel = (random.normal(size=(3, 3, 32, 64)) * 0.06).astype(np.float32)  # as initializers make them
kernel = np.where(np.abs(kernel) < 0.055, np.sign(kernel) * 0.055, kernel).astype(np.float32)  # no zeros for SteTern
image = tf.zeros((1, 8, 8, 32))


def ratio(kind, options, flip):
    layer = larq.layers.QuantConv2D(
        64,
        3,
        kernel_quantizer=kind(metrics=["flip_ratio"], **options),
        kernel_constraint="weight_clip",
        use_bias=False,
    )
    layer.build(image.shape)
    codes = []
    for step in range(6):
        values = kernel * (-1) ** step if flip else kernel
        layer.kernel.assign(values)
        layer(image)
        codes.append(kind(**options)(tf.constant(values)).numpy())
    changed = np.mean([np.mean(a != b) for a, b in zip(codes, codes[1:])])
    return changed, float(layer.kernel_quantizer.flip_ratio.result())


quantizers = {
    "SteSign": (larq.quantizers.SteSign, {}),
    "SteTern": (larq.quantizers.SteTern, {}),
    "MagnitudeAwareSign": (larq.quantizers.MagnitudeAwareSign, {}),
}
for bits in (1, 2, 3, 4):
    quantizers[f"DoReFa of {bits} bits"] = (larq.quantizers.DoReFa, {"k_bit": bits, "mode": "weights"})
found = {}
for name, (kind, options) in quantizers.items():
    for flip in (True, False):
        changed, found[name, flip] = ratio(kind, options, flip)
        print(f"{name}: {changed:.2f} of the values changed in each step, flip_ratio {found[name, flip]:.2f}")
        assert changed > 0.8 if flip else changed == 0 and found[name, flip] == 0
assert found["SteSign", True] == found["SteTern", True] == found["DoReFa of 1 bits", True] == 1
assert found["MagnitudeAwareSign", True] == 0
assert found["DoReFa of 2 bits", True] < 0.5 and found["DoReFa of 4 bits", True] < 0.1
END
cat output
