#!/usr/bin/env bash
# OpenCV 5.0.0, MNN 3.6.1: a cubic GridSample of an ONNX file is computed as the linear one.
#
# Expected: weights of four pixels in each direction with a = -0.75, as ONNX Runtime has them for the mode "cubic",
# which PyTorch's exporter writes for grid_sample(mode="bicubic") from opset 20 on.
# Happens: OpenCV and MNN give the numbers of mode "linear". Nothing is said.
# Seen, 6 x 6 random pixels, the largest 2.3, places inside of the image: errors up to 0.4 for both, and 1e-6 from the
# linear numbers; ONNX Runtime 2e-6 from the cubic ones.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python opencv-python-headless==5.0.0.93 MNN==3.6.1 onnx==1.23.2 \
    onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python - >log 2>&1 <<'END' || { cat log; exit 1; }
import _tools  # what the command mnnconvert calls
import cv2
import MNN
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

SIZE, A = 6, -0.75
generator = np.random.default_rng(0)
image = generator.normal(size=(1, 1, SIZE, SIZE)).astype(np.float32)
grid = generator.uniform(-0.4, 0.4, (1, 5, 5, 2)).astype(np.float32)


def weight(distance, is_cubic):
    d = abs(distance)
    if not is_cubic:
        return max(0, 1 - d)
    return (A + 2) * d**3 - (A + 3) * d**2 + 1 if d <= 1 else A * (d**3 - 5 * d**2 + 8 * d - 4) if d < 2 else 0


def sampled(is_cubic):
    """The numbers at the places of the grid, by the formula."""
    result = np.zeros((5, 5))
    for i, j in np.ndindex(5, 5):
        x, y = ((grid[0, i, j].astype(np.float64) + 1) * SIZE - 1) / 2
        columns = np.array([weight(x - pixel, is_cubic) for pixel in range(SIZE)])
        rows = np.array([weight(y - pixel, is_cubic) for pixel in range(SIZE)])
        result[i, j] = rows @ image[0, 0] @ columns
    return result


graph = helper.make_graph(
    [helper.make_node("GridSample", ["image", "grid"], ["y"], mode="cubic", padding_mode="zeros", align_corners=0)],
    "graph",
    [
        helper.make_tensor_value_info("image", TensorProto.FLOAT, image.shape),
        helper.make_tensor_value_info("grid", TensorProto.FLOAT, grid.shape),
    ],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 1, 5, 5))],
)
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), "network.onnx")
onnx.checker.check_model("network.onnx")
found = {"ONNX Runtime": onnxruntime.InferenceSession("network.onnx").run(None, {"image": image, "grid": grid})[0]}
network = cv2.dnn.readNetFromONNX("network.onnx")
network.setInput(image, "image")
network.setInput(grid, "grid")
found["OpenCV"] = network.forward()
_tools.mnnconvert("mnnconvert -f ONNX --modelFile network.onnx --MNNModel network.mnn --bizCode network".split())
network = MNN.nn.load_module_from_file("network.mnn", ["image", "grid"], ["y"])
inputs = [MNN.expr.const(value, list(value.shape), MNN.expr.NCHW) for value in (image, grid)]
found["MNN"] = np.array(network.forward(inputs)[0].read())
for name, y in found.items():
    cubic, linear = (float(abs(y[0, 0] - sampled(is_cubic)).max()) for is_cubic in (True, False))
    print(f"RESULT {name}: error {cubic:.1e}, from linear numbers {linear:.1e}")
    assert (cubic < 1e-4 and linear > 0.1) if name == "ONNX Runtime" else (cubic > 0.1 and linear < 1e-4)
END
sed -n 's/^RESULT //p' log
