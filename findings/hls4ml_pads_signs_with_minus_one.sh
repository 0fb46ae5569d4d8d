#!/usr/bin/env bash
# hls4ml 1.3.0: a convolution of signs (BipolarQuant) is padded with -1 where the ONNX file says 0.
#
# Expected: the C simulation equals QONNX's own execution, in which the standard's Conv pads with 0; or an error.
# Happens: a sign has one bit in hls4ml, and the bit of the padding, 0, means -1. All outputs whose window reaches over
# the border are wrong, in a 3 x 3 picture eight of nine. Nothing is said. With inputs of 4 bits they are right.
# Seen, for a picture of +1, one filter of +1, 3 x 3, padding 1, first rows: QONNX 4 6 4 and 6 9 6; hls4ml from signs
# -1 3 -1 and 3 9 3; hls4ml from 4 bits 4 6 4 and 6 9 6. io_parallel and io_stream agree. Needs g++.
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
from qonnx.transformation.channels_last import ConvertToChannelsLastAndClean
from qonnx.util.cleanup import cleanup_model

DOMAIN = "qonnx.custom_op.general"


def quant(name, bits):
    """A Quant of scale 1, or for 1 bit a BipolarQuant."""
    numbers = {"scale": 1} if bits == 1 else {"scale": 1, "zero": 0, "bits": bits}
    constants = [numpy_helper.from_array(np.float32(number), f"{name}_{key}") for key, number in numbers.items()]
    attributes = {} if bits == 1 else {"signed": 1, "narrow": 0, "rounding_mode": "ROUND"}
    kind, inputs = "BipolarQuant" if bits == 1 else "Quant", [name, *(constant.name for constant in constants)]
    return helper.make_node(kind, inputs, [f"{name}_q"], domain=DOMAIN, **attributes), constants


def outputs(bits, io_type):
    """Those of QONNX and of hls4ml, for a picture and a filter of +1."""
    (x_node, x_constants), (weight_node, weight_constants) = quant("x", bits), quant("weight", 1)
    window = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [1, 1], "dilations": [1, 1], "group": 1}
    graph = helper.make_graph(
        [x_node, weight_node, helper.make_node("Conv", ["x_q", "weight_q"], ["y"], **window)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 3, 3])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1, 3, 3])],
        [*x_constants, *weight_constants, numpy_helper.from_array(np.ones((1, 1, 3, 3), np.float32), "weight")],
    )
    domains = [helper.make_opsetid("", 13), helper.make_opsetid(DOMAIN, 1)]
    model = cleanup_model(ModelWrapper(helper.make_model(graph, opset_imports=domains, ir_version=8)))
    # hls4ml takes channels last.
    model = cleanup_model(model.transform(ConvertToChannelsLastAndClean()))
    x = np.ones(model.get_tensor_shape(model.graph.input[0].name), np.float32)
    (right,) = execute_onnx(model, {model.graph.input[0].name: x}).values()
    config = hls4ml.utils.config_from_onnx_model(
        model, granularity="name", backend="Vitis", default_precision="fixed<32,16>"
    )
    found = hls4ml.converters.convert_from_onnx_model(
        model, output_dir="project", backend="Vitis", hls_config=config, io_type=io_type
    )
    found.compile()
    return right.reshape(3, 3).tolist(), found.predict(x).reshape(3, 3).tolist()


for io_type in ("io_parallel", "io_stream"):
    for bits in (1, 4):
        right, found = outputs(bits, io_type)
        print(f"RESULT {io_type}, inputs of {bits} bit: QONNX", *right[:2], "hls4ml", *found[:2])
        assert right == [[4, 6, 4], [6, 9, 6], [4, 6, 4]]
        assert found == ([[-1, 3, -1], [3, 9, 3], [-1, 3, -1]] if bits == 1 else right)
END
sed -n 's/^RESULT //p' log
