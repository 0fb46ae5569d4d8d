#!/usr/bin/env bash
# qonnx 1.0.0: QCDQToQuant computes other weights from codes with a zero point, or with a scale for each filter.
#
# The transformation replaces weights behind DequantizeLinear by floats and a Quant.
# Expected: the floats are (code - zero point) * scale of the filter, as DequantizeLinear computes them.
# Happens: the zero point is subtracted in 8 bits, so differences wrap around. The scales of filters multiply along the
# last axis, whatever `axis` says: where windows are as wide as there are filters, or a linear layer is square, they
# give wrong weights; else ValueError is raised. With one scale and zero point 0 weights are right. Nothing is said of
# wrong ones.
# Seen, as the largest weight and the largest change: one scale, int8: 1.28 0.00; one scale, uint8 with zero point 128:
# 1.28 2.55; 3 filters of 3x3, a scale each, int8: 3.84 2.55; 4 filters: ValueError.
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


def change(dtype, zero, filters, is_one_scale):
    """Largest weight, and largest change of a weight. The input is a dot, so the output is the flipped filters."""
    shape = (filters, 1, 3, 3)
    edges = np.iinfo(dtype)
    codes = np.random.default_rng(0).integers(edges.min, edges.max + 1, shape).astype(dtype)
    codes.flat[:2] = edges.min, edges.max
    codes[-1].flat[:2] = edges.min, edges.max
    scale = np.float32(0.01) * (np.array(1) if is_one_scale else np.arange(1, filters + 1))
    held = {"codes": codes, "scale": scale.astype(np.float32), "zero": np.full(scale.shape, zero, dtype)}
    axis = {} if is_one_scale else {"axis": 0}
    nodes = [
        helper.make_node("DequantizeLinear", ["codes", "scale", "zero"], ["weight"], **axis),
        helper.make_node("Conv", ["x", "weight"], ["y"]),
    ]
    ends = [[helper.make_tensor_value_info(*end)] for end in (("x", 1, (1, 1, 5, 5)), ("y", 1, (1, filters, 3, 3)))]
    held = [numpy_helper.from_array(np.asarray(value), name) for name, value in held.items()]
    file = helper.make_model(
        helper.make_graph(nodes, "filters", *ends, held), opset_imports=[helper.make_opsetid("", 17)], ir_version=9
    )
    model = ModelWrapper(file).transform(InferShapes())
    x = np.zeros((1, 1, 5, 5), np.float32)
    x[..., 2, 2] = 1
    before = execute_onnx(model, {"x": x})["y"]
    expected = (codes.astype(np.float32) - zero) * scale.reshape(-1, 1, 1, 1).astype(np.float32)
    assert np.allclose(before[0], expected[:, 0, ::-1, ::-1])
    model = model.transform(QCDQToQuant())
    assert [node.op_type for node in model.graph.node] == ["Quant", "Conv"]
    return abs(before).max(), abs(execute_onnx(model, {"x": x})["y"] - before).max()


for dtype, zero, filters, is_one_scale, wanted in (
    (np.int8, 0, 4, True, "1.28 0.00"),
    (np.uint8, 128, 4, True, "1.28 2.55"),
    (np.int8, 0, 3, False, "3.84 2.55"),
    (np.int8, 0, 4, False, "ValueError"),
):
    try:
        found = "{:.2f} {:.2f}".format(*change(dtype, zero, filters, is_one_scale))
    except ValueError as error:
        assert "broadcast" in str(error)
        found = "ValueError"
    scales = "one scale" if is_one_scale else f"{filters} scales"
    print(f"{scales}, {dtype.__name__}, zero point {zero}: largest weight and change {found}")
    assert found == wanted
END
