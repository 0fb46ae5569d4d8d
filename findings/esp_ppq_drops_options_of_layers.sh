#!/usr/bin/env bash
# esp-ppq 1.3.12: of ONNX files, it drops an epsilon, reductions and modes of old Pads, and swaps pads of ConvTranspose.
#
# Expected: the executor, whose outputs give the ranges and the reported errors of quantization, computes what the file
# says, as ONNX Runtime does, or refuses it, as it does for other options.
# Happens: InstanceNormalization has epsilon 1e-5 always. ScatterElements and ScatterND of a reduction replace numbers.
# ConvTranspose crops rows by the pads of columns, and columns by those of rows. A Pad up to opset 10, where mode and
# value were attributes, adds zeros in place of reflected and repeated pixels and of other values. Nothing is said.
# Seen, largest errors for normal numbers: epsilon 0.3 0.5, reductions 2 to 5, ConvTranspose with pads 0 1 1 0 12 and
# with 1 0 1 0 another shape, Pad of opset 10 0.7 to 2; 1e-6 or less for options that are the same in both directions,
# Pad of opset 13, and no reduction.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python esp-ppq==1.3.12 torch==2.15.0 onnx==1.19.1 onnxruntime==1.32.0 \
    numpy==2.4.6
environment/bin/python -W ignore - >log 2>&1 <<'END' || { cat log; exit 1; }
import numpy as np
import onnx
import onnxruntime
import torch
from esp_ppq.api import load_onnx_graph
from esp_ppq.executor import TorchExecutor
from onnx import TensorProto, helper, numpy_helper

draw = np.random.default_rng(0)
image = draw.normal(size=(1, 4, 6, 5)).astype(np.float32)
ones = np.ones(4, np.float32)
filters = draw.normal(size=(4, 4, 3, 3)).astype(np.float32)
places, updates = np.zeros((1, 2, 6, 5), np.int64), image[:, :2]
rows = np.int64([[0, 1], [0, 1]]), image[0, :2]
pads = [0, 0, 1, 1, 0, 0, 1, 2]
CASES = (
    ("InstanceNormalization", 13, (ones, ones), {"epsilon": 1e-5}, True),
    ("InstanceNormalization", 13, (ones, ones), {"epsilon": 0.3}, False),
    ("ScatterElements", 13, (places, updates), {"axis": 1}, True),
    ("ScatterElements", 16, (places, updates), {"axis": 1, "reduction": "add"}, False),
    ("ScatterElements", 18, (places, updates), {"axis": 1, "reduction": "max"}, False),
    ("ScatterND", 16, rows, {"reduction": "add"}, False),
    ("ConvTranspose", 13, (filters,), {"strides": [2, 2], "pads": [1, 1, 1, 1]}, True),
    ("ConvTranspose", 13, (filters,), {"strides": [2, 2], "pads": [0, 1, 1, 0]}, False),
    ("ConvTranspose", 13, (filters,), {"strides": [2, 2], "pads": [0, 0, 1, 1]}, True),
    ("ConvTranspose", 13, (filters,), {"strides": [2, 2], "pads": [1, 0, 1, 0]}, False),
    ("Pad", 13, (np.int64(pads),), {"mode": "reflect"}, True),
    ("Pad", 10, (), {"pads": pads, "mode": "constant"}, True),
    ("Pad", 10, (), {"pads": pads, "mode": "constant", "value": 0.7}, False),
    ("Pad", 10, (), {"pads": pads, "mode": "reflect"}, False),
    ("Pad", 10, (), {"pads": pads, "mode": "edge"}, False),
)
for kind, opset, held, options, is_right in CASES:
    names = [f"held{place}" for place in range(len(held))]
    graph = helper.make_graph(
        [helper.make_node(kind, ["x", *names], ["y"], **options)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, image.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in zip(names, held, strict=True)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, "network.onnx")
    wanted = onnxruntime.InferenceSession("network.onnx").run(None, {"x": image})[0]
    (found,) = TorchExecutor(load_onnx_graph("network.onnx"), device="cpu").forward(torch.tensor(image))
    error = abs(found.numpy() - wanted).max() if found.shape == wanted.shape else "another shape"
    print(f"RESULT {kind} of opset {opset}, {options}: {error}")
    assert (error < 1e-3) if is_right else (error == "another shape" or error > 0.1)
END
sed -n 's/^RESULT //p' log
