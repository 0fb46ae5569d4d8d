#!/usr/bin/env bash
# hls4ml 1.3.0: of a QONNX file, GlobalAveragePool and GlobalMaxPool mix the channels.
#
# Expected: one number for each channel, as in QONNX's own execution. Most networks end so, before the last layer.
# Happens: hls4ml needs the file with channels last, and qonnx's ConvertToChannelsLastAndClean makes it; but this leaves
# the two operators with channels first, behind a Transpose. hls4ml accepts them, and reads pixels as if channels were
# last, so each output is of pixels of all channels. Nothing is said. (It refuses an AveragePool with channels first.)
# Seen, for four channels of 1, 2, 3, 4, of 6 x 6 pixels: QONNX 1 2 3 4; in hls4ml io_parallel 2.5 2.5 2.5 2.5
# as average and 4 4 4 4 as maximum, io_stream 1.67 3 2 2.33 as average. Needs g++.
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
    numbers = {"scale": 1, "zero": 0, "bits": bits}
    constants = [numpy_helper.from_array(np.float32(number), f"{name}_{key}") for key, number in numbers.items()]
    inputs, form = [name, *(constant.name for constant in constants)], {"signed": 1, "narrow": 0}
    return helper.make_node("Quant", inputs, [f"{name}_q"], domain=DOMAIN, rounding_mode="ROUND", **form), constants


def outputs(kind, io_type):
    """Those of QONNX and of hls4ml, of a picture of ones times the weights 1, 2, 3, 4."""
    weight = np.array([1, 2, 3, 4], np.float32).reshape(4, 1, 1, 1)
    (x_node, x_constants), (weight_node, weight_constants) = quant("x", 4), quant("weight", 4)
    window = {"kernel_shape": [1, 1], "pads": [0] * 4, "strides": [1, 1], "dilations": [1, 1], "group": 1}
    graph = helper.make_graph(
        [
            *(x_node, weight_node, helper.make_node("Conv", ["x_q", "weight_q"], ["channels"], **window)),
            helper.make_node(kind, ["channels"], ["y"]),
        ],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 6, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 1, 1])],
        [*x_constants, *weight_constants, numpy_helper.from_array(weight, "weight")],
    )
    domains = [helper.make_opsetid("", 13), helper.make_opsetid(DOMAIN, 1)]
    model = cleanup_model(ModelWrapper(helper.make_model(graph, opset_imports=domains, ir_version=8)))
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
    return right.ravel(), found.predict(x).ravel()


WANTED = {
    ("GlobalAveragePool", "io_parallel"): [2.5, 2.5, 2.5, 2.5],
    ("GlobalMaxPool", "io_parallel"): [4, 4, 4, 4],
    ("GlobalAveragePool", "io_stream"): [1.67, 3, 2, 2.33],
}
for (kind, io_type), wanted in WANTED.items():
    right, found = outputs(kind, io_type)
    print("RESULT", kind, io_type, "QONNX", *right, "hls4ml", *found.round(2))
    assert right.tolist() == [1, 2, 3, 4]
    assert np.allclose(found, wanted, atol=0.01)
END
sed -n 's/^RESULT //p' log
