#!/usr/bin/env bash
# OpenVINO 2026.4.1: NaN is larger than 0, and Relu and Clip of NaN are numbers.
#
# Expected: no comparison with NaN is true, as in ONNX Runtime, numpy and torch; Relu and Clip of NaN are NaN. So a
# network that has diverged, or has a bad file, is seen at its output.
# Happens: Greater and GreaterOrEqual of NaN are true, Less and LessOrEqual are not. A sign of NaN is +1, Relu of it 0,
# Clip of it the lower end. The codes behind are as valid as others, and so are the classes.
# Seen, for NaN against 0, ONNX Runtime and OpenVINO: Greater 0 1, GreaterOrEqual 0 1, Less 0 0, LessOrEqual 0 0, sign
# by Where -1 1, Relu nan 0, Clip from -1 to 1 nan -1.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 openvino==2026.4.1 numpy==2.4.6
environment/bin/python - <<'END'
import numpy as np
import onnxruntime
import openvino
from onnx import TensorProto, helper, numpy_helper

x = np.full(16, np.nan, np.float32)


def both(*nodes, is_bool=False):
    if is_bool:
        nodes = *nodes, helper.make_node("Cast", ["condition"], ["y"], to=TensorProto.FLOAT)
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [16])],
        [numpy_helper.from_array(np.float32(value), name) for name, value in (("0", 0), ("1", 1), ("-1", -1))],
    )
    file = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()
    options, core = onnxruntime.SessionOptions(), openvino.Core()
    options.log_severity_level = 3
    one = onnxruntime.InferenceSession(file, options).run(None, {"x": x})[0]
    other = core.compile_model(core.read_model(file), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(x)[0]
    return one, other


node = helper.make_node
compared = node("GreaterOrEqual", ["x", "0"], ["condition"])
for name, (one, other), wanted in (
    ("Greater", both(node("Greater", ["x", "0"], ["condition"]), is_bool=True), (0, 1)),
    ("GreaterOrEqual", both(compared, is_bool=True), (0, 1)),
    ("Less", both(node("Less", ["x", "0"], ["condition"]), is_bool=True), (0, 0)),
    ("LessOrEqual", both(node("LessOrEqual", ["x", "0"], ["condition"]), is_bool=True), (0, 0)),
    ("sign by Where", both(compared, node("Where", ["condition", "1", "-1"], ["y"])), (-1, 1)),
    ("Relu", both(node("Relu", ["x"], ["y"])), (np.nan, 0)),
    ("Clip", both(node("Clip", ["x", "-1", "1"], ["y"])), (np.nan, -1)),
):
    print(f"{name}: ONNX Runtime {one[0]}, OpenVINO {other[0]}")
    assert np.array_equal(one, np.full(16, wanted[0]), equal_nan=True)
    assert np.array_equal(other, np.full(16, wanted[1]))
END
