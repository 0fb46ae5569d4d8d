#!/usr/bin/env bash
# OpenCV 5.0.0: of an ONNX file, it drops the first of two Reshapes, and takes PRelu's factors of columns for
# channels'.
#
# Expected: numbers and shapes as of ONNX Runtime.
# Happens: the second Reshape takes its zeros, "as in the input", from the input of the first. PRelu with a factor for
# each column multiplies channels by them. Nothing is said. A PRelu of channels, and a Reshape without zeros, are
# right.
# Seen: 8 x 1 x 10 x 10 by Reshape (0, -1) becomes 1 x 800, not 8 x 100; 46 % of PRelu's numbers are wrong.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python opencv-python-headless==5.0.0.93 onnx==1.23.2 \
    onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python - 2>errors <<'END' || { cat errors; exit 1; }
import cv2
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

rng = np.random.default_rng(0)
x = rng.normal(size=(1, 8, 10, 10)).astype(np.float32)


def both(nodes, **constants):
    """The numbers of ONNX Runtime and of OpenCV."""
    arrays = [onnx.numpy_helper.from_array(np.array(value), name) for name, value in constants.items()]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape if name == "x" else None) for name in "xy"]
    model = helper.make_model(helper.make_graph(nodes, "g", infos[:1], infos[1:], arrays), ir_version=9)
    model.opset_import[0].version = 19
    onnx.save(onnx.shape_inference.infer_shapes(model), "network.onnx")
    network = cv2.dnn.readNetFromONNX("network.onnx")
    network.setInput(x)
    return onnxruntime.InferenceSession("network.onnx").run(None, {"x": x})[0], network.forward()


shapes = {}
for second in ((0, -1), (8, -1)):
    nodes = [helper.make_node("Reshape", ["x", "first"], ["z"]), helper.make_node("Reshape", ["z", "second"], ["y"])]
    exact, found = both(nodes, first=[8, 1, 10, 10], second=list(second))
    shapes[second] = found.shape
    print(f"8 x 1 x 10 x 10 by {second}: {exact.shape} became {found.shape}")
    assert exact.shape == (8, 100)
assert shapes == {(0, -1): (1, 800), (8, -1): (8, 100)}

wrong = {}
factors = rng.uniform(0.1, 0.9, 10).astype(np.float32)
for name, shape in (("columns", (10,)), ("channels", (8, 1, 1))):
    node = helper.make_node("PRelu", ["x", "factors"], ["y"])
    exact, found = both([node], factors=factors[: shape[0]].reshape(shape))
    wrong[name] = (abs(found - exact) > 1e-3).mean()
print("wrong numbers:", *(f"{name} {share:.0%}" for name, share in wrong.items()))
assert 0.4 < wrong["columns"] < 0.5 and wrong["channels"] == 0
END
