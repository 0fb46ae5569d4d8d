#!/usr/bin/env bash
# MNN 3.6.1: Resize of an ONNX file drops nearest_mode "ceil", cubic_coeff_a and half_pixel_symmetric.
#
# Expected: numbers as of ONNX Runtime, or an error for an option that MNN lacks.
# Happens: nearest_mode "ceil" takes the pixels of another mode, a cubic Resize has the coefficient -0.75 always, and
# coordinates half_pixel_symmetric are taken as others. Nothing is said. Linear, nearest and cubic with the other
# defaults are right, apart from the border of cubic ones, which is left out here.
# Seen, 10 x 10 pixels: 92 % of the numbers are wrong with ceil, 49 % if asymmetric, 99 % with a coefficient of -0.5,
# and 97 % with half_pixel_symmetric.
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

COORDINATES = "coordinate_transformation_mode"
x = np.random.default_rng(0).normal(size=(1, 8, 10, 10)).astype(np.float32)


def both(scale, opset=13, **attributes):
    """The numbers of ONNX Runtime and of MNN, without the rows and columns at the border."""
    arrays = [onnx.numpy_helper.from_array(np.float32([1, 1, scale, scale]), "scale")]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape if name == "x" else None) for name in "xy"]
    node = helper.make_node("Resize", ["x", "", "scale"], ["y"], **attributes)
    model = helper.make_model(helper.make_graph([node], "g", infos[:1], infos[1:], arrays), ir_version=9)
    model.opset_import[0].version = opset
    onnx.save(onnx.shape_inference.infer_shapes(model), "network.onnx")
    _tools.mnnconvert("mnnconvert -f ONNX --modelFile network.onnx --MNNModel network.mnn --bizCode n".split())
    network = MNN.nn.load_module_from_file("network.mnn", ["x"], ["y"])
    found = np.array(network.forward(MNN.expr.const(x, list(x.shape), MNN.expr.NCHW)).read())
    exact = onnxruntime.InferenceSession("network.onnx").run(None, {"x": x})[0]
    return exact[:, :, 4:-4, 4:-4], found[:, :, 4:-4, 4:-4]


wrong = {}
for name, scale, options in (
    ("linear", 2, {"mode": "linear"}),
    ("nearest", 1.5, {"mode": "nearest"}),
    ("nearest, ceil", 1.5, {"mode": "nearest", "nearest_mode": "ceil"}),
    ("nearest, ceil, asymmetric", 1.5, {"mode": "nearest", "nearest_mode": "ceil", COORDINATES: "asymmetric"}),
    ("cubic", 2, {"mode": "cubic"}),
    ("cubic, -0.5", 2, {"mode": "cubic", "cubic_coeff_a": -0.5}),
    ("linear, half_pixel_symmetric", 1.55, {"mode": "linear", COORDINATES: "half_pixel_symmetric", "opset": 19}),
):
    exact, found = both(scale, **options)
    wrong[name] = float((abs(found - exact) > 1e-3).mean())
    print(f"found {name}: {wrong[name]:.0%} wrong")
assert wrong["linear"] == wrong["nearest"] == wrong["cubic"] == 0
assert wrong["nearest, ceil"] > 0.9 and wrong["nearest, ceil, asymmetric"] > 0.4
assert wrong["cubic, -0.5"] > 0.9 and wrong["linear, half_pixel_symmetric"] > 0.9
END
grep ^found log
