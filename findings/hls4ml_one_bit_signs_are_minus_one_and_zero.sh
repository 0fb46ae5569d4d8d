#!/usr/bin/env bash
# hls4ml 1.3.0: a QONNX Quant of one signed bit makes -1 and +1, and hls4ml builds -1 and 0 of it.
#
# Expected: QONNX's execution and hls4ml's C simulation agree, as they do for two bits and for BipolarQuant. In QONNX
# one signed bit is the sign (qonnx 1.0.0: -1 or +1 times the scale).
# Happens: hls4ml takes it as a number of one bit in two's complement, and rounds: from -0.5 up it is 0. A filter of
# signs loses half of its weights. Nothing is said. With BipolarQuant the signs stay.
# Seen, for inputs -1, -0.25, 0.25, 1 and the identity as weight, and for weights -1, 1 of an input 1:
# inputs in QONNX -1 -1 1 1, in hls4ml -1 0 0 0; weights in QONNX -1 1, in hls4ml -1 0; BipolarQuant: equal.
# Needs g++.
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


def quant(name, bits):
    """A Quant of scale 1, or for 0 bits a BipolarQuant."""
    numbers = {"scale": 1, "zero": 0, "bits": bits} if bits else {"scale": 1}
    constants = [numpy_helper.from_array(np.float32(number), f"{name}_{key}") for key, number in numbers.items()]
    kind, attributes = "BipolarQuant", {}
    if bits:
        kind, attributes = "Quant", {"signed": 1, "narrow": 0, "rounding_mode": "ROUND"}
    inputs = [name, *(constant.name for constant in constants)]
    node = helper.make_node(kind, inputs, [f"{name}_q"], domain="qonnx.custom_op.general", **attributes)
    return node, constants


def outputs(x, weight, x_bits, weight_bits):
    """Those of QONNX and of hls4ml."""
    (x_node, x_constants), (weight_node, weight_constants) = quant("x", x_bits), quant("weight", weight_bits)
    graph = helper.make_graph(
        [x_node, weight_node, helper.make_node("MatMul", ["x_q", "weight_q"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, weight.shape[1]])],
        [*x_constants, *weight_constants, numpy_helper.from_array(weight, "weight")],
    )
    domains = [helper.make_opsetid("", 13), helper.make_opsetid("qonnx.custom_op.general", 1)]
    model = cleanup_model(ModelWrapper(helper.make_model(graph, opset_imports=domains, ir_version=8)))
    (right,) = execute_onnx(model, {model.graph.input[0].name: x}).values()
    config = hls4ml.utils.config_from_onnx_model(
        model, granularity="name", backend="Vitis", default_precision="fixed<32,16>"
    )
    found = hls4ml.converters.convert_from_onnx_model(model, output_dir="project", backend="Vitis", hls_config=config)
    found.compile()
    return right.ravel().tolist(), found.predict(x).ravel().tolist()


x = np.array([[-1, -0.25, 0.25, 1]], np.float32)
one, signs, identity = np.ones((1, 1), np.float32), np.array([[-1, 1]], np.float32), np.eye(4, dtype=np.float32)
for bits, wanted in ((0, [-1, -1, 1, 1]), (1, [-1, 0, 0, 0])):
    right, found = outputs(x, identity, bits, 2)
    print("RESULT inputs,", f"Quant of {bits} bit:" if bits else "BipolarQuant:", "QONNX", *right, "hls4ml", *found)
    assert right == [-1, -1, 1, 1]
    assert found == wanted
for bits, wanted in ((0, [-1, 1]), (1, [-1, 0]), (2, [-1, 1])):
    right, found = outputs(one, signs, 4, bits)
    print("RESULT weights,", f"Quant of {bits} bit:" if bits else "BipolarQuant:", "QONNX", *right, "hls4ml", *found)
    assert right == [-1, 1]
    assert found == wanted
END
sed -n 's/^RESULT //p' log
