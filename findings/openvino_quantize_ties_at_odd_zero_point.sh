#!/usr/bin/env bash
# OpenVINO 2026.4.1: QuantizeLinear of an ONNX file rounds halves to even codes only where the zero point is even.
#
# Expected: the standard rounds x / scale, halves to even, and adds the zero point, as ONNX Runtime does; so halves are
# even numbers around the zero point. With a scale of 1 no float is rounded before that.
# Happens: OpenVINO rounds the sum, so with an odd zero point all halves go to the other neighbour. It also multiplies
# by the inverse of the scale: with other scales, floats at an edge between two codes differ, too. No message.
# Seen, of 40 halves with scale 1: zero point 100 0, zero point 101 40; 0.5 is 0 in ONNX Runtime, 1 in OpenVINO.
# Of 1960 floats at most 3 steps from an edge, scale 0.0371, zero point 0: 130.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 openvino==2026.4.1 numpy==2.4.6
environment/bin/python - <<'END'
import numpy as np
import onnxruntime
import openvino
from onnx import TensorProto, helper, numpy_helper


def both(x, scale, zero):
    graph = helper.make_graph(
        [helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [len(x)])],
        [helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(zero.dtype), [len(x)])],
        [numpy_helper.from_array(np.float32(scale), "scale"), numpy_helper.from_array(zero, "zero")],
    )
    file = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()
    one = onnxruntime.InferenceSession(file).run(None, {"x": x})[0].astype(int)
    core = openvino.Core()
    other = core.compile_model(core.read_model(file), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(x)[0].astype(int)
    info = np.iinfo(zero.dtype)
    assert np.array_equal(one, np.clip(np.rint(x / np.float32(scale)) + int(zero), info.min, info.max))
    assert abs(one - other).max() <= 1
    return one - int(zero), other - int(zero)


halves = np.arange(-20, 20, dtype=np.float32) + np.float32(0.5)
found = {}
for zero in (np.uint8(100), np.uint8(101), np.int8(0), np.int8(-1)):
    one, other = both(halves, 1, zero)
    found[int(zero)] = int((one != other).sum())
    print(f"zero point {zero}: {found[int(zero)]} of 40 halves differ; 0.5 is", one[20], other[20])
assert found == {100: 0, 101: 40, 0: 0, -1: 40}

SCALE = np.float32(0.0371)
edges = ((np.arange(-140, 140) + 0.5) * SCALE).astype(np.float32).view(np.int32)
one, other = both(np.concatenate([(edges + near).view(np.float32) for near in range(-3, 4)]), SCALE, np.int8(0))
print(f"at an edge: {(one != other).sum()} of {len(one)}")
assert (one != other).sum() > 100
END
