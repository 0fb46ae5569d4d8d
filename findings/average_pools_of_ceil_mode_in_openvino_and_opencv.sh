#!/usr/bin/env bash
# OpenVINO 2026.4.1 and OpenCV 5.0.0: a float average pool with ceil_mode divides by places beyond the padding.
#
# Expected: PyTorch's AvgPool2d(3, 2, 1, ceil_mode=True), which counts its padding by default, divides by the places
# inside of image and padding, as the standard's evaluator and ONNX Runtime do for the exported file.
# Happens: where the last window reaches beyond the padding, both divide by 9. So the last row and column are too small,
# and a global mean behind them is, too. Nothing is said. OpenVINO does so for convert_model of the module, too. With
# ceil_mode=False or count_include_pad=False numbers are right.
# Seen, 8 x 8 ones: last corner 0.11, where PyTorch and ONNX Runtime have 0.25, and last row 0.33 where they have 0.5.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python openvino==2026.4.1 opencv-python-headless==5.0.0.93 torch==2.15.0 \
    onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import cv2
import numpy as np
import onnx
import onnxruntime
import openvino
import torch
from onnx import TensorProto, helper

x = np.ones((1, 1, 8, 8), np.float32)


def opencv():
    network = cv2.dnn.readNetFromONNX("network.onnx")
    network.setInput(x)
    return network.forward()


for ceil_mode, counts in ((True, True), (False, True), (True, False)):
    pool = torch.nn.AvgPool2d(3, 2, 1, ceil_mode=ceil_mode, count_include_pad=counts)
    exact = pool(torch.from_numpy(x)).numpy()
    options = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    options |= {"ceil_mode": int(ceil_mode), "count_include_pad": int(counts)}
    graph = helper.make_graph(
        [helper.make_node("AveragePool", ["x"], ["y"], **options)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, exact.shape)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9), "network.onnx")
    onnx.checker.check_model("network.onnx", full_check=True)
    core, settings = openvino.Core(), {"INFERENCE_PRECISION_HINT": "f32"}
    converted = openvino.convert_model(pool, example_input=torch.from_numpy(x))
    found = {
        "ONNX Runtime": onnxruntime.InferenceSession("network.onnx").run(None, {"x": x})[0],
        "OpenVINO": core.compile_model("network.onnx", "CPU", settings)(x)[0],
        "OpenVINO of the module": core.compile_model(converted, "CPU", settings)(x)[0],
        "OpenCV": opencv(),
    }
    for name, y in found.items():
        print(f"ceil_mode {ceil_mode}, counts padding {counts}, {name}: last row", *y[0, 0, -1].round(2))
        if ceil_mode and counts and name != "ONNX Runtime":
            assert abs(y[0, 0, -1, -1] - 1 / 9) < 1e-5
            assert abs(exact[0, 0, -1, -1] - 1 / 4) < 1e-5
        else:
            assert abs(y - exact).max() < 1e-5
END
