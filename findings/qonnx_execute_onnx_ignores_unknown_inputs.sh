#!/usr/bin/env bash
# qonnx 1.0.0: execute_onnx ignores an input whose name the graph does not have, and computes with an input of zeros.
#
# Expected: an error that names the input, as in ONNX Runtime, which says that a required input is missing.
# Happens: the output is that of zeros, whatever the picture. Only a wrong shape is refused. One meets it after
# cleanup_model, which renames the input to global_in and the output to global_out: code that passes "input" on then
# measures one output for all pictures. With an empty dictionary it is the same. Nothing is said.
# Seen, for weights of 2 bits and x = 1 2: by its name "x" 1 2; after cleanup_model by "x" 0 0, by "global_in" 1 2, by
# nothing 0 0; ONNX Runtime raises ValueError.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python qonnx==1.0.0 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from qonnx.core.modelwrapper import ModelWrapper
from qonnx.core.onnx_exec import execute_onnx
from qonnx.transformation.infer_shapes import InferShapes
from qonnx.util.cleanup import cleanup_model


def network(nodes, constants):
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2])],
        [numpy_helper.from_array(np.array(value, np.float32), name) for name, value in constants.items()],
    )
    domains = [helper.make_opsetid("", 13), helper.make_opsetid("qonnx.custom_op.general", 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=8)


product = helper.make_node("MatMul", ["x", "weight"], ["y"])
session = onnxruntime.InferenceSession(network([product], {"weight": np.eye(2)}).SerializeToString())
x = np.array([[1, 2]], np.float32)
try:
    session.run(None, {"picture": x})
except ValueError as error:
    print("ONNX Runtime:", str(error).split(".")[0])
else:
    raise AssertionError("ONNX Runtime takes the input")

form = {"domain": "qonnx.custom_op.general", "signed": 1, "narrow": 1, "rounding_mode": "ROUND"}
quant = helper.make_node("Quant", ["weight", "scale", "zero", "bits"], ["weight_q"], **form)
product = helper.make_node("MatMul", ["x", "weight_q"], ["y"])
model = ModelWrapper(network([quant, product], {"weight": np.eye(2), "scale": 1, "zero": 0, "bits": 2}))
model = model.transform(InferShapes())
clean = cleanup_model(model)
for which, given, wanted in (
    (model, {"x": x}, [1, 2]),
    (clean, {"x": x}, [0, 0]),
    (clean, {"global_in": x}, [1, 2]),
    (clean, {}, [0, 0]),
):
    (found,) = execute_onnx(which, given).values()
    print("after cleanup_model," if which is clean else "before,", list(given), *found.ravel())
    assert found.ravel().tolist() == wanted
END
