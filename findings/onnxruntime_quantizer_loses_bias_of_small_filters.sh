#!/usr/bin/env bash
# ONNX Runtime 1.32.0: quantize_static loses the bias of a filter with small weights, if weights are QUInt8 or QInt4.
#
# Filters that die in training have such weights, and after batch normalization is joined with them, a bias.
# Expected: with per_channel=True, the error of a filter's output is that of its 8 or 4 bits, and of the output's.
# Happens: the bias has 32 bits and the step of the input times that of the filter, so it ends at 2**31 of these steps.
# For QInt8 the tool makes the filter's step larger. For QUInt8 and QInt4 it does not, the bias ends there, and the sum
# with what the filter adds can wrap around to the other sign. Nothing is said.
# Seen, as the error of a filter with bias -1.4 and weights up to 1e-2, 1e-6, 1e-8, 1e-12:
# QInt8 0.04 0.02 0.03 0.01; QUInt8 0.03 1.87 1.40 1.40; QInt4 0.04 0.00 1.33 1.40.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6 ml-dtypes==0.6.0
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

generator = np.random.default_rng(0)
image = generator.normal(size=(1, 4, 16, 16)).astype(np.float32)
bias = np.array([0.3, -1.4], np.float32)


class Images(CalibrationDataReader):
    def __init__(self):
        self.images = iter([{"x": image}])

    def get_next(self):
        return next(self.images, None)


def outputs(path):
    return onnxruntime.InferenceSession(path).run(None, {"x": image})[0]


def error(largest, weight_type):
    weight = generator.uniform(-1, 1, (2, 4, 3, 3)).astype(np.float32)
    weight[1] *= largest
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "weight", "bias"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2, 14, 14])],
        [numpy_helper.from_array(weight, "weight"), numpy_helper.from_array(bias, "bias")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), "float.onnx")
    quantize_static(
        "float.onnx",
        "codes.onnx",
        Images(),
        quant_format=QuantFormat.QDQ,
        activation_type=QuantType.QUInt8,
        weight_type=weight_type,
        per_channel=True,
    )
    return float(abs(outputs("codes.onnx") - outputs("float.onnx"))[:, 1].max())


for weight_type in (QuantType.QInt8, QuantType.QUInt8, QuantType.QInt4):
    errors = {largest: error(largest, weight_type) for largest in (1e-2, 1e-6, 1e-8, 1e-12)}
    print(weight_type.name, *(f"{each:.2f}" for each in errors.values()))
    assert errors[1e-2] < 0.1
    assert all(errors[largest] > 1 for largest in (1e-8, 1e-12)) == (weight_type != QuantType.QInt8)
    assert errors[1e-6] > 1.4 if weight_type == QuantType.QUInt8 else errors[1e-6] < 0.1
    assert weight_type != QuantType.QInt8 or max(errors.values()) < 0.1
END
