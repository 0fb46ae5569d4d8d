#!/usr/bin/env bash
# OpenVINO 2026.4.1 (CPU): behind a ReduceSum, a quantizer that shares its zero point takes n times that zero point.
#
# Expected: the sum of the dequantized numbers, quantized, as ONNX Runtime has it, however many nodes read a constant.
# Happens: if the quantizers before and behind the sum read one constant as zero point, the sum of n pixels is off by (n
# - 1) * zero point * last step, far outside of its codes. Nothing is said. With a constant of the same value for each,
# with zero points 0, or with ReduceMean, numbers are right.
# Seen for 16 pixels, steps 0.05, zero point 121: all sums off by -90.75 = -15 * 121 * 0.05, where the codes end at 6.7;
# with the last step 0.07 by -127.05; with two constants, or zeros, 0.0; ReduceMean at most one step.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python openvino==2026.4.1 onnx==1.23.2 numpy==2.4.6
environment/bin/python - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnx
import openvino
from onnx import TensorProto, helper, numpy_helper

images = np.random.default_rng(0).normal(size=(1, 4, 4, 4)).astype(np.float32) * 0.3 + 0.05


def rounded(values, step, zero):
    return (np.clip(np.round(values / step.astype(np.float64)) + zero, 0, 255) - zero) * step.astype(np.float64)


def errors(operator, steps, zeros, is_shared):
    """The differences of OpenVINO's numbers from the dequantized sum or mean of each channel."""
    values = [np.array([2, 3]), *np.array(zeros, np.uint8), *np.array(steps, np.float32)]
    names = "axes", "zero", "last_zero", "first", "last"
    last = "zero" if is_shared else "last_zero"
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "first", "zero"], ["p"]),
        helper.make_node("DequantizeLinear", ["p", "first", "zero"], ["a"]),
        helper.make_node(operator, ["a", "axes"], ["c"]),
        helper.make_node("QuantizeLinear", ["c", "last", last], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "last", last], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, images.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 4, 1, 1))],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in zip(names, values, strict=True)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), "network.onnx")
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    found = openvino.Core().compile_model("network.onnx", "CPU", settings)(images)[0]
    inside = rounded(images, values[3], zeros[0])
    exact = inside.sum((2, 3), keepdims=True) if operator == "ReduceSum" else inside.mean((2, 3), keepdims=True)
    return (found - rounded(exact, values[4], zeros[1])).ravel()


for operator, steps, zeros, is_shared, expected in (
    ("ReduceSum", (0.05, 0.05), (121, 121), True, -15 * 121 * 0.05),
    ("ReduceSum", (0.05, 0.07), (121, 121), True, -15 * 121 * 0.07),
    ("ReduceSum", (0.05, 0.05), (121, 121), False, 0),
    ("ReduceMean", (0.05, 0.05), (121, 121), True, 0),
    ("ReduceSum", (0.05, 0.05), (0, 0), True, 0),
):
    found = errors(operator, steps, zeros, is_shared)
    print(f"found: {operator}, steps {steps}, zero points {zeros}, shared {is_shared}: errors", *(found + 0.0).round(2))
    assert abs(found - expected).max() < (0.051 if operator == "ReduceMean" else 0.001)
END
