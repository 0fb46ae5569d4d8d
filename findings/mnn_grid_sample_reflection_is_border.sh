#!/usr/bin/env bash
# MNN 3.6.1: GridSample of an ONNX file with padding_mode "reflection" repeats the border.
#
# Expected: places outside of the image are reflected at its edges, as PyTorch's grid_sample, the standard's evaluator
# and ONNX Runtime do.
# Happens: MNN gives the numbers of padding_mode "border". Nothing is said.
# Seen, a row of pixels 0 to 5, places from -3 to 3 of the width: ONNX Runtime 5 4 2.5 1 0 1 2.5 4 5 4 2.5 1 0, MNN 0 0
# 0 0 0 1 2.5 4 5 5 5 5 5, which is what "border" gives in both.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python MNN==3.6.1 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python - >log 2>&1 <<'END' || { cat log; exit 1; }
import _tools  # what the command mnnconvert calls
import MNN
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

image = np.tile(np.arange(6, dtype=np.float32), (1, 1, 6, 1))
grid = np.zeros((1, 1, 13, 2), np.float32)
grid[..., 0] = np.linspace(-3, 3, 13)
places = ((grid[0, 0, :, 0] + 1) * 6 - 1) / 2
border = np.clip(places, 0, 5)
reflected = np.clip(5.5 - abs((places + 0.5) % 12 - 6), 0, 5)
for padding, exact in (("reflection", reflected), ("border", border)):
    graph = helper.make_graph(
        [helper.make_node("GridSample", ["image", "grid"], ["y"], padding_mode=padding, align_corners=0)],
        "graph",
        [
            helper.make_tensor_value_info("image", TensorProto.FLOAT, image.shape),
            helper.make_tensor_value_info("grid", TensorProto.FLOAT, grid.shape),
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, (1, 1, 1, 13))],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 16)], ir_version=8), "network.onnx")
    onnx.checker.check_model("network.onnx", full_check=True)
    right = onnxruntime.InferenceSession("network.onnx").run(None, {"image": image, "grid": grid})[0].ravel()
    _tools.mnnconvert("mnnconvert -f ONNX --modelFile network.onnx --MNNModel network.mnn --bizCode network".split())
    network = MNN.nn.load_module_from_file("network.mnn", ["image", "grid"], ["y"])
    inputs = [MNN.expr.const(value, list(value.shape), MNN.expr.NCHW) for value in (image, grid)]
    found = np.array(network.forward(inputs)[0].read()).ravel()
    print(f"RESULT {padding}: ONNX Runtime", *right.round(2), "MNN", *found.round(2))
    assert abs(right - exact).max() < 1e-4
    assert abs(found - border).max() < 1e-4
assert abs(reflected - border).max() == 5
END
sed -n 's/^RESULT //p' log
