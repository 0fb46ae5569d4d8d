#!/usr/bin/env bash
# ONNX Runtime 1.32.0: weights of 4 bits have 8 from quantize_static in one of its formats, and 3 with reduce_range.
#
# Expected: weight_type=QInt4 gives int4 codes from -8 to 7 or -7 to 7, or an error, as with QuantFormat.QOperator and
# per_channel=False. reduce_range, which makes room for sums of 8-bit products, leaves 4 bits as they are.
# Happens: with QuantFormat.QOperator and per_channel=True, weights of every type become int8 codes, and the file is
# twice as large. With QuantFormat.QDQ, reduce_range takes one of the 4 bits. Nothing is said.
# Seen: QDQ INT4 -8 to 7; QDQ, reduce_range INT4 -4 to 4; QOperator INT8 -127 to 127, QUInt8 and QUInt4 the same;
# QOperator, not per channel: "Quantized weights for weight_quantized must be 8-bit before packing as 4-bit values."
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6 ml-dtypes==0.6.0
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

generator = np.random.default_rng(0)
image = generator.normal(size=(1, 4, 8, 8)).astype(np.float32)
weight = generator.normal(size=(4, 4, 3, 3)).astype(np.float32)
graph = helper.make_graph(
    [helper.make_node("Conv", ["x", "weight"], ["y"])],
    "graph",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4, 8, 8])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 6, 6])],
    [numpy_helper.from_array(weight, "weight")],
)
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), "float.onnx")


class Images(CalibrationDataReader):
    def __init__(self):
        self.images = iter([{"x": image}])

    def get_next(self):
        return next(self.images, None)


def codes(weight_type, quant_format, per_channel=True, reduce_range=False):
    quantize_static(
        "float.onnx",
        "codes.onnx",
        Images(),
        quant_format=quant_format,
        activation_type=QuantType.QUInt8,
        weight_type=weight_type,
        per_channel=per_channel,
        reduce_range=reduce_range,
    )
    (held,) = (each for each in onnx.load("codes.onnx").graph.initializer if each.name == "weight_quantized")
    values = numpy_helper.to_array(held).astype(int)
    found = TensorProto.DataType.Name(held.data_type), int(values.min()), int(values.max())
    print(weight_type.name, quant_format.name, f"reduce_range={reduce_range}:", *found)
    return found


assert codes(QuantType.QInt4, QuantFormat.QDQ) == ("INT4", -8, 7)
assert codes(QuantType.QInt4, QuantFormat.QDQ, reduce_range=True) == ("INT4", -4, 4)
for weight_type in (QuantType.QInt4, QuantType.QUInt4, QuantType.QUInt8):
    assert codes(weight_type, QuantFormat.QOperator) == ("INT8", -127, 127)
try:
    codes(QuantType.QInt4, QuantFormat.QOperator, per_channel=False)
except RuntimeError as error:
    print("not per channel:", error)
else:
    raise AssertionError("4 bits in QOperator are accepted")
END
