#!/usr/bin/env bash
# onnx2torch 1.5.15: ReduceMax, ReduceMin and ReduceProd over axes -2 and -1 reduce columns or rows, and the channels.
#
# Expected: the largest number of each channel's picture, a global pool, as ONNX Runtime has it and as ReduceMean and
# ReduceL2 give it here for their operation.
# Happens: without keepdims, axes go one by one, and 1 is taken from each next one, as is right for 2 and 3; of -2 and
# -1 the second becomes -2, the channels. Shapes are batch x columns, so where there are as many columns as channels
# nothing shows it. Nothing is said. An output_shape of ConvTranspose is dropped, too: its size is the default one.
# Seen, 8 x 8 x 8 x 8 random numbers: over axes (-2, -1) 91 to 100 % of the numbers are wrong, the maxima of channels
# and rows; over (2, 3), with keepdims, and for ReduceMean and ReduceL2 none. ConvTranspose of 9 x 9, 3 x 3, stride 2,
# output_shape 20 x 19: ONNX Runtime 20 x 19, onnx2torch 19 x 19.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx2torch==1.5.15 torch==2.15.0 onnx==1.23.2 \
    onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnx2torch
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper

random = np.random.default_rng(0)


def both(operator, x, *weights, **options):
    """What ONNX Runtime and onnx2torch give for one operator."""
    names = ["x", *(f"weights{i}" for i in range(len(weights)))]
    graph = helper.make_graph(
        [helper.make_node(operator, names, ["y"], **options)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, name) for value, name in zip(weights, names[1:])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    right = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x})[0]
    return right, onnx2torch.convert(model).eval()(torch.from_numpy(x)).detach().numpy()


x = random.uniform(0.5, 1.5, (8, 8, 8, 8)).astype(np.float32)
exact = {"ReduceMax": np.max, "ReduceMin": np.min, "ReduceProd": np.prod, "ReduceMean": np.mean}
exact["ReduceL2"] = lambda x, axes, keepdims: np.sqrt(np.sum(x**2, axes, keepdims=keepdims))
for operator, function in exact.items():
    for axes in ((2, 3), (-2, -1)):
        for keepdims in (False, True):
            right, found = both(operator, x, axes=axes, keepdims=int(keepdims))
            wanted = function(x.astype(np.float64), axes, keepdims=keepdims)
            assert np.allclose(right, wanted, 1e-4) and found.shape == right.shape
            wrong = np.mean(~np.isclose(found, right, 1e-4))
            print(f"{operator} over {axes}, keepdims {int(keepdims)}: {wrong:.0%} of the numbers are wrong")
            if operator in ("ReduceMax", "ReduceMin", "ReduceProd") and axes == (-2, -1) and not keepdims:
                assert wrong > 0.9 and np.allclose(found, function(x, (1, 2)), 1e-4)
            else:
                assert wrong == 0

x, weights = random.random((1, 4, 9, 9), np.float32), random.random((4, 6, 3, 3), np.float32)
for size in ([19, 19], [20, 19]):
    right, found = both("ConvTranspose", x, weights, strides=[2, 2], output_shape=size)
    print(f"ConvTranspose to {size}: ONNX Runtime {right.shape[2:]}, onnx2torch {found.shape[2:]}")
    assert right.shape[2:] == tuple(size) and found.shape[2:] == (19, 19)
END
