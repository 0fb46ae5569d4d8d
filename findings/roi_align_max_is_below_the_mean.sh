#!/usr/bin/env bash
# ONNX Runtime 1.32.0, onnx 1.23.2: RoiAlign's mode "max" is below its mode "avg", but not in OpenVINO and MNN.
#
# Expected: "max" is the largest of the interpolated samples of a cell, and "avg" their mean.
# Happens: ONNX Runtime and onnx's ReferenceEvaluator take the largest product of a pixel and its weight: interpolated
# half way between pixels, a quarter of the largest pixel. OpenVINO and MNN take the largest sample. Nothing is said.
# Seen, a picture of ones: 0.25 is the largest and 1 the mean; of pixels from 0.5 to 1, all 25 maxima are below the
# means.
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
from onnx.reference import ReferenceEvaluator


def of_mnn(model, x):
    _tools.mnnconvert("mnnconvert -f ONNX --modelFile network.onnx --MNNModel network.mnn --bizCode n".split())
    network = MNN.nn.load_module_from_file("network.mnn", ["x"], ["y"])
    return np.array(network.forward(MNN.expr.const(x, list(x.shape), MNN.expr.NCHW)).read())


RUNTIMES = {
    "ONNX Runtime": lambda model, x: onnxruntime.InferenceSession("network.onnx").run(None, {"x": x})[0],
    "onnx": lambda model, x: ReferenceEvaluator(model).run(None, {"x": x})[0],
    "OpenVINO": lambda model, x: openvino.Core().compile_model("network.onnx", "CPU")(x)[0],
    "MNN": of_mnn,
}


def model(mode):
    """A region of 10 x 10 pixels, in 5 x 5 cells of 2 x 2 samples, each half way between four pixels."""
    arrays = [
        onnx.numpy_helper.from_array(np.float32([[1, 1, 11, 11]]), "regions"),
        onnx.numpy_helper.from_array(np.int64([0]), "batch"),
    ]
    options = {"coordinate_transformation_mode": "output_half_pixel", "sampling_ratio": 2}
    names = ["x", "regions", "batch"]
    node = helper.make_node("RoiAlign", names, ["y"], mode=mode, output_height=5, output_width=5, **options)
    infos = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 14, 14]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 1, 5, 5]),
    ]
    made = helper.make_model(helper.make_graph([node], "g", infos[:1], infos[1:], arrays), ir_version=9)
    made.opset_import[0].version = 16
    onnx.save(made, "network.onnx")
    return made


ones = np.ones((1, 1, 14, 14), np.float32)
pixels = np.random.default_rng(0).uniform(0.5, 1, ones.shape).astype(np.float32)
samples = sum(pixels[0, 0, i : i + 12, j : j + 12] for i in (1, 2) for j in (1, 2))[:10, :10] / 4
cells = samples.reshape(5, 2, 5, 2)
for name, run in RUNTIMES.items():
    of_ones = {mode: float(run(model(mode), ones).mean()) for mode in ("avg", "max")}
    found = {mode: run(model(mode), pixels)[0, 0] for mode in ("avg", "max")}
    below = int((found["max"] < found["avg"]).sum())
    print(f"found {name}: of ones {of_ones}; {below} of 25 maxima are below the mean")
    assert of_ones["avg"] == 1 and np.allclose(found["avg"], cells.mean((1, 3)), atol=1e-5)
    if name in ("ONNX Runtime", "onnx"):
        assert of_ones["max"] == 0.25 and below == 25
    else:
        assert of_ones["max"] == 1 and np.allclose(found["max"], cells.max((1, 3)), atol=1e-5)
END
grep ^found log
