#!/usr/bin/env bash
# tinygrad 0.14.0: its ONNX runner rounds halves in QuantizeLinear to uint8 otherwise than in that to int8.
#
# Expected: one rule for both types, the standard's: x / scale is rounded with halves to even, then the zero point is
# added, as in ONNX Runtime.
# Happens: for uint8, 0.4999999 and the zero point are added and the rest is cut off. This rounds halves down for sums
# below 2 and up beyond, where a float32 no longer holds the difference from 0.5. int8 is right.
# Seen, of 40 halves with scale 1: int8 with zero point 0: 0 differ; uint8 with zero point 0: 20, with 100: 20. 0.5
# to 7.5 are 0 2 2 4 4 6 6 8 in ONNX Runtime and as int8; as uint8 0 1 3 4 5 6 7 8, with 100 1 2 3 4 5 6 7 8.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python tinygrad==0.14.0 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
# tinygrad's interpreter in Python: the others need a compiler.
DEV=PYTHON environment/bin/python - <<'END'
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from tinygrad import Tensor
from tinygrad.nn.onnx import OnnxRunner

halves = np.arange(40, dtype=np.float32) + np.float32(0.5)
for zero in (np.int8(0), np.int8(1), np.uint8(0), np.uint8(100)):
    graph = helper.make_graph(
        [helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [40])],
        [helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(zero.dtype), [40])],
        [numpy_helper.from_array(np.float32(1), "scale"), numpy_helper.from_array(zero, "zero")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, "model.onnx")
    one = onnxruntime.InferenceSession("model.onnx").run(None, {"x": halves})[0].astype(int) - int(zero)
    other = OnnxRunner("model.onnx")({"x": Tensor(halves)})["y"].numpy().astype(int) - int(zero)
    assert np.array_equal(one, np.rint(halves))
    print(f"{zero.dtype}, zero point {zero}: {(one != other).sum()} of 40 differ;", *other[:8])
    is_up = halves > 2 if zero == 0 else np.full(40, True)
    wanted = np.where(is_up, np.ceil(halves), np.floor(halves)) if zero.dtype == np.uint8 else np.rint(halves)
    assert np.array_equal(other, wanted)
    assert (one != other).sum() == (20 if zero.dtype == np.uint8 else 0)
END
