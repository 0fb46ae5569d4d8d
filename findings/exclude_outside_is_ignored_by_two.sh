#!/usr/bin/env bash
# OpenVINO 2026.4.1 and MNN 3.6.1 ignore exclude_outside of a cubic Resize of an ONNX file.
#
# Expected: with exclude_outside, pixels beyond the border have no weight, and the others' weights are scaled to a sum
# of 1, as in ONNX Runtime.
# Happens: both repeat the border, as without the option. Nothing is said. Without it, OpenVINO's numbers are ONNX
# Runtime's.
# Seen, 10 x 10 pixels made 5, 15 and 20 wide: 45 to 62 % of the numbers are wrong, and exactly those without the
# option.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 openvino==2026.4.1 MNN==3.6.1 \
    numpy==2.4.6
environment/bin/python - >log 2>&1 <<'END' || { cat log; exit 1; }
import _tools
import MNN
import numpy as np
import onnx
import onnxruntime
import openvino
from onnx import TensorProto, helper

x = np.random.default_rng(0).normal(size=(1, 8, 10, 10)).astype(np.float32)


def write(scale, is_excluded):
    arrays = [onnx.numpy_helper.from_array(np.float32([1, 1, scale, scale]), "scale")]
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape if name == "x" else None) for name in "xy"]
    node = helper.make_node("Resize", ["x", "", "scale"], ["y"], mode="cubic", exclude_outside=int(is_excluded))
    model = helper.make_model(helper.make_graph([node], "g", infos[:1], infos[1:], arrays), ir_version=8)
    model.opset_import[0].version = 13
    onnx.save(onnx.shape_inference.infer_shapes(model), "network.onnx")


def of_onnxruntime():
    return onnxruntime.InferenceSession("network.onnx").run(None, {"x": x})[0]


def of_openvino():
    return openvino.Core().compile_model("network.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(x)[0]


def of_mnn():
    _tools.mnnconvert("mnnconvert -f ONNX --modelFile network.onnx --MNNModel network.mnn --bizCode n".split())
    network = MNN.nn.load_module_from_file("network.mnn", ["x"], ["y"])
    return np.array(network.forward(MNN.expr.const(x, list(x.shape), MNN.expr.NCHW)).read())


for scale in (0.5, 1.5, 2):
    found = {}
    for is_excluded in (False, True):
        write(scale, is_excluded)
        found[is_excluded] = [run() for run in (of_onnxruntime, of_openvino, of_mnn)]
    exact = found[True][0]
    share = [(abs(numbers - exact) > 1e-3).mean() for numbers in found[True]]
    print(f"found times {scale}: OpenVINO {share[1]:.0%} wrong, MNN {share[2]:.0%}")
    assert min(share[1:]) > 0.4
    assert np.array_equal(found[True][1], found[False][1]) and np.array_equal(found[True][2], found[False][2])
    assert np.allclose(found[False][1], found[False][0], atol=1e-4)
END
grep ^found log
