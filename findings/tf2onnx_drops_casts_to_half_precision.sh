#!/usr/bin/env bash
# tf2onnx 1.17.0: numbers cast to float16 or bfloat16 and back are not rounded in the file.
#
# Expected: the two casts, so that numbers lose their digits as in TensorFlow, where this is how a network is trained or
# measured for half precision. Casts to integers and back are kept.
# Happens: its optimizer takes both casts away. Nothing is said.
# Seen: 99.9 is 99.875 by float16 and 100 by bfloat16, 70000 infinite by float16; in the file 99.9 and 70000.
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


x = np.array([0.1, 1.00390625, 99.9, 70000, 1e-8, -3.14159], np.float32)
for kind in (tf.float16, tf.bfloat16):
    for name, function in (
        ("there and back", lambda x: tf.cast(tf.cast(x, kind), tf.float32)),  # noqa: B023
        ("and times 2", lambda x: 2 * tf.cast(tf.cast(x, kind), tf.float32)),  # noqa: B023
    ):
        wanted, found, nodes = both(function, x)
        factor = 2 if "2" in name else 1
        print(f"{kind.name}, {name}: TensorFlow {wanted[1:4]}, file {found[1:4]}, nodes {nodes}")
        assert np.array_equal(found, factor * x) and nodes.count("Cast") < 2
        assert abs(wanted / factor - x)[2] > 0.02
        assert np.isinf(wanted[3]) == (kind == tf.float16)
for kind in (tf.int8, tf.uint8, tf.int32):
    wanted, found, nodes = both(lambda x: tf.cast(tf.cast(x, kind), tf.float32), x[:3])  # noqa: B023
    assert np.array_equal(wanted, found) and nodes.count("Cast") == 2
END
