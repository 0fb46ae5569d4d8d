#!/usr/bin/env bash
# OpenVINO 2026.4.1, OpenCV 5.0.0, onnx 1.23.2: Softmax of ONNX files before opset 13 is taken along one axis.
#
# Expected: up to opset 12 a Softmax with axis 1 makes all channels and pixels of an image sum up to 1, as the standard
# says and ONNX Runtime computes; from 13 on, the channels of each pixel do.
# Happens: OpenVINO, OpenCV and onnx's ReferenceEvaluator compute the newer meaning for older files. Nothing is said.
# Seen, images of 3 x 4 x 5, opset 11, sums of all numbers of an image: ONNX Runtime 1, the other three 20. With opset
# 13, all four 20.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python openvino==2026.4.1 opencv-python-headless==5.0.0.93 \
    onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python - 2>errors <<'END' || { cat errors; exit 1; }
import cv2
import numpy as np
import onnx
import onnxruntime
import openvino
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

SHAPE = 2, 3, 4, 5
x = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)


def opencv(file):
    network = cv2.dnn.readNetFromONNX(file)
    network.setInput(x)
    return network.forward()


RUNTIMES = {
    "ONNX Runtime": lambda file: onnxruntime.InferenceSession(file).run(None, {"x": x})[0],
    "OpenVINO": lambda file: openvino.Core().compile_model(file, "CPU")(x)[0],
    "OpenCV": opencv,
    "onnx": lambda file: ReferenceEvaluator(file).run(None, {"x": x})[0],
}
shares = np.exp(x.astype(np.float64))
whole, pixels = shares / shares.sum((1, 2, 3), keepdims=True), shares / shares.sum(1, keepdims=True)
for opset in (11, 13):
    images = [helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPE) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Softmax", ["x"], ["y"], axis=1)], "graph", images[:1], images[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), "network.onnx")
    onnx.checker.check_model("network.onnx")
    found = {name: run("network.onnx") for name, run in RUNTIMES.items()}
    print("opset", opset, "sums of an image:", {name: float(y[0].sum().round(3)) for name, y in found.items()})
    for name, y in found.items():
        assert abs(y - (whole if opset == 11 and name == "ONNX Runtime" else pixels)).max() < 1e-6
END
