#!/usr/bin/env bash
# onnxscript 0.7.2: its optimizer forgets dilations where it works out auto_pad, and pads ConvInteger with another code.
#
# Expected: optimize() keeps a network's numbers.
# Happens: it replaces auto_pad SAME by pads for a kernel without dilations, so images lose their edges. And it makes a
# Pad with the code 0 part of the ConvInteger behind it, which pads with its zero point. Nothing is said. Pads of a Conv
# of floats, and SAME without dilations, are right.
# Seen: a 3 x 3 kernel with dilations 2 makes 9 x 10 of 11 x 12 pixels, not 11 x 12. With a zero point of 100, 576 of
# 1,600 sums are wrong, those at the edges.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnxscript import optimizer


def network(nodes, kind, shape, **constants):
    arrays = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()]
    x = helper.make_tensor_value_info("x", kind, shape)
    y = helper.make_tensor_value_info("y", TensorProto.INT32 if kind == TensorProto.UINT8 else kind, None)
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y], arrays), ir_version=10)
    model.opset_import[0].version = 21
    model = onnx.shape_inference.infer_shapes(model)
    onnx.checker.check_model(model, full_check=True)
    return model


def shape(model):
    return [dimension.dim_value for dimension in model.graph.output[0].type.tensor_type.shape.dim]


def numbers(model, x):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})[0]


rng = np.random.default_rng(0)
weight = rng.normal(size=(16, 8, 3, 3)).astype(np.float32)
x = rng.normal(size=(1, 8, 11, 12)).astype(np.float32)
for dilation in (1, 2):
    for auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        options = {"dilations": [dilation, dilation]}
        node = helper.make_node("Conv", ["x", "w"], ["y"], auto_pad=auto_pad, **options)
        model = network([node], TensorProto.FLOAT, x.shape, w=weight)
        node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[dilation] * 4, **options)
        exact = numbers(network([node], TensorProto.FLOAT, x.shape, w=weight), x)
        found = numbers(optimizer.optimize(model), x)
        print(f"{auto_pad}, dilations {dilation}: {exact.shape[2:]} became {found.shape[2:]}")
        assert shape(model) == list(exact.shape) == [1, 16, 11, 12]
        if dilation == 2:
            assert found.shape == (1, 16, 9, 10)
            assert np.allclose(found, exact[:, :, 1:-1, 1:-1], atol=1e-4)
        else:
            assert np.allclose(found, exact, atol=1e-4)

codes = rng.integers(0, 256, (1, 8, 10, 10), dtype=np.uint8)
filters = rng.integers(0, 256, (16, 8, 3, 3), dtype=np.uint8)
wrong = {}
for zero in (0, 100):
    nodes = [
        helper.make_node("Pad", ["x", "pads"], ["padded"]),
        helper.make_node("ConvInteger", ["padded", "w", "zero"], ["y"]),
    ]
    constants = {"w": filters, "zero": np.uint8(zero), "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1])}
    model = network(nodes, TensorProto.UINT8, codes.shape, **constants)
    exact, optimized = numbers(model, codes), optimizer.optimize(model)
    found = numbers(optimized, codes)
    wrong[zero] = int((found != exact).sum())
    print(f"zero point {zero}: {wrong[zero]} of {exact.size:,} sums wrong,", *(n.op_type for n in optimized.graph.node))
    assert len(optimized.graph.node) == 1
    assert (found == exact)[:, :, 1:-1, 1:-1].all()
assert wrong == {0: 0, 100: 576}
END
