#!/usr/bin/env bash
# qonnx 1.0.0: QCDQToQuant takes a Clip only for its count of codes, so codes 0 to 7 of int8 become -4 to 3.
#
# The transformation makes one Quant of QuantizeLinear, Clip and DequantizeLinear, the form in which files hold codes of
# fewer than 8 bits.
# Expected: Quant keeps the range of the Clip, or the nodes stay, as Quant has ranges of 2^n codes, or one less, alone.
# Happens: the number of bits is the logarithm of the Clip's count of codes, rounded up, and the sign is that of the
# type. So a ReLU's codes in int8 lose their larger half and get negative ones, and ranges of 3 or 5 codes are as those
# of 4 or 8. Nothing is said.
# Seen, as smallest and largest output before and after: int8 -8 to 7: -8 7, -8 7; int8 0 to 7: 0 7, -4 3; int8 0 to 1:
# 0 1, -1 1; int8 -3 to 4: -3 4, -4 3; uint8 0 to 15: 0 15, 0 15; uint8 0 to 4: 0 4, 0 7; uint8 0 to 2 with zero point
# 1: -1 1, -1 2.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python qonnx==1.0.0 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python -W ignore - <<'END'
import numpy as np
from onnx import helper, numpy_helper
from qonnx.core.modelwrapper import ModelWrapper
from qonnx.core.onnx_exec import execute_onnx
from qonnx.transformation.infer_shapes import InferShapes
from qonnx.transformation.qcdq_to_qonnx import QCDQToQuant

x = np.arange(-20, 21, dtype=np.float32)[None]


def ranges(dtype, low, high, zero):
    """Smallest and largest output, of the file and of the transformed one."""
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["codes"]),
        helper.make_node("Clip", ["codes", "low", "high"], ["kept"]),
        helper.make_node("DequantizeLinear", ["kept", "scale", "zero"], ["y"]),
    ]
    held = {"scale": np.float32(1), "zero": dtype(zero), "low": dtype(low), "high": dtype(high)}
    held = [numpy_helper.from_array(np.array(value), name) for name, value in held.items()]
    ends = [[helper.make_tensor_value_info(name, 1, x.shape)] for name in "xy"]
    file = helper.make_model(
        helper.make_graph(nodes, "codes", *ends, held), opset_imports=[helper.make_opsetid("", 17)], ir_version=9
    )
    model = ModelWrapper(file).transform(InferShapes())
    before = execute_onnx(model, {"x": x})["y"]
    model = model.transform(QCDQToQuant())
    assert [node.op_type for node in model.graph.node] == ["Quant"]
    after = execute_onnx(model, {"x": x})["y"]
    return [int(edge) for y in (before, after) for edge in (y.min(), y.max())]


for dtype, low, high, zero, wanted in (
    (np.int8, -8, 7, 0, [-8, 7, -8, 7]),
    (np.int8, 0, 7, 0, [0, 7, -4, 3]),
    (np.int8, 0, 1, 0, [0, 1, -1, 1]),
    (np.int8, -3, 4, 0, [-3, 4, -4, 3]),
    (np.uint8, 0, 15, 0, [0, 15, 0, 15]),
    (np.uint8, 0, 4, 0, [0, 4, 0, 7]),
    (np.uint8, 0, 2, 1, [-1, 1, -1, 2]),
):
    found = ranges(dtype, low, high, zero)
    print(dtype.__name__, f"{low} to {high}, zero point {zero}: before", *found[:2], "after", *found[2:])
    assert found == wanted
END
