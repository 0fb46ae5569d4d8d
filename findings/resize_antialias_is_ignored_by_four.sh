#!/usr/bin/env bash
# TVM 0.27.0, OpenCV 5.0.0, OpenVINO 2026.4.1 and MNN 3.6.1 ignore antialias of an ONNX Resize.
#
# Expected: with antialias=1, which PyTorch's interpolate(antialias=True) asks for, an image that becomes smaller is
# filtered, as Pillow does and ONNX Runtime computes: the triangle is as wide as the factor.
# Happens: all four give the numbers of a Resize without antialias. Nothing is said. A camera image made four times
# smaller keeps 1 pixel of 4 in each direction, and its noise and moire, which the network was trained without.
# Seen, 16 x 16 random pixels to 4 x 4: ONNX Runtime 0.0 from the filtered numbers; the other four 0.0 from those
# without a filter, and 1.2 from the filtered ones.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python apache-tvm==0.27.0.post1 opencv-python-headless==5.0.0.93 \
    openvino==2026.4.1 MNN==3.6.1 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python - >log 2>&1 <<'END' || { cat log; exit 1; }
import _tools  # what the command mnnconvert calls
import cv2
import MNN
import numpy as np
import onnx
import onnxruntime
import openvino
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax
from tvm.relax.frontend.onnx import from_onnx

FILE = "network.onnx"
image = np.random.default_rng(0).normal(size=(1, 1, 16, 16)).astype(np.float32)


def matrix(width):
    """The weights of 16 pixels for 4 by a triangle that is `width` pixels wide on each side."""
    places = (np.arange(4) + 0.5) * 4 - 0.5
    weights = np.maximum(0, 1 - abs(places[:, None] - np.arange(16)) / width)
    return weights / weights.sum(1, keepdims=True)


def run_tvm():
    module = relax.get_pipeline("zero")(from_onnx(onnx.load(FILE), keep_params_in_input=False))
    machine = relax.VirtualMachine(tvm.compile(module, target="llvm"), tvm.cpu())
    return machine["main"](tvm.runtime.tensor(image)).numpy()


def run_opencv():
    network = cv2.dnn.readNetFromONNX(FILE)
    network.setInput(image)
    return network.forward()


def run_mnn():
    _tools.mnnconvert(f"mnnconvert -f ONNX --modelFile {FILE} --MNNModel network.mnn --bizCode network".split())
    network = MNN.nn.load_module_from_file("network.mnn", ["x"], ["y"])
    return np.array(network.forward(MNN.expr.const(image, list(image.shape), MNN.expr.NCHW)).read())


graph = helper.make_graph(
    [helper.make_node("Resize", ["x", "", "scales"], ["y"], mode="linear", antialias=1, exclude_outside=1)],
    "graph",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, image.shape)],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 1, 4, 4))],
    [numpy_helper.from_array(np.array([1, 1, 0.25, 0.25], np.float32), "scales")],
)
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), FILE)
onnx.checker.check_model(FILE)
filtered, plain = matrix(4) @ image[0, 0] @ matrix(4).T, matrix(1) @ image[0, 0] @ matrix(1).T
settings = {"INFERENCE_PRECISION_HINT": "f32"}
for name, run in (
    ("ONNX Runtime", lambda: onnxruntime.InferenceSession(FILE).run(None, {"x": image})[0]),
    ("OpenVINO", lambda: openvino.Core().compile_model(FILE, "CPU", settings)(image)[0]),
    ("TVM", run_tvm),
    ("OpenCV", run_opencv),
    ("MNN", run_mnn),
):
    found = run()[0, 0]
    error, from_plain = abs(found - filtered).max(), abs(found - plain).max()
    print(f"RESULT {name}: {error:.1f} from the filtered numbers, {from_plain:.1f} from those without a filter")
    assert (error if name == "ONNX Runtime" else from_plain) < 1e-5
assert abs(filtered - plain).max() > 0.5
END
sed -n 's/^RESULT //p' log
