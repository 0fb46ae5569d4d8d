#!/usr/bin/env bash
# OpenCV 5.0.0: a MaxPool between quantizers loses its dilations, and gives a larger image.
#
# Expected: with a kernel of 2 x 2 and dilations 2, each number is the largest of four pixels two apart, 6 x 6 of 8 x 8.
# Happens: cv2.dnn makes one int8 layer of DequantizeLinear, MaxPool and QuantizeLinear, and that layer takes
# neighbours: 7 x 7 numbers. Layers that accept any size, as a global pool does, say nothing. The float MaxPool is
# right.
# Seen, 8 x 8 pixels: (1, 1, 7, 7), equal to the pool without dilations; of floats (1, 1, 6, 6), all right; the mean of
# the image behind them is 1.62, not 1.46.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python opencv-python-headless==5.0.0.93 onnx==1.23.2 numpy==2.4.6
environment/bin/python - 2>errors <<'END' || { cat errors; exit 1; }
import cv2
import numpy as np
from onnx import TensorProto, helper, numpy_helper

image = np.random.default_rng(0).integers(-40, 40, (1, 1, 8, 8)).astype(np.float32) * np.float32(0.0625)


def run(is_quantized, has_mean):
    """What OpenCV gives for the pool, with or without quantizers around it, and the mean of the image behind it."""
    pool = helper.make_node("MaxPool", ["a"], ["b"], kernel_shape=[2, 2], dilations=[2, 2])
    before = [
        helper.make_node("QuantizeLinear", ["x", "step", "zero"], ["p"]),
        helper.make_node("DequantizeLinear", ["p", "step", "zero"], ["a"]),
    ]
    behind = [
        helper.make_node("QuantizeLinear", ["b", "step", "zero"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "step", "zero"], ["c"]),
    ]
    pooled = [*before, pool, *behind] if is_quantized else [helper.make_node("Identity", ["x"], ["a"]), pool]
    last = helper.make_node("GlobalAveragePool" if has_mean else "Identity", ["c" if is_quantized else "b"], ["y"])
    graph = helper.make_graph(
        [*pooled, last],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, image.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 1, 1, 1) if has_mean else (1, 1, 6, 6))],
        [numpy_helper.from_array(np.float32(0.0625), "step"), numpy_helper.from_array(np.uint8(128), "zero")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    network = cv2.dnn.readNetFromONNX(np.frombuffer(model.SerializeToString(), np.uint8))
    network.setInput(image, "x")
    return network.forward()


def largest(distance):
    size = 8 - distance
    return np.max([image[..., i : i + size, j : j + size] for i in (0, distance) for j in (0, distance)], 0)


quantized, floats = run(True, False), run(False, False)
means = run(True, True).item(), run(False, True).item()
print("found shapes", quantized.shape, floats.shape, f"means {means[0]:.2f} {means[1]:.2f}")
assert quantized.shape == (1, 1, 7, 7)
assert np.array_equal(quantized, largest(1))
assert np.array_equal(floats, largest(2))
assert abs(means[0] - largest(1).mean()) < 0.01
assert abs(means[1] - largest(2).mean()) < 1e-6
END
