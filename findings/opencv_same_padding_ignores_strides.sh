#!/usr/bin/env bash
# OpenCV 5.0.0: auto_pad SAME_UPPER pads as if the stride were 1, and SAME_LOWER puts the odd pixel on the wrong side.
#
# Expected: ONNX's rule, and ONNX Runtime's numbers: the least padding for ceil(size / stride) outputs. TensorFlow's
# "same" is exported so: a filter of 3, stride 2, of an even picture pads 0 before and 1 behind.
# Happens: cv2.dnn pads (k - 1) / 2 before, whatever the stride. The outputs are those of a picture moved by one pixel,
# in the first layer of a MobileNet, in floats, between quantizers and in pools. The size is right and nothing is said.
# With SAME_LOWER, filters of even size pad behind.
# Seen, largest difference in sizes of the largest output, pictures of 8 x 8 and 224 x 224: SAME_UPPER, filter 3, stride
# 2: Conv 1.96 and 1.42, between quantizers 1.45 and 1.30, MaxPool 0.69 and 0.96, AveragePool 1.33 and 1.02; SAME_LOWER,
# filter 2, stride 1: 1.01 to 1.30. At most a code for stride 1, odd pictures, and the same padding written as pads.
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
from onnx import helper, numpy_helper

rng = np.random.default_rng(0)
node = helper.make_node


def share(kind, size, kernel, stride, pads):
    """The largest difference of the two runtimes, in sizes of the largest output."""
    constants = {"w": rng.integers(-127, 128, (4, 1, kernel, kernel)).astype(np.int8)}
    constants |= {"s": np.float32(0.05), "z": np.int8(3), "ws": np.float32(0.01), "t": np.float32(0.2)}
    shape = dict(kernel_shape=[kernel] * 2, strides=[stride] * 2, **pads)
    between = ["a", "f"] if kind == "quantized Conv" else ["x", "f"]
    nodes = [node("DequantizeLinear", ["w", "ws"], ["f"])] if "Conv" in kind else []
    if kind == "quantized Conv":
        nodes += [node("QuantizeLinear", ["x", "s", "z"], ["q"]), node("DequantizeLinear", ["q", "s", "z"], ["a"])]
        nodes += [node("Conv", between, ["c"], **shape), node("QuantizeLinear", ["c", "t", "z"], ["r"])]
        nodes += [node("DequantizeLinear", ["r", "t", "z"], ["y"])]
    else:
        nodes += [node(kind, between if kind == "Conv" else ["x"], ["y"], **shape)]
    used = {name for one in nodes for name in one.input}
    x = (rng.normal(size=(1, 1, size, size)) * 2).astype(np.float32)
    tensors = [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items() if name in used]
    ends = [helper.make_tensor_value_info(name, 1, shape) for name, shape in (("x", x.shape), ("y", None))]
    graph = helper.make_graph(nodes, "graph", ends[:1], ends[1:], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    expected = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    net = cv2.dnn.readNetFromONNX(np.frombuffer(model.SerializeToString(), np.uint8))
    net.setInput(x)
    found = net.forward()
    assert found.shape == expected.shape
    return abs(found - expected).max() / abs(expected).max()


upper, lower, given = {"auto_pad": "SAME_UPPER"}, {"auto_pad": "SAME_LOWER"}, {"pads": [0, 0, 1, 1]}
for kind in ("Conv", "quantized Conv", "MaxPool", "AveragePool"):
    for size in (8, 224):
        wrong = [share(kind, size, 3, 2, upper), share(kind, size, 2, 1, lower)]
        right = [share(kind, size, 3, 2, given), share(kind, size, 3, 1, upper), share(kind, size + 1, 3, 2, upper)]
        print(f"found {kind} {size}: SAME_UPPER {wrong[0]:.2f}, SAME_LOWER {wrong[1]:.2f}; others {max(right):.3f}")
        assert min(wrong) > 0.5 and max(right) < 0.03
END
