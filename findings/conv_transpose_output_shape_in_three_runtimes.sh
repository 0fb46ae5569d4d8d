#!/usr/bin/env bash
# tract 0.23.9, MNN 3.6.1, OpenCV 5.0.0: a ConvTranspose with output_shape is moved by a pixel, or has another size.
#
# Expected: by the standard, output_shape cuts off stride * (inputs - 1) + kernel - output_shape pixels, half of them at
# each side, and of an odd number one more at the beginning, as ONNX Runtime has it.
# Happens: tract cuts all of them off at the end, and MNN one more there if they are odd, so the image is moved by a
# pixel, against its skip connections, too; OpenCV gives a larger image. Nothing is said.
# Seen, 6 x 6 pixels, kernel 3, stride 2: with output_shape 12 ONNX Runtime is right, tract and MNN have all 144 numbers
# wrong, and right one pixel further, OpenCV has 14 x 14; with 11 tract has all 121 wrong, and MNN none.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python tract==0.23.9 MNN==3.6.1 opencv-python-headless==5.0.0.93 \
    onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python - >log 2>&1 <<'END' || { cat log; exit 1; }
import _tools  # what the command mnnconvert calls
import cv2
import MNN
import numpy as np
import onnx
import onnxruntime
import tract
from onnx import TensorProto, helper, numpy_helper

generator = np.random.default_rng(0)
image, kernel = (generator.normal(size=shape).astype(np.float32) for shape in ((1, 2, 6, 6), (2, 1, 3, 3)))
whole = np.zeros((13, 13))
for i, j in np.ndindex(6, 6):
    whole[2 * i : 2 * i + 3, 2 * j : 2 * j + 3] += np.tensordot(image[0, :, i, j], kernel[:, 0].astype(np.float64), 1)


def run_opencv():
    network = cv2.dnn.readNetFromONNX("network.onnx")
    network.setInput(image)
    return network.forward()


def run_mnn():
    _tools.mnnconvert("mnnconvert -f ONNX --modelFile network.onnx --MNNModel network.mnn --bizCode network".split())
    network = MNN.nn.load_module_from_file("network.mnn", ["x"], ["y"])
    return np.array(network.forward(MNN.expr.const(image, list(image.shape), MNN.expr.NCHW)).read())


RUNTIMES = {
    "ONNX Runtime": lambda: onnxruntime.InferenceSession("network.onnx").run(None, {"x": image})[0],
    "tract": lambda: tract.onnx().load("network.onnx").into_model().into_runnable().run([image])[0].to_numpy(),
    "MNN": run_mnn,
    "OpenCV": run_opencv,
}
for size in (12, 11):
    graph = helper.make_graph(
        [helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[2, 2], output_shape=[size, size])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, image.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 1, size, size))],
        [numpy_helper.from_array(kernel, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), "network.onnx")
    onnx.checker.check_model("network.onnx", full_check=True)
    exact, moved = whole[1 : 1 + size, 1 : 1 + size], whole[:size, :size]
    for name, run in RUNTIMES.items():
        found = run()[0, 0]
        if name == "OpenCV":
            print(f"RESULT output_shape {size}, {name}: {found.shape}")
            assert found.shape != (size, size)
            continue
        wrong, wrong_moved = ((abs(found - numbers) > 1e-4).sum() for numbers in (exact, moved))
        print(f"RESULT output_shape {size}, {name}: {wrong} numbers wrong, {wrong_moved} from the moved image")
        is_moved = name == "tract" or (name == "MNN" and size == 12)
        assert (wrong, wrong_moved) == ((size**2, 0) if is_moved else (0, size**2))
END
sed -n 's/^RESULT //p' log
