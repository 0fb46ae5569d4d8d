#!/usr/bin/env bash
# larq 0.14.0: MagnitudeAwareSign scales depthwise and transposed convolutions with the wrong mean of their weights.
#
# Expected: what the Bi-Real paper, which its docstring names, says: signs of a filter times the mean of the filter's
# magnitudes, so that each output channel has its own factor.
# Happens: the mean is over all axes but the last. In a convolution the last axis is the filter. In QuantDepthwiseConv2D
# it is the multiplier, mostly 1, so all channels share one factor; in QuantConv2DTranspose it is the input channel.
# Small filters come out as large as the others. Nothing is said.
# Seen, for 4 filters whose mean magnitudes are 0.001, 0.01, 0.1, 1, as factors found: QuantConv2D 0.001 0.01 0.1 1;
# QuantDepthwiseConv2D 0.278 four times; QuantConv2DTranspose 0.278 four times. An output channel is up to 278 times
# too large.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python larq==0.14.0 tensorflow==2.21.0 tf-keras==2.21.0 numpy==1.26.4
export CUDA_VISIBLE_DEVICES="" TF_USE_LEGACY_KERAS=1
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import larq
import numpy as np
import tf_keras

WANTED = np.array([0.001, 0.01, 0.1, 1])
generator = np.random.default_rng(0)
NAME = "magnitude_aware_sign"
quantized, plain = larq.layers, tf_keras.layers
for layer, reference, axis, wrong in (
    (quantized.QuantConv2D(4, 3, kernel_quantizer=NAME), plain.Conv2D(4, 3), 3, False),
    (quantized.QuantDepthwiseConv2D(3, depthwise_quantizer=NAME), plain.DepthwiseConv2D(3), 2, True),
    (quantized.QuantConv2DTranspose(4, 3, kernel_quantizer=NAME), plain.Conv2DTranspose(4, 3), 2, True),
):
    image = generator.normal(size=(1, 8, 8, 4)).astype(np.float32)
    layer(image), reference(image)
    # Signs times the factor of their filter: what the quantizer should leave as they are.
    signs = generator.choice([-1.0, 1.0], layer.get_weights()[0].shape)
    weights = [np.moveaxis(np.moveaxis(signs, axis, -1) * WANTED, -1, axis), np.zeros(4)]
    layer.set_weights(weights)
    reference.set_weights(weights)
    found, right = (np.linalg.norm(each(image).numpy().reshape(-1, 4), axis=0) for each in (layer, reference))
    print(type(layer).__name__, "factors", *(found / right * WANTED).round(3), "times", *(found / right).round(2))
    assert np.allclose(found / right * WANTED, WANTED.mean() if wrong else WANTED, rtol=1e-4)
END
