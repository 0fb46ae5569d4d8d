#!/usr/bin/env bash
# TVM 0.27.0: of old ONNX files, a nearest Upsample by 2 takes other pixels, and TopK gives one number.
#
# Expected: Upsample by 2 of opset 7 and 8 repeats each pixel, as numpy.repeat does and ONNX Runtime computes;
# TopK of opset 10 gives the k largest numbers.
# Happens: a place between two pixels goes to the even one, so pixels come once and three times in turn. k, which is an
# input since opset 10, is read since opset 11: the output has one number, with no regard to the shape in the file.
# Nothing is said. Resize of opset 13 and TopK of opset 11 are right.
# Seen, pixels 0 to 4: ONNX Runtime 0 0 1 1 2 2 3 3 4 4, TVM 0 0 1 2 2 2 3 4 4 4; by 3 0 0 0 1 1 1, TVM 0 0 1 1 1 2.
# The largest 3 numbers of 0 to 4: 4 3 2, TVM in opset 10 4.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python apache-tvm==0.27.0 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnx
import onnxruntime
import tvm
from onnx import TensorProto, helper, numpy_helper
from tvm import relax
from tvm.relax.frontend.onnx import from_onnx

row = np.arange(5, dtype=np.float32).reshape(1, 1, 1, 5)


def outputs(kind, opset, held, width, **options):
    """What ONNX Runtime and TVM give."""
    names = ["y", *["places"] * (kind == "TopK")]
    graph = helper.make_graph(
        [helper.make_node(kind, ["x", *held], names, **options)],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, row.shape)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1, 1, width])],
        [numpy_helper.from_array(value, name) for name, value in held.items() if name],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    by_onnxruntime = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": row})[0]
    module = relax.transform.DecomposeOpsForInference()(from_onnx(model, shape_dict={"x": list(row.shape)}))
    found = relax.VirtualMachine(tvm.compile(module, "llvm"), tvm.cpu())["main"](tvm.runtime.tensor(row))
    found = found if hasattr(found, "numpy") else found[0]
    return by_onnxruntime.ravel().tolist(), found.numpy().ravel().tolist()


for factor in (2, 3, 4):
    repeated = np.repeat(row, factor).tolist()
    scales = [1.0, 1.0, 1.0, float(factor)]
    for opset in (7, 8):
        wanted, found = outputs("Upsample", opset, {}, 5 * factor, mode="nearest", scales=scales)
        print(f"Upsample of opset {opset} by {factor}: ONNX Runtime", *wanted, "TVM", *found)
        assert wanted == repeated
        assert found != repeated
        assert factor > 2 or found == [0, 0, 1, 2, 2, 2, 3, 4, 4, 4]
    options = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    held = {"": None, "scales": np.float32(scales)}
    assert outputs("Resize", 13, held, 5 * factor, **options) == (repeated, repeated)
for opset in (10, 11):
    wanted, found = outputs("TopK", opset, {"k": np.int64([3])}, 3, axis=-1)
    print(f"TopK of opset {opset}: ONNX Runtime", *wanted, "TVM", *found)
    assert wanted == [4, 3, 2]
    assert found == ([4] if opset == 10 else wanted)
END
