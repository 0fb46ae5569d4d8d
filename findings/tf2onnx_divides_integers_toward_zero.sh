#!/usr/bin/env bash
# tf2onnx 1.17.0: // and % of negative integers are rounded toward 0 in the file, where TensorFlow rounds down.
#
# Expected: as in TensorFlow and Python: -7 // 2 = -4, and -7 % 2 = 1, the sign of the divisor; for floats it is so.
# Integer layers divide codes and places in this way.
# Happens: the file has the Div of ONNX alone, which cuts off decimals of integers, and the remainder made of it.
# Nothing is said. Without negative numbers, all is right.
# Seen, int8, int16 and int32: -7 // 2, -5 // 3, -1 // 4, 7 // -2: -4, -2, -1, -4 in TensorFlow; -3, -1, 0, -3 in the
# file. %: 1, 1, 3, -1 in TensorFlow; -1, -2, -1, 1 in the file.
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


a = np.array([-7, -5, -1, 7, 5, 0], np.int8)
b = np.array([2, 3, 4, -2, 3, 5], np.int8)
for kind in (np.int8, np.int16, np.int32):
    for name, function, right in (
        ("a // b", lambda a, b: a // b, np.floor_divide),
        ("a % b", lambda a, b: a % b, np.mod),
        ("a - a // b * b", lambda a, b: a - a // b * b, np.mod),
    ):
        wanted, found, nodes = both(function, a.astype(kind), b.astype(kind))
        print(f"{kind.__name__}, {name}: TensorFlow {wanted.tolist()}, file {found.tolist()}, nodes {nodes}")
        assert np.array_equal(wanted, right(a, b))
        truncated = np.trunc(a / b).astype(int)
        other = truncated if name == "a // b" else a - truncated * b
        assert np.array_equal(found, other) and not np.array_equal(found, wanted)
a, b = a.astype(np.float32), b.astype(np.float32)
for function in (lambda a, b: a // b, lambda a, b: a % b):
    wanted, found, _ = both(function, a, b)
    assert np.array_equal(wanted, found)
END
