#!/usr/bin/env bash
# MNN 3.6.1: a bicubic Resize of an ONNX file takes the first rows and columns from one pixel further inside.
#
# Expected: ONNX's weights of four pixels in each direction, as ONNX Runtime has them, and MNN at all other places.
# Happens: with half_pixel and pytorch_half_pixel, as PyTorch's interpolate(mode="bicubic") is exported, an image that
# becomes larger begins left of its first pixel, at -0.25 for a factor of 2. MNN takes 0.75 for -0.25, and so for each
# negative place. Nothing is said. With the coordinates asymmetric, or made smaller, images are right.
# Seen, 8 x 8 random pixels, the largest 2.3, factors 1.5, 2 and 4: errors up to 2.4, 2.4 and 2.7 in the first row and
# column, with 4 in the first two, and 0.0 elsewhere.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python MNN==3.6.1 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python - >log 2>&1 <<'END' || { cat log; exit 1; }
import _tools  # what the command mnnconvert calls, after installing packages of its own by pip
import MNN
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

SIZE = 8


def matrix(factor, coordinates, shifted=False):
    """The weights of all pixels of a row for each pixel of the resized row, by ONNX's formula or at MNN's places."""
    result, a = np.zeros((int(SIZE * factor), SIZE)), -0.75
    for target, weights in enumerate(result):
        place = target / factor if coordinates == "asymmetric" else (target + 0.5) / factor - 0.5
        place += shifted and place < 0
        for pixel in range(int(np.floor(place)) - 1, int(np.floor(place)) + 3):
            d = abs(place - pixel)
            near, far = (a + 2) * d**3 - (a + 3) * d**2 + 1, a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a
            weights[min(max(pixel, 0), SIZE - 1)] += near if d <= 1 else far
    return result


def resize(image, factor, coordinates):
    """What ONNX Runtime and MNN give."""
    graph = helper.make_graph(
        [helper.make_node("Resize", ["x", "", "s"], ["y"], mode="cubic", coordinate_transformation_mode=coordinates)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, image.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.array([1, 1, factor, factor], np.float32), "s")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, "network.onnx")
    right = onnxruntime.InferenceSession("network.onnx").run(None, {"x": image})[0]
    _tools.mnnconvert("mnnconvert -f ONNX --modelFile network.onnx --MNNModel network.mnn --bizCode network".split())
    network = MNN.nn.load_module_from_file("network.mnn", ["x"], ["y"])
    return right, np.array(network.forward(MNN.expr.const(image, list(image.shape), MNN.expr.NCHW)).read())


image = np.random.default_rng(0).normal(size=(1, 1, SIZE, SIZE)).astype(np.float32)
for coordinates in ("pytorch_half_pixel", "half_pixel", "asymmetric"):
    for factor, seen in ((1.5, 2.4), (2, 2.4), (4, 2.7), (0.5, 0)):
        right, found = resize(image, factor, coordinates)
        rows, shifted_rows = matrix(factor, coordinates), matrix(factor, coordinates, shifted=True)
        exact, shifted = rows @ image[0, 0] @ rows.T, shifted_rows @ image[0, 0] @ shifted_rows.T
        assert abs(right[0, 0] - exact).max() < 1e-5
        assert abs(found[0, 0] - shifted).max() < 1e-5
        error = abs(found[0, 0] - exact)
        first = int(np.ceil((factor - 1) / 2)) if factor > 1 else 0
        print(f"RESULT {coordinates} {factor}: error {error.max():.1f}, behind {first} rows and columns", end=" ")
        print(f"{error[first:, first:].max():.1f}")
        assert abs(error.max() - (0 if coordinates == "asymmetric" else seen)) < 0.06
        assert error[first:, first:].max() < 1e-5
END
sed -n 's/^RESULT //p' log
