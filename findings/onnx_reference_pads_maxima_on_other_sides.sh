#!/usr/bin/env bash
# onnx 1.23.2: the ReferenceEvaluator pads MaxPool on other sides, and GridSample and LogSoftmax are wrong, too.
#
# Expected: pads are all beginnings, then all ends; SAME_LOWER makes as many rows as SAME_UPPER; a cubic GridSample with
# padding_mode "border" repeats the pixels at the border; a LogSoftmax of finite numbers is finite. So PyTorch and ONNX
# Runtime have it, and the evaluator itself for AveragePool and Conv.
# Happens: of MaxPool, the first two pads are taken for the rows, the last two for the columns, so that images are of
# another size; SAME_LOWER loses a row. Cubic pixels beyond the border are others. LogSoftmax is the logarithm of the
# rounded Softmax, so that small ones are -inf. Nothing is said, apart from NumPy's "divide by zero".
# Seen: 8 x 8 pixels by 3 x 3 with pads 0, 0, 1, 1 make 6 x 8, ONNX Runtime 7 x 7; SAME_LOWER of 7 x 7 by 2 3 x 3, not
# 4 x 4; GridSample's largest error 0.1, with "zeros" and "reflection" 1e-6; the last of LogSoftmax(0, -120) -inf, not
# -120.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

random = np.random.default_rng(0)


def outputs(kind, **inputs_and_options):
    """Those of ONNX Runtime, without optimizations, and of the evaluator."""
    arrays = {name: value for name, value in inputs_and_options.items() if isinstance(value, np.ndarray)}
    options = {name: value for name, value in inputs_and_options.items() if name not in arrays}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, each.shape) for name, each in arrays.items()]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([helper.make_node(kind, list(arrays), ["y"], **options)], "graph", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    session_options = onnxruntime.SessionOptions()
    session_options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), session_options)
    (exact,), (found,) = session.run(None, arrays), ReferenceEvaluator(model).run(None, arrays)
    return exact, found


even, odd = (random.normal(size=(1, 1, side, side)).astype(np.float32) for side in (8, 7))
for kind in ("AveragePool", "MaxPool"):
    for name, x, options in (
        ("pads 0, 0, 1, 1", even, {"kernel_shape": [3, 3], "pads": [0, 0, 1, 1]}),
        ("SAME_LOWER by 2", odd, {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_LOWER"}),
    ):
        exact, found = outputs(kind, x=x, **options)
        print(f"{kind}, {name}: ONNX Runtime {exact.shape[2:]}, evaluator {found.shape[2:]}")
        if kind == "AveragePool":
            assert np.allclose(exact, found, atol=1e-6)
        else:
            assert (exact.shape[2:], found.shape[2:]) == {8: ((7, 7), (6, 8)), 7: ((4, 4), (3, 3))}[x.shape[2]]

grid = random.uniform(-1.5, 1.5, (1, 9, 9, 2)).astype(np.float32)
for padding in ("zeros", "reflection", "border"):
    exact, found = outputs("GridSample", x=even, grid=grid, mode="cubic", padding_mode=padding)
    error = np.abs(exact - found).max()
    print(f"GridSample, cubic, {padding}: largest difference {error:.0e}")
    assert error > 0.1 if padding == "border" else error < 1e-5

exact, found = outputs("LogSoftmax", x=np.array([[0, -120]], np.float32))
print("LogSoftmax of 0, -120: ONNX Runtime", *exact[0], "evaluator", *found[0])
assert exact[0].tolist() == [0, -120] and found[0].tolist() == [0, -np.inf]
END
