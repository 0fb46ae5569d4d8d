#!/usr/bin/env bash
# TensorFlow 2.21.0: as int8, a leaky ReLU written as maximum(x, 0.1 x) or by where loses its negative side.
#
# Expected: x keeps its range, so that 0.1 x is right, and the result is within a few steps, as of tf.nn.leaky_relu.
# Happens: MAXIMUM, MINIMUM, SELECT and ADD_N work on codes of one step, and the converter gives the range of the output
# to the inputs, and to the layer before. So the convolution's output is cut off where that of the maximum ends, before
# it is multiplied by 0.1: what was -1.1 ends at -0.1. Whatever else reads x gets it cut off, too. Nothing is said. With
# 16-bit activations MAXIMUM and MINIMUM are right.
# Seen, as smallest output and largest error in steps of the output: leaky_relu -1.10, 2; maximum(x, 0.1 x) -0.10, 19;
# where(x > 0, x, 0.1 x) the same; minimum(x, 1) + 0.1 x 21 steps; add_n of x, -0.9 x, 0.1 x 108, as x - 0.9 x + 0.1 x
# 1. With 16 bits maximum has 1 of these steps.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python tensorflow-cpu==2.21.0 ai-edge-litert==2.3.0 numpy==2.4.6
environment/bin/python -W ignore - >log 2>&1 <<'END' || { cat log; exit 1; }
import numpy as np
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter

random = np.random.default_rng(0)
weight = random.normal(size=(1, 1, 4, 4)).astype(np.float32)
images = 1.5 * random.normal(size=(20, 1, 8, 10, 4)).astype(np.float32)
SETS = {
    8: tf.lite.OpsSet.TFLITE_BUILTINS_INT8,
    16: tf.lite.OpsSet.EXPERIMENTAL_TFLITE_BUILTINS_ACTIVATIONS_INT16_WEIGHTS_INT8,
}
LAYERS = {
    "leaky_relu": lambda x: tf.nn.leaky_relu(x, 0.1),
    "maximum": lambda x: tf.maximum(x, 0.1 * x),
    "where": lambda x: tf.where(x > 0, x, 0.1 * x),
    "minimum": lambda x: tf.minimum(x, 1.0) + 0.1 * x,
    "add_n": lambda x: tf.add_n([x, -0.9 * x, 0.1 * x]),
    "sum": lambda x: x - 0.9 * x + 0.1 * x,
}


def measure(name, bits):
    @tf.function(input_signature=[tf.TensorSpec(images.shape[1:], tf.float32)])
    def network(x):
        return LAYERS[name](tf.nn.conv2d(x, weight, 1, "SAME"))

    exact = np.stack([network(image).numpy() for image in images])
    converter = tf.lite.TFLiteConverter.from_concrete_functions([network.get_concrete_function()])
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: ([image] for image in images)
    converter.target_spec.supported_ops = [SETS[bits]]
    interpreter = Interpreter(model_content=converter.convert())
    interpreter.allocate_tensors()
    (x,), (y,) = interpreter.get_input_details(), interpreter.get_output_details()
    found = []
    for image in images:
        interpreter.set_tensor(x["index"], image)
        interpreter.invoke()
        found.append(interpreter.get_tensor(y["index"]))
    error = np.abs(np.stack(found) - exact).max() / (exact.max() - exact.min()) * 255
    print(f"RESULT {name}, {bits} bits: {exact.min():.2f} became {np.min(found):.2f}, largest error {error:.0f} steps")
    return np.min(found) / exact.min(), error


for name in ("leaky_relu", "sum"):
    assert measure(name, 8)[1] < 12
for name in ("maximum", "where"):
    smallest, error = measure(name, 8)
    assert smallest < 0.15 and error > 14
for name in ("minimum", "add_n"):
    assert measure(name, 8)[1] > 14
assert measure("maximum", 16)[1] < 2
END
sed -n 's/^RESULT //p' log
