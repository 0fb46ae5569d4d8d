#!/usr/bin/env bash
# tf2onnx 1.17.0: quantize_and_dequantize of TensorFlow has 8 bits in the file, whatever num_bits is.
#
# Expected: codes of num_bits, held in int8 with a Clip, or in int4, or an error, as fake_quant gives it for 4 bits.
# Happens: the step is the range by 127 or 255, and the codes are those of int8 or uint8. Nothing is said. What was
# trained with 4 bits is measured with 8.
# Seen, signed and narrow_range, from -1 to 1: 3, 15 and 63 numbers of 2, 4 and 6 bits in TensorFlow, 256 in
# the file; with 2 bits they differ by 0.5, half of the range. With the range of the input, by 1.24.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python tf2onnx==1.17.0 tensorflow==2.21.0 onnx==1.23.2 \
    onnxruntime==1.32.0 numpy==1.26.4 setuptools==80.9.0
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import os

os.environ.update(TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")
import numpy as np
import onnx
import onnxruntime
import tensorflow as tf
import tf2onnx


def both(function, *inputs):
    traced = tf.function(function)
    wanted = traced(*map(tf.constant, inputs)).numpy()
    names = [f"x{index}" for index in range(len(inputs))]
    signature = [tf.TensorSpec(x.shape, x.dtype, name=name) for x, name in zip(inputs, names, strict=True)]
    model, _ = tf2onnx.convert.from_function(traced, signature, opset=18)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, dict(zip(names, inputs, strict=True)))[0]
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    return wanted, found, [node.op_type for node in model.graph.node]


x = np.random.default_rng(0).normal(size=5000).astype(np.float32).clip(-2.5, 2.5)


def quantizer(bits, signed, narrow, given):
    def quantize(x):
        return tf.quantization.quantize_and_dequantize_v2(
            x, -1.0 if signed else 0.0, 1.0, signed, bits, range_given=given, narrow_range=narrow
        )

    return quantize


for bits in (8, 6, 4, 2):
    for signed, narrow, given in ((True, True, True), (True, True, False), (False, False, True)):
        wanted, found, _ = both(quantizer(bits, signed, narrow, given), x)
        counts = len(np.unique(wanted)), len(np.unique(found))
        gap = float(abs(found - wanted).max())
        print(
            f"num_bits {bits}, signed {signed}, range given {given}: {counts[0]} numbers in TensorFlow, {counts[1]} in "
            f"the file, differ by {gap:.3f}"
        )
        assert counts[0] <= 2**bits and counts[1] > 200 and (gap < 0.009) == (bits == 8), (counts, gap)
END
