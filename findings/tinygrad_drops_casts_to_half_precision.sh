#!/usr/bin/env bash
# tinygrad 0.14.0: x.half().float() is x, with all its digits, on a device without half precision, such as the CPU.
#
# Expected: each number rounded to 11 bits, those above 65504 infinite and the smallest 0, as in torch, NumPy and ONNX
# Runtime: this is how one measures what half precision, or weights stored in it, cost.
# Happens: where the device has no half precision, tinygrad computes it as float32, and then takes both casts out. The
# numbers pass unchanged. So do those of a Cast to float16 and back in an ONNX file. With contiguous() or realize()
# between the casts they are rounded. Nothing is said.
# Seen, of 1/3, 2049 and 70000: [0.33333334, 2049, 70000]; with contiguous() [0.33325195, 2048, inf], as in NumPy.
# A product with weights in half precision: difference from float32 0, in NumPy 0.005.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python tinygrad==0.14.0 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
# The device written in Python needs no compiler. CPU gives the same.
DEV=PYTHON environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from tinygrad import Tensor
from tinygrad.nn.onnx import OnnxRunner

x = np.array([1 / 3, 2049, 70000], np.float32)
wanted = x.astype(np.float16).astype(np.float32)
found = Tensor(x).half().float().numpy()
kept = Tensor(x).half().contiguous().float().numpy()
print("found", found.tolist(), "with contiguous", kept.tolist(), "wanted", wanted.tolist())
assert (found == x).all()
assert (kept == wanted).all()

casts = [helper.make_node("Cast", [a], [b], to=to) for a, b, to in (("x", "h", 10), ("h", "y", 1))]
typed = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [3]) for name in "xy"]
graph = helper.make_graph(casts, "graph", typed[:1], typed[1:])
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "casts.onnx")
found = OnnxRunner("casts.onnx")({"x": Tensor(x)})["y"].numpy()
right = onnxruntime.InferenceSession("casts.onnx", providers=["CPUExecutionProvider"]).run(None, {"x": x})[0]
print("ONNX file", found.tolist(), "in ONNX Runtime", right.tolist())
assert (found == x).all()
assert (right == wanted).all()

generator = np.random.default_rng(0)
rows, weights = (generator.normal(size=(size, 64)).astype(np.float32) for size in (4, 8))
exact = Tensor(rows).matmul(Tensor(weights).T).numpy()
found = Tensor(rows).matmul(Tensor(weights).half().float().T).numpy()
right = rows @ weights.astype(np.float16).astype(np.float32).T
print("weights in half precision: difference", np.abs(found - exact).max(), "in NumPy", np.abs(right - exact).max())
assert (found == exact).all()
assert np.abs(right - exact).max() > 1e-4
END
