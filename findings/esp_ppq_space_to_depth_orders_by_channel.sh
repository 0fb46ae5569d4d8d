#!/usr/bin/env bash
# esp-ppq 1.3.12: SpaceToDepth of an ONNX file has its channels in the order of PyTorch's pixel_unshuffle.
#
# Expected: the standard puts all channels of the first pixel of a block first, then all of the second, as ONNX Runtime
# and TensorFlow do.
# Happens: the executor puts the four pixels of the first channel first. Shapes are the same, and nothing is said, so
# the convolution behind it reads other channels, and calibration takes ranges of wrong numbers. DepthToSpace is right.
# Seen, 3 channels, blocks of 2: output channel k is channel (0 0 0 0 1 1 1 1 2 2 2 2)[k], where the standard has 0 1 2
# 0 1 2 0 1 2 0 1 2; with 1 channel all numbers are right.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python esp-ppq==1.3.12 torch==2.15.0 onnx==1.19.1 onnxruntime==1.32.0 \
    numpy==1.26.4
environment/bin/python -W ignore - >output 2>errors <<'END' || { cat output errors; exit 1; }
import numpy as np
import onnx
import onnxruntime
import torch
from esp_ppq.api import load_onnx_graph
from esp_ppq.executor import TorchExecutor
from onnx import TensorProto, helper


def run(operator, image, shape):
    """What ONNX Runtime and esp-ppq give."""
    graph = helper.make_graph(
        [helper.make_node(operator, ["x"], ["y"], blocksize=2)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, image.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), "network.onnx")
    onnx.checker.check_model("network.onnx", full_check=True)
    expected = onnxruntime.InferenceSession("network.onnx").run(None, {"x": image})[0]
    return expected, TorchExecutor(load_onnx_graph("network.onnx"), device="cpu")(torch.from_numpy(image))[0].numpy()


for channels in (3, 1):
    image = np.repeat(np.arange(channels), 16).reshape(1, channels, 4, 4) + np.arange(16).reshape(4, 4) / 100
    image = image.astype(np.float32)
    blocks = image.reshape(1, channels, 2, 2, 2, 2)
    exact = blocks.transpose(0, 3, 5, 1, 2, 4).reshape(1, -1, 2, 2)
    by_channel = blocks.transpose(0, 1, 3, 5, 2, 4).reshape(1, -1, 2, 2)
    expected, found = run("SpaceToDepth", image, exact.shape)
    order = [[int(plane[0, 0]) for plane in y[0]] for y in (expected, found)]
    print(f"RESULT {channels} channels: ONNX Runtime", *order[0], "esp-ppq", *order[1])
    assert np.array_equal(expected, exact)
    assert np.array_equal(found, by_channel)
    assert np.array_equal(found, exact) == (channels == 1)
    expected, found = run("DepthToSpace", exact, image.shape)
    assert np.array_equal(expected, image)
    assert np.array_equal(found, image)
END
sed -n 's/^RESULT //p' output
