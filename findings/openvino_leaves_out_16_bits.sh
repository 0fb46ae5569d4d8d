#!/usr/bin/env bash
# OpenVINO 2026.4.1: a quantizer of 16 bits between other operators does nothing.
#
# Expected: QuantizeLinear to uint16 or int16 and DequantizeLinear round to a step, and end at the largest code, as in
# ONNX Runtime, and as OpenVINO's do for 8 bits; or the file is refused.
# Happens: the floats pass as they are, not rounded and not clipped. Nothing is said. Where 0 is the smallest code, in
# place of a Relu, negative floats pass, too.
# Seen, for -100000, -3.3, 0.3, 1.6, 100000 with scale 1 in ONNX Runtime and OpenVINO: uint8 with zero point 0:
# 0 0 0 2 255 in both; uint16 0: 0 0 0 2 65535 and the floats; int16 0: -32768 -3 0 2 32767 and the floats.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 openvino==2026.4.1 numpy==2.4.6
environment/bin/python - <<'END'
import numpy as np
import onnxruntime
import openvino
from onnx import TensorProto, helper, numpy_helper

x = np.array([-100000, -3.3, 0.3, 1.6, 100000], np.float32)


def both(zero):
    nodes = [
        helper.make_node("Neg", ["x"], ["a"]),
        helper.make_node("QuantizeLinear", ["a", "scale", "zero"], ["codes"]),
        helper.make_node("DequantizeLinear", ["codes", "scale", "zero"], ["b"]),
        helper.make_node("Mul", ["b", "scale"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [5])],
        [numpy_helper.from_array(np.float32(1), "scale"), numpy_helper.from_array(zero, "zero")],
    )
    file = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(file), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return onnxruntime.InferenceSession(file).run(None, {"x": -x})[0], compiled(-x)[0]


for zero in (np.uint8(0), np.uint16(0), np.uint16(32768), np.int16(0)):
    one, other = both(zero)
    print(zero.dtype, zero, "ONNX Runtime", *one, "OpenVINO", *other)
    info = np.iinfo(zero.dtype)
    assert np.array_equal(one, np.clip(np.rint(x) + int(zero), info.min, info.max) - int(zero))
    assert np.array_equal(other, one if info.bits == 8 else x)
END
