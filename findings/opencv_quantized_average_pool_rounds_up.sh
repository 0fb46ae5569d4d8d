#!/usr/bin/env bash
# OpenCV 5.0.0: QLinearAveragePool counts the padding, and has as many outputs as with ceil_mode, both not asked for.
#
# Expected: floor((size + pads - k) / stride) + 1 rows and columns, and averages over the picture alone,
# count_include_pad being 0: as ONNX Runtime has it.
# Happens: cv2.dnn divides by the whole window, so that the frame gets darker, and rounds the size up: an added row and
# column at the edge. Nothing is said. AveragePool between quantizers and in floats is right.
# Seen, for 3 x 3, stride 2, of bright codes: 9 x 9 with pads 1, 16 of 25 averages too small, by up to 0.53 of the
# largest, those along the frame; 8 x 8, pads 0, 4 x 4 outputs in place of 3 x 3; 8 x 8, pads 1, 5 x 5 in place of 4 x
# 4; 8 x 8, pads behind only, 7 of 16 wrong; 9 x 9 without pads: right.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python opencv-python-headless==5.0.0.93 onnx==1.23.2 \
    onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python - 2>errors <<'END' || { cat errors; exit 1; }
import cv2
import numpy as np
import onnxruntime
from onnx import helper, numpy_helper

node = helper.make_node
rng = np.random.default_rng(0)
constants = {"s": np.float32(0.05), "z": np.uint8(0)}


def compared(size, pads, style):
    x = rng.uniform(2, 12, (1, 1, size, size)).astype(np.float32)
    x = np.round(x * 20) / 20
    options = dict(kernel_shape=[3, 3], strides=[2, 2], pads=pads)
    nodes = [node("QuantizeLinear", ["x", "s", "z"], ["q"])]
    if style == "QLinearAveragePool":
        nodes += [node(style, ["q", "s", "z", "s", "z"], ["r"], domain="com.microsoft", **options)]
    else:
        nodes += [node("DequantizeLinear", ["q", "s", "z"], ["f"]), node(style, ["f"], ["a"], **options)]
        nodes += [node("QuantizeLinear", ["a", "s", "z"], ["r"])]
    nodes += [node("DequantizeLinear", ["r", "s", "z"], ["y"])]
    rows = (size + pads[0] + pads[2] - 3) // 2 + 1
    ends = [[helper.make_tensor_value_info(name, 1, [1, 1, n, n])] for name, n in (("x", size), ("y", rows))]
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph(nodes, "graph", *ends, tensors), opset_imports=opsets, ir_version=10)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0][0, 0]
    net = cv2.dnn.readNetFromONNX(np.frombuffer(model.SerializeToString(), np.uint8))
    net.setInput(x)
    found = net.forward()[0, 0]
    off = abs(found - expected) if found.shape == expected.shape else np.full(1, np.inf)
    wrong, most = int((off > 0.06).sum()), off.max() / expected.max()
    print(f"found {size} x {size}, pads {pads}, {style}: {found.shape}, wrong {wrong}, by {most:.2f}; {expected.shape}")
    return found.shape, expected.shape, wrong


before, both, behind = [0] * 4, [1] * 4, [0, 0, 1, 1]
assert compared(8, before, "QLinearAveragePool")[:2] == ((4, 4), (3, 3))
assert compared(8, both, "QLinearAveragePool")[:2] == ((5, 5), (4, 4))
assert compared(8, behind, "QLinearAveragePool") == ((4, 4), (4, 4), 7)
assert compared(9, before, "QLinearAveragePool") == ((4, 4), (4, 4), 0)
assert compared(9, both, "QLinearAveragePool") == ((5, 5), (5, 5), 16)
for size, pads in ((8, before), (8, both), (8, behind), (9, both)):
    assert compared(size, pads, "AveragePool")[2] == 0
END
