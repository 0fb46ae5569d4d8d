#!/usr/bin/env bash
# tract 0.23.9: Celu lacks the factor alpha below 0, and has a corner there.
#
# Expected: max(0, x) + min(0, alpha * (exp(x / alpha) - 1)), as PyTorch, ONNX Runtime and the standard have it: its
# slope is 1 on both sides of 0, which is what CELU was made for.
# Happens: below 0 tract gives exp(x / alpha) - 1. Nothing is said. With alpha 1, the default, there is no difference;
# Elu is right with every alpha.
# Seen, numbers from -5 to 5: for alpha 2 an error up to 0.92, for 0.5 up to 0.5; for 1, and for Elu, 0.0.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python tract==0.23.9 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnx
import onnxruntime
import tract
from onnx import TensorProto, helper

x = np.linspace(-5, 5, 101, dtype=np.float32)
for operator, alpha in (("Celu", 2.0), ("Celu", 0.5), ("Celu", 1.0), ("Elu", 2.0)):
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name in "xy"]
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"], alpha=alpha)], "graph", ends[:1], ends[1:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8), "network.onnx")
    negative = np.expm1(np.minimum(x, 0) / (alpha if operator == "Celu" else 1.0))
    exact, without = np.maximum(x, 0) + alpha * negative, np.maximum(x, 0) + negative
    right = onnxruntime.InferenceSession("network.onnx").run(None, {"x": x})[0]
    found = tract.onnx().load("network.onnx").into_model().into_runnable().run([x])[0].to_numpy()
    error = abs(found - exact).max()
    print(f"{operator} with alpha {alpha}: error {error:.2f}")
    assert abs(right - exact).max() < 1e-5
    assert (error < 1e-5) if operator == "Elu" or alpha == 1 else (error > 0.4 and abs(found - without).max() < 1e-5)
END
