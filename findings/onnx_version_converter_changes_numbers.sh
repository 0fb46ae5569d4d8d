#!/usr/bin/env bash
# onnx 1.23.2: version_converter changes the numbers of linear Resize and Upsample, of Hardmax and of Softmax.
#
# Expected: a file has the same numbers in each opset, or the converter says that it cannot convert it.
# Happens: a Resize of opset 10 and an Upsample count pixels from the corner, and become a Resize of opset 11 without a
# word on its coordinates, which counts from the middle of pixels; nearest pixels are kept. Hardmax of opset 12 flattens
# all axes from its axis on, and becomes one along that axis; Softmax gets a Flatten in that direction, and none when it
# goes from 13 to 12. Nothing is said.
# Seen, ONNX Runtime 1.32.0, 1 x 8 x 10 x 10 numbers: 99 % of an Upsample by 2 differ, by up to 1.6; 99 % of a Resize;
# the one 1 of Hardmax became 80; all numbers of Softmax along the channels and of LogSoftmax along rows differ.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, version_converter

x = np.random.default_rng(0).normal(size=(1, 8, 10, 10)).astype(np.float32)
options = onnxruntime.SessionOptions()
options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL


def numbers(model):
    onnx.checker.check_model(model, full_check=True)
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, {"x": x})[0]


def both(first, second, kind, scale=None, **attributes):
    """The numbers of a layer in one opset, and converted to another."""
    inputs = ["x"] if scale is None else ["x", "scale"]
    arrays = [] if scale is None else [onnx.numpy_helper.from_array(np.float32([1, 1, scale, scale]), "scale")]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape if name == "x" else None) for name in "xy"]
    node = helper.make_node(kind, inputs, ["y"], **attributes)
    model = helper.make_model(helper.make_graph([node], "g", infos[:1], infos[1:], arrays), ir_version=7)
    model.opset_import[0].version = first
    model = onnx.shape_inference.infer_shapes(model)
    exact, found = numbers(model), numbers(version_converter.convert_version(model, second))
    errors = np.abs(found - exact)
    wrong = (errors > 1e-4).mean()
    print(f"{kind} {attributes} from {first} to {second}: {wrong:.0%} wrong, by up to {errors.max():.2f}")
    return exact, found, wrong


for first, kind in ((9, "Upsample"), (10, "Resize")):
    assert both(first, 11, kind, 2, mode="linear")[2] > 0.9
    assert both(first, 11, kind, 2, mode="nearest")[2] == 0
exact, found, wrong = both(12, 13, "Hardmax")
assert exact.sum() == 1 and found.sum() == 80
for kind, axis in (("Softmax", 1), ("LogSoftmax", 2)):
    assert both(12, 13, kind, axis=axis)[2] == 0
    assert both(13, 12, kind, axis=axis)[2] == 1
assert both(13, 12, "Softmax", axis=-1)[2] == 0
END
