#!/usr/bin/env bash
# OpenVINO 2026.4.1: channels in another order before a convolution come in the inverse order.
#
# The guess: Gather takes channels 5, 0, 1, 2, 3, 4 for the convolution behind it, as in ONNX Runtime and numpy; so do
# x[:, [5, 0, 1, 2, 3, 4]] and such an nn.Module after convert_model.
# What happens: the order moves into the weights of the convolution, but as it is, where its inverse belongs there: the
# convolution gets channels 1, 2, 3, 4, 5, 0. Also through what lies between: ReLU, products, depthwise convolutions.
# Orders that are their own inverse, such as reversed channels and swapped halves, are right. So is Gather along
# axis -3 in place of 1, and a model whose Gather is an output, too. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
uv venv --quiet --python 3.11 venv
uv pip install --quiet --python venv/bin/python openvino==2026.4.1 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
venv/bin/python - <<'PYTHON'
import numpy as np
import onnx
import onnxruntime
import openvino
from onnx import TensorProto, helper, numpy_helper

rng = np.random.default_rng(0)
x = rng.standard_normal((2, 6, 8, 8)).astype(np.float32)
weight = rng.standard_normal((4, 6, 1, 1)).astype(np.float32)


def run(order: list[int], axis: int = 1, between: str = "Relu") -> tuple[np.ndarray, np.ndarray]:
    """Outputs of ONNX Runtime and of OpenVINO."""
    nodes = [
        helper.make_node("Gather", ["x", "order"], ["gathered"], axis=axis),
        helper.make_node(between, ["gathered"], ["between"]),
        helper.make_node("Conv", ["between", "weight"], ["y"]),
    ]
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, [2, 6, 8, 8])
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    constants = [numpy_helper.from_array(np.array(order), "order"), numpy_helper.from_array(weight, "weight")]
    graph = helper.make_graph(nodes, "graph", [image], [output], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, "model.onnx")
    right = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
    compiled = openvino.Core().compile_model("model.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return right, compiled(x)[0]


def convolved(order: np.ndarray) -> np.ndarray:
    return np.einsum("oc,nchw->nohw", weight[..., 0, 0], np.maximum(x[:, order], 0))


print("openvino", openvino.__version__)
for order in [5, 0, 1, 2, 3, 4], [0, 2, 4, 1, 3, 5]:
    right, found = run(order)
    inverse = np.argsort(order)
    off, as_inverse = abs(found - right).max(), abs(found - convolved(inverse)).max()
    print(f"channels {order}: off by {off:.1f}; from channels {inverse.tolist()}: {as_inverse:.0e}")
    assert abs(right - convolved(np.array(order))).max() < 1e-5 and as_inverse < 1e-5 < 5 < off
    right, found = run(order, axis=-3)
    print(f"channels {order} along axis -3: off by {abs(found - right).max():.0e}")
    assert abs(found - right).max() < 1e-5
for order in [5, 4, 3, 2, 1, 0], [3, 4, 5, 0, 1, 2]:
    right, found = run(order)
    print(f"channels {order}: off by {abs(found - right).max():.0e}")
    assert abs(found - right).max() < 1e-5
PYTHON
