#!/usr/bin/env bash
# onnxsim 0.8.1: two means, of which one keeps its axis and one doesn't, become one mean of another shape.
#
# Expected: simplify keeps a network's numbers and shapes.
# Happens: a ReduceMean behind a ReduceMean becomes one over both axes with the second's keepdims; the first's is
# dropped. If they differ, the result has an axis too many or too few, and what comes behind counts its axes from the
# wrong end. So it is for sums, maxima, minima, products, both norms and LogSumExp. The file still declares the old
# shape, and simplify returns True. Only check_n, off by default, fails.
# Seen, for 2 x 4 x 6 x 8, a mean over the columns and one over the rows, as shapes before and after: neither kept
# 2 x 4, 2 x 4; both kept 2 x 4 x 1 x 1, twice; first kept 2 x 4 x 1, 2 x 4; second kept 2 x 4 x 1, 2 x 4 x 1 x 1. With
# Softmax over channels, axis -2, behind the last one, as attention to channels has it, all weights become 1, and the
# sum of a picture's weights 4 instead of 1.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python \
    onnxsim==0.8.1 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python -W ignore - >output 2>errors <<'END' || { cat output errors; exit 1; }
from importlib.metadata import version

import numpy as np
import onnx
import onnxruntime
import onnxsim
from onnx import TensorProto, helper

NUMPY = {
    "ReduceMean": np.mean,
    "ReduceMax": np.max,
    "ReduceSum": np.sum,
    "ReduceL2": lambda x, **options: (x**2).sum(**options) ** 0.5,
}
print("onnxsim", version("onnxsim"), "onnx", version("onnx"))
x = np.random.default_rng(0).normal(size=(2, 4, 6, 8)).astype(np.float32)


def simplified(kind, first, second, softmax=False):
    columns, rows = (onnx.numpy_helper.from_array(np.array([axis]), f"a{axis}") for axis in (3, 2))
    nodes = [
        helper.make_node(kind, ["x", "a3"], ["y"], keepdims=first),
        helper.make_node(kind, ["y", "a2"], ["z"], keepdims=second),
        helper.make_node("Softmax" if softmax else "Identity", ["z"], ["out"], **({"axis": -2} if softmax else {})),
    ]
    values = helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape)
    result = NUMPY[kind](NUMPY[kind](x, axis=3, keepdims=bool(first)), axis=2, keepdims=bool(second))
    declared = helper.make_tensor_value_info("out", TensorProto.FLOAT, result.shape)
    graph = helper.make_graph(nodes, "graph", [values], [declared], [columns, rows])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    simple, checked = onnxsim.simplify(model)
    assert checked
    outputs = []
    for each in (model, simple):
        session = onnxruntime.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"])
        outputs.append(session.run(None, {"x": x})[0])
    if not softmax:
        assert outputs[0].shape == result.shape and np.abs(outputs[0] - result).max() < 1e-4
    return *outputs, [node.op_type for node in simple.graph.node]


for kind in NUMPY:
    for first in (0, 1):
        for second in (0, 1):
            before, after, left = simplified(kind, first, second)
            print(f"{kind}, keepdims {first} and {second}: {before.shape} becomes {after.shape}, {left}")
            assert left == [kind]
            if first == second:
                assert before.shape == after.shape and np.abs(before - after).max() < 1e-4
            else:
                assert before.shape == (2, 4, 1) and after.shape == ((2, 4, 1, 1) if second else (2, 4))
before, after, _ = simplified("ReduceMean", 0, 1, softmax=True)
print("weights of channels, sums of a picture:", before.sum((1, 2)), "simplified:", after.sum((1, 2, 3)))
assert np.abs(before.sum((1, 2)) - 1).max() < 1e-5 and before.max() < 0.5
assert (after == 1).all()
END
cat output
