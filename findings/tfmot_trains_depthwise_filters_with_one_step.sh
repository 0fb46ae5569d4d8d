#!/usr/bin/env bash
# tensorflow-model-optimization 0.8.1: quantize_model trains depthwise and transposed convolutions with one step.
#
# Expected: a step for each filter, as Conv2D has, and as TensorFlow Lite's specification of 8 bits has for all three.
# Happens: DepthwiseConv2D has steps along the last axis, which is the multiplier, mostly 1; Conv2DTranspose has one
# step for all. Filters far below the largest are 0 in training, so their layers learn without them. Nothing is said.
# Seen, for 8 filters whose sizes grow from 1e-4 to 1, as count of ranges and filters whose output is 0 in training:
# Conv2D 8, 0; DepthwiseConv2D 1, 3; Conv2DTranspose 1, 3.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python tensorflow-model-optimization==0.8.1 tensorflow==2.21.0 \
    tf-keras==2.21.0 numpy==1.26.4
export CUDA_VISIBLE_DEVICES="" TF_USE_LEGACY_KERAS=1
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import tensorflow as tf
import tf_keras
from tensorflow_model_optimization.python.core.quantization.keras import quantize

layers = tf_keras.layers
generator = np.random.default_rng(0)
images = generator.normal(size=(4, 6, 6, 8)).astype(np.float32)
for layer, axis, count in (
    (layers.Conv2D(8, 3, use_bias=False), 3, 8),
    (layers.DepthwiseConv2D(3, use_bias=False), 2, 1),
    (layers.Conv2DTranspose(8, 3, use_bias=False), 2, 1),
):
    model = tf_keras.Sequential([layers.InputLayer((6, 6, 8)), layer])
    weight = generator.uniform(-1, 1, layer.get_weights()[0].shape)
    layer.set_weights([np.moveaxis(np.moveaxis(weight, axis, -1) * np.logspace(-4, 0, 8), -1, axis)])
    trained = quantize.quantize_model(model)
    trained(images, training=True)
    inner = trained.layers[-1]
    ranges = next(each for each in inner.weights if each.name.endswith("kernel_min:0"))
    # The layer keeps its fake-quantized weight after a call.
    held = getattr(inner.layer, "depthwise_kernel" if "Depthwise" in type(layer).__name__ else "kernel")
    filters = np.moveaxis(np.asarray(held), axis, 0).reshape(8, -1)
    zeros = sum(not each.any() for each in filters)
    print(f"{type(layer).__name__}: ranges {tf.size(ranges)}, filters of zeros in training {zeros}")
    assert tf.size(ranges) == count
    assert zeros == 0 if count == 8 else zeros in (3, 4)
END
