#!/usr/bin/env bash
# onnx-graphsurgeon 0.6.1, onnxoptimizer 0.4.2: a Shape that gives a part of a shape is taken for the whole.
#
# Expected: folding and optimizing keep a network's numbers. Since opset 15 Shape has the attributes start and end;
# PyTorch's exporter writes them for each x.shape[i].
# Happens: onnx-graphsurgeon's fold_constants ignores both: the constant is the whole shape, and a Gather or Slice
# behind it counts from the first axis. onnxoptimizer makes Shape and Slice one Shape, with the limits of the Slice
# alone. The file stays valid, its outputs are wrong. Nothing is said.
# Seen, for 1 x 4 x 8 x 16, as the number that a picture is divided by, before, folded and optimized: its columns by
# Shape(start=3, end=4) and ReduceProd: 16, 512, 16; rows by Shape(start=2) and Gather: 8, 1, 8; by Shape(start=2) and
# Slice: 8, 1, 1; columns by Shape and Gather: 16, 16, 16.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python \
  onnx-graphsurgeon==0.6.1 onnxoptimizer==0.4.2 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import onnxoptimizer
import onnxruntime
from onnx import TensorProto, helper

node, SHAPE = helper.make_node, [1, 4, 8, 16]


def divisors(nodes):
    typed = [helper.make_tensor_value_info(name, TensorProto.FLOAT, SHAPE) for name in "xy"]
    numbers = [onnx.numpy_helper.from_array(np.array(each), f"n{each}") for each in (0, 3)]
    numbers += [onnx.numpy_helper.from_array(np.array([each]), f"v{each}") for each in (0, 1)]
    divide = node("Cast", ["size"], ["divisor"], to=TensorProto.FLOAT), node("Div", ["x", "divisor"], ["y"])
    graph = helper.make_graph([*nodes, *divide], "graph", typed[:1], typed[1:], numbers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    folded = gs.export_onnx(gs.import_onnx(model).fold_constants().cleanup())
    optimized = onnxoptimizer.optimize(model, onnxoptimizer.get_fuse_and_elimination_passes())
    found = []
    for each in (model, folded, optimized):
        session = onnxruntime.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"])
        found.append(round(1 / session.run(None, {"x": np.ones(SHAPE, np.float32)})[0].max().item()))
    return tuple(found)


gather = node("Gather", ["shape", "n0"], ["size"])
cases = {
    "Shape(start=3, end=4), ReduceProd": (
        (node("Shape", ["x"], ["shape"], start=3, end=4), node("ReduceProd", ["shape"], ["size"])),
        (16, 512, 16),
    ),
    "Shape(start=2), Gather": ((node("Shape", ["x"], ["shape"], start=2), gather), (8, 1, 8)),
    "Shape(start=2), Slice": (
        (node("Shape", ["x"], ["shape"], start=2), node("Slice", ["shape", "v0", "v1"], ["size"])),
        (8, 1, 1),
    ),
    "Shape, Gather": ((node("Shape", ["x"], ["shape"]), node("Gather", ["shape", "n3"], ["size"])), (16, 16, 16)),
}
for name, (nodes, wanted) in cases.items():
    found = divisors(nodes)
    print(f"{name}: divided by {found[0]}, folded {found[1]}, optimized {found[2]}")
    assert found == wanted
END
