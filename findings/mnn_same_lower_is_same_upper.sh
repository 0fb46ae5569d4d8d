#!/usr/bin/env bash
# MNN 3.6.1: of an ONNX file, auto_pad SAME_LOWER pads as SAME_UPPER, and an average that counts its padding may not.
#
# Expected: where the padding is odd, SAME_LOWER puts the larger part before the image, SAME_UPPER behind it; with
# count_include_pad, each average divides by the whole window.
# Happens: convolutions and pools treat both names alike, so images move by a pixel. An AveragePool whose pads differ
# on both sides, here 0 before and 1 behind the image, divides by the count of pixels, count_include_pad or not. PRelu
# with a factor for each column takes them for channels. Nothing is said.
# Seen: all numbers of a convolution with a 2 x 2 kernel, and over 80 % of pools differ from ONNX Runtime's, and are
# those of SAME_UPPER; 36 % of the averages, those at the edges, are wrong; 46 % of PRelu's numbers are wrong.
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

rng = np.random.default_rng(0)
x = rng.normal(size=(1, 8, 10, 10)).astype(np.float32)


def both(kind, *constants, **attributes):
    """The numbers of ONNX Runtime and of MNN."""
    names = [f"c{i}" for i in range(len(constants))]
    arrays = [onnx.numpy_helper.from_array(value, name) for value, name in zip(constants, names)]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape if name == "x" else None) for name in "xy"]
    node = helper.make_node(kind, ["x", *names], ["y"], **attributes)
    model = helper.make_model(helper.make_graph([node], "g", infos[:1], infos[1:], arrays), ir_version=8)
    model.opset_import[0].version = 13
    onnx.save(onnx.shape_inference.infer_shapes(model), "network.onnx")
    _tools.mnnconvert("mnnconvert -f ONNX --modelFile network.onnx --MNNModel network.mnn --bizCode n".split())
    network = MNN.nn.load_module_from_file("network.mnn", ["x"], ["y"])
    variable = network.forward(MNN.expr.const(x, list(x.shape), MNN.expr.NCHW))
    return onnxruntime.InferenceSession("network.onnx").run(None, {"x": x})[0], np.array(variable.read())


def wrong(found, exact):
    return (abs(found - exact) > 1e-3).mean()


weight = rng.normal(size=(4, 8, 2, 2)).astype(np.float32)
for kind, constants, options in (
    ("Conv", [weight], {}),
    ("MaxPool", [], {"kernel_shape": [2, 2], "strides": [1, 1]}),
    ("AveragePool", [], {"kernel_shape": [2, 2], "strides": [1, 1]}),
):
    upper, found_upper = both(kind, *constants, auto_pad="SAME_UPPER", **options)
    lower, found_lower = both(kind, *constants, auto_pad="SAME_LOWER", **options)
    of_upper, of_lower = wrong(found_upper, upper), wrong(found_lower, lower)
    print(f"found {kind}: {of_upper:.0%} of SAME_UPPER wrong, {of_lower:.0%} of SAME_LOWER")
    assert of_upper == 0 and of_lower > 0.8
    assert wrong(found_lower, upper) == 0

options = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0, 0, 1, 1]}
exact, found = both("AveragePool", count_include_pad=1, **options)
print(f"found AveragePool: {wrong(found, exact):.0%} wrong")
assert 0.3 < wrong(found, exact) < 0.4
assert wrong(found, both("AveragePool", count_include_pad=0, **options)[0]) == 0
exact, found = both("AveragePool", count_include_pad=1, **{**options, "pads": [1, 1, 1, 1]})
assert wrong(found, exact) == 0

exact, found = both("PRelu", rng.uniform(0.1, 0.9, 10).astype(np.float32))
print(f"found PRelu of columns: {wrong(found, exact):.0%} wrong")
assert 0.4 < wrong(found, exact) < 0.5
END
grep ^found log
