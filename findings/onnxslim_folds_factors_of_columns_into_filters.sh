#!/usr/bin/env bash
# onnxslim 0.1.98: a factor for each column of an image is folded into a convolution as if it were one for each channel.
#
# Expected: simplifying keeps the numbers. Mul broadcasts from the last axis, so eight factors of shape 8 belong to
# columns, and those of shape 8 x 1 x 1 to channels.
# Happens: if there are as many factors as output channels, their shape is dropped and they scale filters and bias, of
# Conv and of ConvTranspose. The same goes for factors of rows, 8 x 1. Nothing is said; the tool's own check of the
# outputs is off unless asked for. Add, Sub and Div stay.
# Seen, largest errors of 8 x 8 x 8 numbers, by the largest: factors of columns and rows 0.4 to 0.7, of channels
# below 1e-6.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnxslim==0.1.98 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnxruntime
import onnxslim
from onnx import TensorProto, helper, numpy_helper

rng = np.random.default_rng(0)
x = rng.standard_normal((1, 8, 8, 8), np.float32)


def network(layer, operator, factors):
    constants = {"weights": rng.standard_normal((8, 8, 3, 3)), "bias": rng.standard_normal(8), "factors": factors}
    graph = helper.make_graph(
        [
            helper.make_node(layer, ["x", "weights", "bias"], ["sums"], pads=[1, 1, 1, 1]),
            helper.make_node(operator, ["sums", "factors"], ["y"]),
        ],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, x.shape)],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def run(model):
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]


for layer in ("Conv", "ConvTranspose"):
    for operator in ("Mul", "Add", "Sub", "Div"):
        for axis, shape in (("columns", (8,)), ("columns", (1, 1, 8)), ("rows", (8, 1)), ("channels", (8, 1, 1))):
            model = network(layer, operator, rng.uniform(0.5, 2, shape))
            exact = run(model)
            slim = onnxslim.slim(model)
            error = np.abs(run(slim) - exact).max() / np.abs(exact).max()
            nodes = [node.op_type for node in slim.graph.node]
            print(f"{layer}, {operator} by {axis} of shape {shape}: {' '.join(nodes)}, error {error:.1g}")
            if operator == "Mul":
                assert nodes == [layer]
                assert error < 1e-6 if axis == "channels" else 0.1 < error < 4
            else:
                assert error < 1e-6
END
