#!/usr/bin/env bash
# MNN 3.6.1: Gemm of an ONNX file with transA gives wrong numbers, and Shrink keeps the negative numbers near 0.
#
# Expected: with transA=1 Gemm multiplies the transposed input; Shrink, PyTorch's Softshrink and Hardshrink, gives 0
# from -lambd to lambd.
# Happens: MNN's Gemm with transA gives other numbers. Its Shrink gives 0 below -lambd, and adds the bias to numbers
# from there to 0. Nothing is said. transB, and Shrink above 0, are right.
# Seen: Gemm of 8 x 3 and 8 x 6 normal numbers, transA=1: error 7.4, with transA=0 and transB=1 1e-6. Shrink with bias
# 0.2 and lambd 0.6 of -1, -0.5, -0.1, 0.5, 1: 0, -0.3, 0.1, 0, 0.8, where -0.8, 0, 0, 0, 0.8 is right.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python MNN==3.6.1 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python - >log 2>&1 <<'END' || { cat log; exit 1; }
import _tools  # what the command mnnconvert calls
import MNN
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper


def run(node, x, shape, held):
    """What ONNX Runtime and MNN give."""
    graph = helper.make_graph(
        [node],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(value, name) for name, value in held.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), "network.onnx")
    onnx.checker.check_model("network.onnx", full_check=True)
    right = onnxruntime.InferenceSession("network.onnx").run(None, {"x": x})[0]
    _tools.mnnconvert("mnnconvert -f ONNX --modelFile network.onnx --MNNModel network.mnn --bizCode network".split())
    network = MNN.nn.load_module_from_file("network.mnn", ["x"], ["y"])
    return right, np.array(network.forward([MNN.expr.const(x, list(x.shape), MNN.expr.NCHW)])[0].read())


generator = np.random.default_rng(0)
a, b = (generator.normal(size=shape).astype(np.float32) for shape in ((8, 3), (8, 6)))
bias = generator.normal(size=6).astype(np.float32)
exact = a.T.astype(np.float64) @ b + bias
for options, x, weight in (({"transA": 1}, a, b), ({"transB": 1}, a.T.copy(), b.T.copy())):
    node = helper.make_node("Gemm", ["x", "w", "b"], ["y"], **options)
    right, found = run(node, x, (3, 6), {"w": weight, "b": bias})
    error = abs(found - exact).max()
    print(f"RESULT Gemm {options}: error {error:.1e}")
    assert abs(right - exact).max() < 1e-5
    assert error > 1 if options == {"transA": 1} else error < 1e-5
x = np.array([-1, -0.5, -0.1, 0.5, 1], np.float32)
right, found = run(helper.make_node("Shrink", ["x"], ["y"], bias=0.2, lambd=0.6), x, x.shape, {})
print("RESULT Shrink: ONNX Runtime", *right.round(2), "MNN", *found.round(2))
assert abs(right - [-0.8, 0, 0, 0, 0.8]).max() < 1e-6
assert abs(found - [0, -0.3, 0.1, 0, 0.8]).max() < 1e-6
END
sed -n 's/^RESULT //p' log
