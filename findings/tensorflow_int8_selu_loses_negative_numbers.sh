#!/usr/bin/env bash
# TensorFlow 2.21.0: as int8, SELU, Softplus and Mish lose most of their negative side, and at times all of it.
#
# Expected: outputs within a code of the function, as ELU and SiLU have them, which are computed by one table.
# Happens: the converter writes SELU as 1.7581 (exp(x) - 1) for all inputs, of which the positive ones are not used. The
# 256 codes of exp(x) reach to the exponential of the largest input, 1,097 for 7, so its numbers from 0 to 1 fall in one
# code. Softplus and Mish are written by log(exp(x) + 1). Nothing is said.
# Seen, inputs from -4 to 3, 5, 7, as largest error of outputs in codes, and number of codes of negative inputs: SELU
# 9.3 (8), 44.9 (2), 48.5 (1); Softplus 3.5 (13), 15.6 (3), 41.0 (1); Mish 9.8 (24), 11.5 (15), 20.7 (1); ELU 0.5 (56),
# 0.7 (39), 0.5 (30); SiLU 0.9 (23), 1.0 (14), 1.0 (10). With 7, all negative inputs of SELU become 0.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python tensorflow==2.21.0 ai-edge-litert==2.3.0 numpy==2.4.6
CUDA_VISIBLE_DEVICES= environment/bin/python -W ignore - 2>errors <<'END' || { tail errors; exit 1; }
import numpy as np
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter


def quantized(function, numbers):
    """The function's outputs as int8 codes, its step and zero point, and the inputs as the codes have them."""
    traced = tf.function(function, input_signature=[tf.TensorSpec(numbers.shape, tf.float32)], autograph=False)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([traced.get_concrete_function()])
    converter.optimizations = [tf.lite.Optimize.DEFAULT]
    converter.representative_dataset = lambda: [[numbers]]
    converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
    converter.inference_input_type = converter.inference_output_type = tf.int8
    interpreter = Interpreter(model_content=converter.convert(), num_threads=1)
    interpreter.allocate_tensors()
    (given,), (result,) = interpreter.get_input_details(), interpreter.get_output_details()
    step, zero = given["quantization"]
    codes = np.clip(np.rint(numbers / step) + zero, -128, 127).astype(np.int8)
    interpreter.set_tensor(given["index"], codes)
    interpreter.invoke()
    return interpreter.get_tensor(result["index"]).astype(float), *result["quantization"], (codes - float(zero)) * step


def mish(x):
    return x * np.tanh(np.log1p(np.exp(x)))


def selu(x):
    return 1.0507009873554805 * np.where(x > 0, x, 1.6732632423543772 * np.expm1(x))


FUNCTIONS = {
    "SELU": (tf.nn.selu, selu, (9.3, 44.9, 48.5), (8, 2, 1)),
    "Softplus": (tf.nn.softplus, lambda x: np.log1p(np.exp(x)), (3.5, 15.6, 41.0), (13, 3, 1)),
    "Mish": (tf.keras.activations.mish, mish, (9.8, 11.5, 20.7), (24, 15, 1)),
    "ELU": (tf.nn.elu, lambda x: np.where(x > 0, x, np.expm1(x)), (0.5, 0.7, 0.5), (56, 39, 30)),
    "SiLU": (tf.nn.silu, lambda x: x / (1 + np.exp(-x)), (0.9, 1.0, 1.0), (23, 14, 10)),
}
for name, (function, exact, *seen) in FUNCTIONS.items():
    for end, error, count in zip((3, 5, 7), *seen, strict=True):
        codes, step, zero, x = quantized(function, np.linspace(-4, end, 256, dtype=np.float32)[None])
        errors, negative = abs(codes - zero - exact(x) / step), np.unique(codes[x < 0])
        print(f"{name} up to {end}: off by up to {errors.max():.1f} codes; {len(negative)} codes of negative inputs")
        assert abs(errors.max() - error) < 0.06 and len(negative) == count
        if (name, end) == ("SELU", 7):
            assert negative == zero
END
