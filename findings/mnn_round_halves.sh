#!/usr/bin/env bash
# MNN 3.6.1: Round of an ONNX file rounds halves away from 0, not to the even number.
#
# Expected: 0.5, 1.5, 2.5 and -2.5 become 0, 2, 2 and -2, as the standard says and ONNX Runtime computes.
# Happens: they become 1, 2, 3 and -3: one code more, where a fake quantizer writes Round, and means of the codes grow.
# Seen, for halves from 0.5 to 15.5: mean of ONNX Runtime 8.0, MNN 8.5; for those of both signs, half of them differ.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python MNN==3.6.1 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python - <<'END'
import _tools  # what the command mnnconvert calls, after installing packages of its own by pip
import MNN
import numpy as np
import onnxruntime
from onnx import TensorProto, helper

x = (np.arange(-16, 16, dtype=np.float32) + 0.5)[None]
ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape)] for name in "xy"]
graph = helper.make_graph([helper.make_node("Round", ["x"], ["y"])], "round", *ends)
file = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=9).SerializeToString()
with open("network.onnx", "wb") as stream:
    stream.write(file)
_tools.mnnconvert("mnnconvert -f ONNX --modelFile network.onnx --MNNModel network.mnn --bizCode network".split())
network = MNN.nn.load_module_from_file("network.mnn", ["x"], ["y"])
found = network.forward(MNN.expr.const(x, list(x.shape), MNN.expr.NCHW)).read()
right = onnxruntime.InferenceSession(file).run(None, {"x": x})[0]
for name, y in (("ONNX Runtime", right), ("MNN", found)):
    print(name, y[0, 13:19], "mean of the positive", y[x > 0].mean())
print("differ:", (right != found).sum(), "of", x.size)
assert np.array_equal(right, np.round(x))
assert np.array_equal(found, np.sign(x) * np.floor(abs(x) + 0.5))
assert right[x > 0].mean() == 8 and found[x > 0].mean() == 8.5
assert (right != found).sum() == x.size // 2
END
