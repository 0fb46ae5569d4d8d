#!/usr/bin/env bash
# tf2onnx 1.17.0: tf.image.resize with method "area" takes one pixel of each area, not the mean.
#
# Expected: the mean of the pixels of each area, as in TensorFlow, or an error, as for "lanczos3" or "gaussian".
# Happens: the file has a Resize with mode "nearest", which takes the upper left pixel. Nothing is said. A network that
# shrinks its pictures itself sees aliased ones.
# Seen: noise of 12 x 12 pixels of variance 1, to 6 x 6 and 4 x 3: variances of 0.20 and
# 0.05 in TensorFlow, 0.69 and 0.89 in the file.
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


x = np.random.default_rng(0).normal(size=(1, 12, 12, 1)).astype(np.float32)


def resize(method, size):
    return lambda x: tf.image.resize(x, size, method)


for size in ((6, 6), (4, 3), (3, 6)):
    wanted, found, _ = both(resize("area", size), x)
    nearest = x[:, np.arange(size[0]) * 12 // size[0]][:, :, np.arange(size[1]) * 12 // size[1]]
    print(f"12 x 12 to {size}: variance {wanted.var():.2f} in TensorFlow, {found.var():.2f} in the file")
    assert np.array_equal(found, nearest)
    means = x.reshape(size[0], 12 // size[0], size[1], 12 // size[1]).mean((1, 3))
    assert np.allclose(wanted[0, ..., 0], means, atol=1e-6) and not np.allclose(wanted, found, atol=0.1)
for method in ("bilinear", "nearest"):
    wanted, found, _ = both(resize(method, (6, 6)), x)
    assert np.allclose(wanted, found, atol=1e-5)
END
