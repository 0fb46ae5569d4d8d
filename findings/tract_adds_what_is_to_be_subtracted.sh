#!/usr/bin/env bash
# tract 0.23.9: a number for each channel less a convolution is computed as their sum, and one over a convolution as
# inf.
#
# Expected: Sub (numbers, convolution) subtracts the convolution.
# Happens: tract makes the numbers part of the convolution, as it may for Sub (convolution, numbers), without regard to
# their order, with kernels larger than 1 x 1. Nothing is said. A 1 x 1 kernel, a depthwise convolution, and one number
# for all channels are right. GlobalLpPool takes the mean of the squares where the standard takes their sum.
# Seen: all 1,024 numbers of 2 - conv(x) for each channel are 2 + conv(x), and all of 2 / conv(x) are infinite; of 10 x
# 10 pixels, the norm is a tenth.
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

rng = np.random.default_rng(0)
x = rng.normal(size=(1, 8, 10, 10)).astype(np.float32)


def both(nodes, **constants):
    """The numbers of ONNX Runtime and of tract."""
    arrays = [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape if name == "x" else None) for name in "xy"]
    model = helper.make_model(helper.make_graph(nodes, "g", infos[:1], infos[1:], arrays), ir_version=8)
    model.opset_import[0].version = 13
    onnx.save(onnx.shape_inference.infer_shapes(model), "network.onnx")
    exact = onnxruntime.InferenceSession("network.onnx").run(None, {"x": x})[0]
    return exact, tract.onnx().load("network.onnx").into_model().into_runnable().run([x])[0].to_numpy()


def close(found, exact):
    return np.allclose(found, exact, rtol=1e-3, atol=1e-3)


for kernel, group, shape in ((3, 1, (16, 1, 1)), (1, 1, (16, 1, 1)), (3, 8, (16, 1, 1)), (3, 1, (1,))):
    weight = rng.normal(size=(16, 8 // group, kernel, kernel)).astype(np.float32)
    numbers = np.full(shape, 2, np.float32)
    convolution = helper.make_node("Conv", ["x", "w"], ["z"], group=group)
    for operator, order in (("Sub", ["z", "numbers"]), ("Sub", ["numbers", "z"]), ("Div", ["numbers", "z"])):
        nodes = [convolution, helper.make_node(operator, order, ["y"])]
        exact, found = both(nodes, w=weight, numbers=numbers)
        is_right = close(found, exact)
        print(f"{kernel} x {kernel}, {group} groups, numbers {shape}, {operator} of {order}: right is {is_right}")
        if (kernel, group, shape) == (3, 1, (16, 1, 1)) and order[0] == "numbers":
            assert np.isinf(found).all() if operator == "Div" else close(found, 4 - exact)
        else:
            assert is_right

exact, found = both([helper.make_node("GlobalLpPool", ["x"], ["y"], p=2)])
print("GlobalLpPool: too small by", (exact / found).mean())
assert close(found * 10, exact)
END
