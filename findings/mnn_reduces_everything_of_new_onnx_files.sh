#!/usr/bin/env bash
# MNN 3.6.1: ReduceL1, ReduceL2, ReduceSumSquare and ReduceLogSum of ONNX files since opset 18 give one number.
#
# Expected: they reduce the axes of the input `axes`, which was an attribute before opset 18; ReduceSum, ReduceMean and
# ReduceMax do so in MNN.
# Happens: the converter reads the attribute alone, finds none, and reduces all axes. Nothing is said. With an
# attribute, in opset 13, they are right. ReduceSum and ReduceMean with noop_with_empty_axes, which change nothing,
# give one number, too; and of equal numbers ArgMax with select_last_index takes the first.
# Seen: the sums of 10 columns, 1 x 10 numbers, are one, 800 pixels' sum; all 80 places of ArgMax of ones are 0, not 9.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python MNN==3.6.1 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python - >log 2>&1 <<'END' || { cat log; exit 1; }
import _tools
import MNN
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

x = np.random.default_rng(0).uniform(0.5, 1, (1, 8, 10, 10)).astype(np.float32)


def both(kind, x, opset, inputs=(), number=TensorProto.FLOAT, **attributes):
    """The numbers of ONNX Runtime and of MNN."""
    arrays = [onnx.numpy_helper.from_array(np.int64(inputs), "axes")] if inputs else []
    infos = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, x.shape),
        helper.make_tensor_value_info("y", number, None),
    ]
    node = helper.make_node(kind, ["x", "axes"] if inputs else ["x"], ["y"], **attributes)
    model = helper.make_model(helper.make_graph([node], "g", infos[:1], infos[1:], arrays), ir_version=8)
    model.opset_import[0].version = opset
    onnx.save(onnx.shape_inference.infer_shapes(model), "network.onnx")
    _tools.mnnconvert("mnnconvert -f ONNX --modelFile network.onnx --MNNModel network.mnn --bizCode n".split())
    network = MNN.nn.load_module_from_file("network.mnn", ["x"], ["y"])
    found = np.array(network.forward(MNN.expr.const(x, list(x.shape), MNN.expr.NCHW)).read())
    exact = onnxruntime.InferenceSession("network.onnx").run(None, {"x": x})[0]
    is_right = found.shape == exact.shape and np.allclose(found, exact, rtol=1e-4)
    print(f"found {kind} of opset {opset} {attributes}: shape {found.shape} for {exact.shape}, right is {is_right}")
    return exact, found, is_right


for kind in ("ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceMean", "ReduceMax"):
    assert both(kind, x, 13, axes=(0, 1, 2), keepdims=0)[2]
    exact, found, is_right = both(kind, x, 18, (0, 1, 2), keepdims=0)
    assert is_right if kind in ("ReduceMean", "ReduceMax") else (exact.size == 10 and found.size == 1)
for kind in ("ReduceMean", "ReduceSum"):
    exact, found, _ = both(kind, x, 18, noop_with_empty_axes=1)
    assert exact.size == 800 and found.size == 1
for is_last in (0, 1):
    exact, found, _ = both("ArgMax", np.ones_like(x), 13, number=TensorProto.INT64, axis=3, select_last_index=is_last)
    assert (exact == 9 * is_last).all() and (found == 0).all()
END
grep ^found log
