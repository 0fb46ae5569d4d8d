#!/usr/bin/env bash
# onnx 1.23.2: the ReferenceEvaluator computes LRN, LpNormalization and ConvTranspose in groups wrong.
#
# Expected: what a converter is tested against follows the standard's formulas, as PyTorch and ONNX Runtime do.
# Happens: LRN normalizes as many channels as there are images, and leaves the others as if their squares were 0.
# LpNormalization with p=1 divides by the sum of the numbers, not of their magnitudes. A ConvTranspose in groups gives
# all groups the bias of the first. Nothing is said.
# Seen, largest errors of the evaluator: LRN of 1 image 4.7, of 8 images with 8 channels 3e-7; LpNormalization with p=1
# 13, with p=2 5e-8; ConvTranspose in 4 groups with a bias 1.6, without 4e-7. Those of ONNX Runtime are all below 1e-6.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

generator = np.random.default_rng(0)
kernel = generator.normal(size=(4, 1, 2, 2)).astype(np.float32)
bias = generator.normal(size=4).astype(np.float32)


def lrn(x):
    squares = np.stack([(x[:, max(0, c - 2) : c + 3] ** 2).sum(1) for c in range(x.shape[1])], 1)
    return x / (1 + 0.3 / 5 * squares) ** 0.75


def transposed(x):
    """Each pixel becomes 2 x 2 pixels of its channel."""
    return np.kron(x[0], np.ones((1, 2, 2))) * np.tile(kernel, (1, 1, *x.shape[2:]))[:, 0]


def errors(operator, x, exact, held=(), **options):
    """The largest errors of the evaluator and of ONNX Runtime."""
    held = dict(held)
    graph = helper.make_graph(
        [helper.make_node(operator, ["x", *held], ["y"], **options)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, exact.shape)],
        [numpy_helper.from_array(value, name) for name, value in held.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    found = ReferenceEvaluator(model).run(None, {"x": x})[0]
    right = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    result = [float(abs(y - exact).max()) for y in (found, right)]
    print(operator, x.shape, options, *held, "errors", *(f"{error:.1e}" for error in result))
    return result


one, eight = (generator.normal(size=(images, 8, 4, 4)).astype(np.float32) * 3 for images in (1, 8))
for x in (one, eight):
    error, error_ort = errors("LRN", x, lrn(x.astype(np.float64)), size=5, alpha=0.3)
    assert error_ort < 1e-5
    assert error > 0.3 if x is one else error < 1e-5
for p in (1, 2):
    exact = one / (abs(one.astype(np.float64)) ** p).sum(1, keepdims=True) ** (1 / p)
    error, error_ort = errors("LpNormalization", one, exact, axis=1, p=p)
    assert error_ort < 1e-5
    assert error > 1 if p == 1 else error < 1e-5
x = one[:, :4]
for held in ({"w": kernel, "b": bias}, {"w": kernel}):
    exact = (transposed(x.astype(np.float64)) + (bias[:, None, None] if "b" in held else 0))[None]
    error, error_ort = errors("ConvTranspose", x, exact, held, strides=[2, 2], group=4)
    assert error_ort < 1e-5
    assert error > 0.3 if "b" in held else error < 1e-5
END
