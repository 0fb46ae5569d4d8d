#!/usr/bin/env bash
# hls4ml 1.3.0: in its Quartus backend, the sign of each input (BipolarQuant) is +1, of negative ones, too.
#
# Expected: -1 below 0, and +1 from 0 up, as in QONNX's own execution and in the other backends.
# Happens: the code for Quartus makes the numbers -1 and 1, and then converts them to one bit: both are 1. The other
# backends map -1 to the bit 0. So a binary network gives the same output for every image. Nothing is said.
# Seen, for inputs -2, -1, -0.5, 0, 1 and the identity as weight: QONNX -1 -1 -1 1 1; Vitis -1 -1 -1 1 1; Catapult
# -1 -1 -1 1 1; Quartus 1 1 1 1 1, with io_parallel and io_stream. Needs g++.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python hls4ml==1.3.0 qonnx==1.0.0 onnx==1.23.2 onnxruntime==1.32.0 \
    numpy==2.4.6
environment/bin/python -W ignore - >log 2>&1 <<'END' || { cat log; exit 1; }
import hls4ml
import numpy as np
from onnx import TensorProto, helper, numpy_helper
from qonnx.core.modelwrapper import ModelWrapper
from qonnx.core.onnx_exec import execute_onnx
from qonnx.util.cleanup import cleanup_model

DOMAIN = "qonnx.custom_op.general"
x = np.array([[-2, -1, -0.5, 0, 1]], np.float32)
numbers = {"one": 1, "zero": 0, "bits": 2}
form = {"domain": DOMAIN, "signed": 1, "narrow": 0, "rounding_mode": "ROUND"}
graph = helper.make_graph(
    [
        helper.make_node("BipolarQuant", ["x", "x_scale"], ["signs"], domain=DOMAIN),
        helper.make_node("Quant", ["weight", *numbers], ["weight_q"], **form),
        helper.make_node("MatMul", ["signs", "weight_q"], ["y"]),
    ],
    "graph",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, x.shape)],
    [
        *(numpy_helper.from_array(np.float32(number), name) for name, number in numbers.items()),
        numpy_helper.from_array(np.float32(1), "x_scale"),
        numpy_helper.from_array(np.eye(x.size, dtype=np.float32), "weight"),
    ],
)
domains = [helper.make_opsetid("", 13), helper.make_opsetid(DOMAIN, 1)]
model = cleanup_model(ModelWrapper(helper.make_model(graph, opset_imports=domains, ir_version=8)))
(right,) = execute_onnx(model, {model.graph.input[0].name: x}).values()
print("RESULT QONNX", *right.ravel())
assert right.ravel().tolist() == [-1, -1, -1, 1, 1]
for backend in ("Vitis", "Catapult", "Quartus"):
    for io_type in ("io_parallel", "io_stream"):
        config = hls4ml.utils.config_from_onnx_model(
            model, granularity="name", backend=backend, default_precision="fixed<32,16>"
        )
        found = hls4ml.converters.convert_from_onnx_model(
            model, output_dir="project", backend=backend, hls_config=config, io_type=io_type
        )
        found.compile()
        signs = found.predict(x).ravel().tolist()
        print("RESULT", backend, io_type, *signs)
        assert signs == ([1] * 5 if backend == "Quartus" else right.ravel().tolist())
END
sed -n 's/^RESULT //p' log
