#!/usr/bin/env bash
# ONNX Runtime 1.32.0: quantize_static drops beta of a Gemm, and in one of its formats multiplies the bias by alpha.
#
# Expected: alpha A B + beta C, within rounding, as of the float file, or a Gemm in floats, as quantize_dynamic leaves
# it. torch.addmm is exported as such a Gemm.
# Happens: with the format QDQ, the default, the file says beta = 1, and the bias C is as before. With the format
# QOperator, alpha moreover multiplies the bias. Nothing is said. Without a bias, all is right.
# Seen, as largest error by largest output, QDQ and QOperator: alpha 1, beta 1: 0.010 0.010; 0.5, 1: 0.010 0.169; 1, 3:
# 0.375 0.375; 1, 0.5: 0.266 0.266; 0.5, 3: 0.395 0.558.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

random = np.random.default_rng(0)
inputs = random.normal(size=(64, 8)).astype(np.float32)
held = {"weight": random.normal(size=(8, 5)).astype(np.float32), "bias": random.normal(size=5).astype(np.float32)}


class Inputs(CalibrationDataReader):
    def __init__(self):
        self.left = iter([{"x": inputs}])

    def get_next(self):
        return next(self.left, None)


def outputs(path):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": inputs})[0]


for alpha, beta, right in ((1.0, 1.0, "both"), (0.5, 1.0, "QDQ"), (1.0, 3.0, ""), (1.0, 0.5, ""), (0.5, 3.0, "")):
    graph = helper.make_graph(
        [helper.make_node("Gemm", ["x", *held], ["y"], alpha=alpha, beta=beta)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [64, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [64, 5])],
        [numpy_helper.from_array(value, name) for name, value in held.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, "float.onnx")
    wanted = alpha * inputs @ held["weight"] + beta * held["bias"]
    assert np.allclose(outputs("float.onnx"), wanted, atol=1e-5)
    errors = []
    for form in (QuantFormat.QDQ, QuantFormat.QOperator):
        quantize_static("float.onnx", "quantized.onnx", Inputs(), quant_format=form)
        errors.append(abs(outputs("quantized.onnx") - wanted).max() / abs(wanted).max())
        assert (errors[-1] < 0.02) == (right in ("both", form.name))
        if form == QuantFormat.QDQ:
            gemm = next(node for node in onnx.load("quantized.onnx").graph.node if node.op_type == "Gemm")
            assert {a.name: a.f for a in gemm.attribute if a.name in ("alpha", "beta")} == {"alpha": alpha, "beta": 1.0}
    print(f"alpha {alpha}, beta {beta}: error of QDQ {errors[0]:.3f}, of QOperator {errors[1]:.3f}")
END
