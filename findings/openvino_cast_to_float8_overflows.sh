#!/usr/bin/env bash
# OpenVINO 2026.4.1: Cast to an 8-bit float makes NaN or inf of large floats, where the file asks for saturation.
#
# Expected: with saturate=1, the default of ONNX's Cast, floats beyond the largest 8-bit float become that one, 448 for
# float8e4m3fn and 57344 for float8e5m2, as in ONNX Runtime; so does OpenVINO's own QuantizeLinear to these types.
# Happens: the attribute is ignored. The first large activation makes NaN, and all after it.
# Seen, for 448, 470, 10000, 100000: float8e4m3fn ONNX Runtime 448 448 448 448, OpenVINO 448 nan nan nan; float8e5m2
# 448 448 10240 57344 and 448 448 10240 inf. QuantizeLinear with scale 1: both 448 448 448 448 and 448 448 10240 57344.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 openvino==2026.4.1 \
  numpy==2.4.6 ml-dtypes==0.6.0
environment/bin/python - <<'END'
import numpy as np
import onnxruntime
import openvino
from onnx import TensorProto, helper, numpy_helper

x = np.array([448, 470, 1e4, 1e5], np.float32)


def both(dtype, is_cast):
    zero = np.zeros((), helper.tensor_dtype_to_np_dtype(dtype))
    if is_cast:
        nodes = [
            helper.make_node("Cast", ["x"], ["a"], to=dtype, saturate=1),
            helper.make_node("Cast", ["a"], ["y"], to=TensorProto.FLOAT),
        ]
    else:
        nodes = [
            helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["a"], saturate=1),
            helper.make_node("DequantizeLinear", ["a", "scale", "zero"], ["y"]),
        ]
    graph = helper.make_graph(
        nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])],
        [] if is_cast else [numpy_helper.from_array(np.float32(1), "scale"), numpy_helper.from_array(zero, "zero")],
    )
    file = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()
    core = openvino.Core()
    compiled = core.compile_model(core.read_model(file), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return onnxruntime.InferenceSession(file).run(None, {"x": x})[0], compiled(x)[0]


for name in ("FLOAT8E4M3FN", "FLOAT8E5M2"):
    for is_cast in (True, False):
        one, other = both(getattr(TensorProto, name), is_cast)
        print(name, "Cast" if is_cast else "QuantizeLinear", *one, "OpenVINO", *other)
        assert np.isfinite(one).all()
        largest = (448 if name == "FLOAT8E4M3FN" else 57344) if is_cast else np.inf
        assert np.array_equal(np.isfinite(other), x <= largest)
END
