#!/usr/bin/env bash
# tract 0.23.9 and esp-ppq 1.3.12: Swish of an ONNX file is computed with alpha 1, whatever its alpha is.
#
# Expected: x * sigmoid(alpha * x), as the standard has it since opset 24 and ONNX Runtime computes it. alpha 1.702 is
# the quick form of GELU, which CLIP's and other networks have.
# Happens: both compute x * sigmoid(x). Nothing is said. esp-ppq takes ranges and errors for its steps from it.
# Seen, normal numbers, largest errors: alpha 1.702 0.18, alpha 0.5 0.41, for both; alpha 1 0.00.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python esp-ppq==1.3.12 tract==0.23.9 torch==2.15.0 onnx==1.19.1 \
    onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python -W ignore - >log 2>&1 <<'END' || { cat log; exit 1; }
import numpy as np
import onnx
import onnxruntime
import torch
import tract
from esp_ppq.api import load_onnx_graph
from esp_ppq.executor import TorchExecutor
from onnx import TensorProto, helper

image = np.random.default_rng(0).normal(size=(1, 3, 16, 16)).astype(np.float32)
for alpha in (1.0, 1.702, 0.5):
    graph = helper.make_graph(
        [helper.make_node("Swish", ["x"], ["y"], alpha=alpha)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, image.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, image.shape)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, "network.onnx")
    exact = image / (1 + np.exp(-alpha * image.astype(np.float64)))
    plain = image / (1 + np.exp(-image.astype(np.float64)))
    found = {
        "ONNX Runtime": onnxruntime.InferenceSession("network.onnx").run(None, {"x": image})[0],
        "tract": tract.onnx().load("network.onnx").into_model().into_runnable().run([image])[0].to_numpy(),
        "esp-ppq": TorchExecutor(load_onnx_graph("network.onnx"), device="cpu").forward(torch.tensor(image))[0].numpy(),
    }
    errors = {name: round(float(abs(output - exact).max()), 2) for name, output in found.items()}
    print(f"RESULT alpha {alpha}: errors", errors)
    for name, output in found.items():
        assert np.allclose(output, exact if name == "ONNX Runtime" else plain, atol=1e-3)
    assert errors["ONNX Runtime"] == 0
    assert alpha == 1 or min(errors["tract"], errors["esp-ppq"]) > 0.1
END
sed -n 's/^RESULT //p' log
