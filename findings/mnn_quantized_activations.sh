#!/usr/bin/env bash
# MNN 3.6.1: of an ONNX file with quantized activations, it swaps batch and channels, and subtracts 128 of uint8 ones.
#
# Expected: QuantizeLinear and DequantizeLinear give the rounded input back, in its shape, as ONNX Runtime computes it;
# or mnnconvert refuses the file.
# Happens: the output of shape (batch, channels, ...) has the shape (channels, batch, ...), though scale and zero point
# are single numbers. With int8 the numbers are right, with uint8 they are 128 steps too small. The converter says
# "Converted Success!", and the network runs.
# Seen, for the input 8, 1, 0 of shape (1, 3, 1, 1) and the scale 1: ONNX Runtime 8, 1, 0; MNN, of shape (3, 1, 1, 1),
# int8 8, 1, 0, uint8 -120, -127, -128.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python MNN==3.6.1 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python - <<'END'
import os

import _tools  # what the command mnnconvert calls, after installing packages of its own by pip
import MNN
import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

x = np.array([8, 1, 0], np.float32).reshape(1, 3, 1, 1)


def outputs(zero):
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["codes"]),
        helper.make_node("DequantizeLinear", ["codes", "scale", "zero"], ["steps"]),
        helper.make_node("Mul", ["steps", "scale"], ["y"]),  # names the output, which MNN would lose
    ]
    held = {"scale": np.float32(1), "zero": zero}
    held = [numpy_helper.from_array(np.asarray(value), name) for name, value in held.items()]
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape)] for name in "xy"]
    graph = helper.make_graph(nodes, "codes", *ends, held)
    file = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=9).SerializeToString()
    with open("network.onnx", "wb") as stream:
        stream.write(file)
    _tools.mnnconvert("mnnconvert -f ONNX --modelFile network.onnx --MNNModel network.mnn --bizCode network".split())
    assert os.path.exists("network.mnn")
    network = MNN.nn.load_module_from_file("network.mnn", ["x"], ["y"])
    found = network.forward(MNN.expr.const(x, list(x.shape), MNN.expr.NCHW)).read().copy()
    return onnxruntime.InferenceSession(file).run(None, {"x": x})[0], found


for zero, wanted in ((np.int8(0), [8, 1, 0]), (np.uint8(10), [-120, -127, -128])):
    right, found = outputs(zero)
    print(zero.dtype, "ONNX Runtime", right.shape, right.ravel(), "MNN", found.shape, found.ravel())
    assert np.array_equal(right, x)
    assert found.shape == (3, 1, 1, 1)
    assert np.array_equal(found.ravel(), wanted)
END
