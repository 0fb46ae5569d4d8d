#!/usr/bin/env bash
# ONNX Runtime 1.32.0: a scale of shape (1,) keeps an Add between quantizers in floats; a scalar makes it QLinearAdd.
#
# Expected: a scale and a zero point of one element mean the same as scalars, since both give one number for the whole
# tensor, and ONNX Runtime runs both; so both files become the same integer operators.
# Happens: with shape (1,) Conv becomes QLinearConv as it does with scalars, but Add between DequantizeLinear and
# QuantizeLinear stays an Add of floats, with three more operators around it. Outputs are equal; it is only slower.
# Seen: "scalars: QLinearConv 1, QLinearAdd 1, Add 0" and "shape (1,): QLinearConv 1, QLinearAdd 0, Add 1".
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python - <<'END'
from collections import Counter

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

image = np.random.default_rng(0).uniform(0, 3, (1, 4, 8, 8)).astype(np.float32)
weight = np.random.default_rng(1).integers(-3, 4, (4, 4, 1, 1)).astype(np.int8)


def run(shape):
    constants = {
        "step": np.full(shape, 0.1, np.float32),
        "zero": np.full(shape, 3, np.uint8),
        "codes": weight,
        "weight_steps": np.full(4, 0.5, np.float32),
        "weight_zeros": np.zeros(4, np.int8),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["image", "step", "zero"], ["a"]),
        helper.make_node("DequantizeLinear", ["a", "step", "zero"], ["input"]),
        helper.make_node("DequantizeLinear", ["codes", "weight_steps", "weight_zeros"], ["weight"], axis=0),
        helper.make_node("Conv", ["input", "weight"], ["b"]),
        helper.make_node("QuantizeLinear", ["b", "step", "zero"], ["c"]),
        helper.make_node("DequantizeLinear", ["c", "step", "zero"], ["one"]),
        helper.make_node("Add", ["one", "input"], ["d"]),
        helper.make_node("QuantizeLinear", ["d", "step", "zero"], ["e"]),
        helper.make_node("DequantizeLinear", ["e", "step", "zero"], ["output"]),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, image.shape)],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, image.shape)],
        [numpy_helper.from_array(value, key) for key, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = "optimized.onnx"
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    kinds = Counter(node.op_type for node in onnx.load("optimized.onnx").graph.node)
    return session.run(None, {"image": image})[0], [kinds[kind] for kind in ("QLinearConv", "QLinearAdd", "Add")]


(scalars, of_scalars), (others, of_others) = run(()), run((1,))
for name, found in (("scalars", of_scalars), ("shape (1,)", of_others)):
    print(f"{name}: QLinearConv {found[0]}, QLinearAdd {found[1]}, Add {found[2]}")
print("the outputs are equal:", np.array_equal(scalars, others))
raise SystemExit((of_scalars, of_others) != ([1, 1, 0], [1, 0, 1]))
END
