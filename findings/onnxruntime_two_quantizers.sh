#!/usr/bin/env bash
# ONNX Runtime 1.32.0: of two quantizers in a row, its default optimizations keep one.
#
# Expected: optimizations change floats by rounding at most; QuantizeLinear, DequantizeLinear with step 0.1 and again
# with step 0.3 is what the standard makes of it: numbers are rounded twice.
# Happens: the four nodes become two with one step, and numbers are off by a whole step of the first quantizer. With
# another operator in between, such as MaxPool or LeakyRelu(alpha=1), both quantizers stay.
# Seen, as the largest difference from a session without optimizations: in a row 0.1; MaxPool 0.0; LeakyRelu 0.0
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python - <<'END'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

constants = {"fine": np.float32(0.1), "coarse": np.float32(0.3), "zero": np.uint8(0)}
between = {
    "in a row": [],
    "MaxPool": [helper.make_node("MaxPool", ["b"], ["c"], kernel_shape=[2, 2])],
    "LeakyRelu": [helper.make_node("LeakyRelu", ["b"], ["c"], alpha=1.0)],
}
image = np.random.default_rng(0).uniform(0, 25, (1, 2, 8, 8)).astype(np.float32)
found = {}
for name, nodes in between.items():
    graph = helper.make_graph(
        [
            helper.make_node("QuantizeLinear", ["image", "fine", "zero"], ["a"]),
            helper.make_node("DequantizeLinear", ["a", "fine", "zero"], ["b"]),
            *nodes,
            helper.make_node("QuantizeLinear", ["c" if nodes else "b", "coarse", "zero"], ["d"]),
            helper.make_node("DequantizeLinear", ["d", "coarse", "zero"], ["output"]),
        ],
        "graph",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 2, 8, 8])],
        [helper.make_tensor_value_info("output", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, key) for key, value in constants.items()],
    )
    file = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()
    plain = onnxruntime.SessionOptions()
    plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    sessions = (onnxruntime.InferenceSession(file, options) for options in (plain, onnxruntime.SessionOptions()))
    one, other = (session.run(None, {"image": image})[0] for session in sessions)
    found[name] = float(np.abs(one - other).max())
print(found)
assert found["in a row"] > 0.09
assert found["MaxPool"] == found["LeakyRelu"] == 0
END
