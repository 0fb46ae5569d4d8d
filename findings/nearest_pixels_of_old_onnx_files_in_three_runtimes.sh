#!/usr/bin/env bash
# OpenVINO 2026.4.1, tinygrad 0.14.0, tract 0.23.9: of old ONNX files, nearest pixels of a fractional factor are others.
#
# PyTorch's interpolate(mode="nearest") is an Upsample in files of opset 9, and a Resize without options in opset 10.
# Expected: output i is pixel floor(i / factor), as in PyTorch and ONNX Runtime, and as the same libraries have it for
# newer files, which say "asymmetric" and "floor".
# Happens: OpenVINO and tinygrad take other pixels in an Upsample, tract in a Resize of opset 10. Nothing is said. For
# the factor 2 all are right, and OpenVINO is right in a Resize of opset 10.
# Seen, a row of pixels 0 to 8, factor 1.3: PyTorch and ONNX Runtime 0 0 1 2 3 3 4 5 6 6 7, OpenVINO
# and tinygrad 0 1 1 2 3 4 4 5 6 7 8, tract 0 1 2 2 3 4 5 5 6 7 8.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 openvino==2026.4.1 \
    tinygrad==0.14.0 tract==0.23.9 torch==2.15.0 numpy==2.4.6
DEV=CPU environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnx
import onnxruntime
import openvino
import torch
import tract
from onnx import TensorProto, helper, numpy_helper
from tinygrad import Tensor
from tinygrad.nn.onnx import OnnxRunner

row = np.arange(9, dtype=np.float32).reshape(1, 1, 1, 9)


def by_onnxruntime():
    session = onnxruntime.InferenceSession("network.onnx", providers=["CPUExecutionProvider"])
    return session.run(None, {"x": row})[0]


def by_openvino():
    return openvino.Core().compile_model("network.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([row])[0]


def by_tinygrad():
    return OnnxRunner("network.onnx")({"x": Tensor(row)})["y"].numpy()


def by_tract():
    return tract.onnx().load("network.onnx").into_model().into_runnable().run([row])[0].to_numpy()


def save(opset, factor):
    options = {"mode": "nearest"}
    if opset >= 11:
        options |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    inputs = ["x", "scales"] if opset < 11 else ["x", "", "scales"]
    graph = helper.make_graph(
        [helper.make_node("Upsample" if opset == 9 else "Resize", inputs, ["y"], **options)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, row.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.float32([1, 1, 1, factor]), "scales")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    model = onnx.shape_inference.infer_shapes(model)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, "network.onnx")


runtimes = {"OpenVINO": by_openvino, "tinygrad": by_tinygrad, "tract": by_tract}
wrong = {("OpenVINO", 9), ("tinygrad", 9), ("tract", 10)}
refused = {("tract", 9), ("tinygrad", 10)}
for opset in (9, 10, 13):
    for factor in (1.3, 1.6, 2.0):
        save(opset, factor)
        wanted = torch.nn.functional.interpolate(torch.tensor(row), scale_factor=(1, factor), mode="nearest").numpy()
        assert np.array_equal(by_onnxruntime(), wanted)
        print(f"opset {opset}, factor {factor}: PyTorch and ONNX Runtime", *wanted.ravel().astype(int))
        for name, run in runtimes.items():
            if (name, opset) in refused:
                continue
            found = run()
            print(f"  {name}", *found.ravel().astype(int))
            assert found.shape == wanted.shape
            assert factor == 2 or np.array_equal(found, wanted) == ((name, opset) not in wrong)
END
