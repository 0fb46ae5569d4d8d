#!/usr/bin/env bash
# onnxconverter-common 1.16.0: converted to float16, a quantized network has other biases.
#
# Biases are int32 codes, whose scale is the product of those of inputs and weights, for 8 bits often around 1e-6.
# Expected: float16 rounds a bias to 11 bits, an error below 0.05 %; or scales of DequantizeLinear stay float32.
# Happens: the scale is rounded, not the bias, and below 6e-5 float16 has fewer than 11 bits: the error is some percent
# of the bias, without a message. A scale below 1e-7 becomes 1e-7, with a warning that it "will be truncated", and
# biases grow by as much as it does.
# Seen, as output / bias for scales 8e-5, 8e-7, 2e-7, 1e-8 and biases of 1000 codes: 1.000, 0.969, 0.894, 11.921;
# warnings: 0, 0, 0, 1.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnxconverter-common==1.16.0 onnx==1.23.2 onnxruntime==1.32.0 \
  numpy==2.4.6
environment/bin/python - <<'END'
import warnings

import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxconverter_common.float16 import convert_float_to_float16

x = np.zeros((1, 1, 4, 4), np.float32)


def output(file):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(file.SerializeToString(), options).run(None, {"x": x})[0][0, 0, 0, 0]


def network(input_scale, weight_scale):
    held = {
        "input_scale": np.float32(input_scale),
        "zero": np.uint8(0),
        "weight": np.full((1, 1, 3, 3), 5, np.int8),
        "weight_scale": np.float32(weight_scale),
        "bias": np.array([1000], np.int32),
        "bias_scale": np.float32(input_scale) * np.float32(weight_scale),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "input_scale", "zero"], ["codes"]),
        helper.make_node("DequantizeLinear", ["codes", "input_scale", "zero"], ["inputs"]),
        helper.make_node("DequantizeLinear", ["weight", "weight_scale"], ["filters"]),
        helper.make_node("DequantizeLinear", ["bias", "bias_scale"], ["biases"]),
        helper.make_node("Conv", ["inputs", "filters", "biases"], ["y"]),
    ]
    sizes = {"x": [1, 1, 4, 4], "y": [1, 1, 2, 2]}
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, size)] for name, size in sizes.items()]
    held = [numpy_helper.from_array(np.asarray(value), name) for name, value in held.items()]
    graph = helper.make_graph(nodes, "network", *ends, held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


for input_scale, weight_scale, ratio, count in (
    (0.02, 4e-3, "1.000", 0),
    (0.004, 2e-4, "0.969", 0),
    (0.004, 5e-5, "0.894", 0),
    (0.001, 1e-5, "11.921", 1),
):
    file = network(input_scale, weight_scale)
    before = output(file)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        half = convert_float_to_float16(file, keep_io_types=True)
    found = f"{output(half) / before:.3f}"
    print(f"scale {input_scale * weight_scale:.0e}: output / bias {found}, warnings {len(caught)}")
    assert (found, len(caught)) == (ratio, count)
END
