#!/usr/bin/env bash
# OpenVINO 2026.4.1: MaxPool's indices with storage_order=1 are those of 0, moved to other maxima.
#
# Expected: storage_order=1 numbers the pixels by columns, as ONNX defines it and ONNX Runtime has it: each index stands
# where its maximum does, and says its place by columns. The indices have the shape of the maxima.
# Happens: the indices are numbers by rows, as with storage_order=0, and their rows and columns are swapped. So an index
# tells the place of another maximum, in the other order. For pictures that are not square, the indices have another
# shape than the maxima and than the file's own shape inference says. Nothing is said. The maxima are right.
# Seen, random 4 x 4 pixels by 2 x 2 windows, maxima at 1, 3, 8 and 15 by rows: by columns ONNX Runtime 4 12 2 15,
# OpenVINO 1 8 3 15. Indices of 4 x 6 pixels: 2 x 3 and 3 x 2.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 openvino==2026.4.1 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
from importlib.metadata import version

import numpy as np
import onnx
import onnxruntime
import openvino
from onnx import TensorProto, helper

print("OpenVINO", openvino.__version__, "ONNX Runtime", version("onnxruntime"))


def run(x, order):
    shape = [*x.shape[:2], x.shape[2] // 2, x.shape[3] // 2]
    node = helper.make_node(
        "MaxPool", ["x"], ["maxima", "indices"], kernel_shape=[2, 2], strides=[2, 2], storage_order=order
    )
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)]
    outputs = [
        helper.make_tensor_value_info("maxima", TensorProto.FLOAT, shape),
        helper.make_tensor_value_info("indices", TensorProto.INT64, shape),
    ]
    graph = helper.make_graph([node], "graph", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    data = model.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    core = openvino.Core()
    results = core.compile_model(core.read_model(data), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})({"x": x})
    found = results[0], results[1]
    right = session.run(None, {"x": x})
    assert np.array_equal(right[0], found[0])
    # Each index of ONNX Runtime is the place of its maximum.
    flat = x if order == 0 else x.swapaxes(2, 3)
    flat = flat.reshape(*x.shape[:2], -1)
    planes = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], 1, 1) * flat.shape[-1]
    assert np.array_equal(flat.ravel()[right[1]], right[0]) and (right[1] >= planes).all()
    return right[1], found[1]


random = np.random.default_rng(0)
for shape in ((1, 1, 4, 4), (2, 3, 8, 8), (1, 2, 4, 6)):
    x = random.permutation(np.prod(shape)).reshape(shape).astype(np.float32)
    for order in (0, 1):
        right, found = run(x, order)
        same = right.shape == found.shape and np.array_equal(right, found)
        print(f"{shape}, storage_order {order}: shapes {right.shape}, {found.shape}; equal {same}", end=" ")
        print(*(right.ravel(), found.ravel()) if right.size == 4 else "")
        if order == 0:
            by_rows = right
            assert same
        else:
            assert not same and np.array_equal(found, by_rows.swapaxes(2, 3))
END
