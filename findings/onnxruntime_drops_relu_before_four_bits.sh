#!/usr/bin/env bash
# ONNX Runtime 1.32.0: its default optimizations drop a Relu before QuantizeLinear to 4 or 2 bits.
#
# Expected: a Relu is dropped if the codes cannot be negative floats anyway, where the zero point is the smallest code,
# as with uint8 and 0. For int8 and 0 it stays, and it does.
# Happens: to int4, uint4, int2 and uint2 it is dropped whatever the zero point is, and negative floats pass. Nothing is
# said. A Clip from 0 to 6 in its place stays.
# Seen, for -12 with scale 1, without and with optimizations: int8 with zero point 0 0 0; int4 0: 0 -8; int4 -8: 0 0;
# uint4 8: 0 -8; int2 0: 0 -2; uint2 2: 0 -2; int4 0 behind Clip: 0 0.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6 ml-dtypes==0.6.0
environment/bin/python - <<'END'
import ml_dtypes
import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

x = np.arange(-12, 13, dtype=np.float32)


def outputs(dtype, zero, is_clip):
    first = helper.make_node("Clip", ["x", "low", "high"], ["a"]) if is_clip else helper.make_node("Relu", ["x"], ["a"])
    held = {"scale": np.float32(1), "zero": np.array(zero, dtype)}
    if is_clip:
        held |= {"low": np.float32(0), "high": np.float32(6)}
    graph = helper.make_graph(
        [
            first,
            helper.make_node("QuantizeLinear", ["a", "scale", "zero"], ["codes"]),
            helper.make_node("DequantizeLinear", ["codes", "scale", "zero"], ["y"]),
        ],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [25])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [25])],
        [numpy_helper.from_array(value, name) for name, value in held.items()],
    )
    file = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 25)], ir_version=10).SerializeToString()
    for level in ("ORT_DISABLE_ALL", "ORT_ENABLE_ALL"):
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, level)
        yield onnxruntime.InferenceSession(file, options).run(None, {"x": x})[0]


for dtype, zero, is_clip, wanted in (
    (np.int8, 0, False, 0),
    (np.uint8, 0, False, 0),
    (ml_dtypes.int4, 0, False, -8),
    (ml_dtypes.int4, -8, False, 0),
    (ml_dtypes.uint4, 8, False, -8),
    (ml_dtypes.int2, 0, False, -2),
    (ml_dtypes.uint2, 2, False, -2),
    (ml_dtypes.int4, 0, True, 0),
):
    plain, usual = outputs(dtype, zero, is_clip)
    print(np.dtype(dtype), zero, "Clip" if is_clip else "Relu", f"-12: {plain[0]:.0f} {usual[0]:.0f}")
    assert plain.min() == 0
    assert usual.min() == wanted
    assert np.array_equal(plain[x >= 0], usual[x >= 0])
END
