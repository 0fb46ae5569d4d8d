#!/usr/bin/env bash
# ONNX Runtime 1.32.0: the calibration "Entropy" cuts nothing off: its ranges are those of "MinMax".
#
# Expected: as of the method of this name, the range of least loss of information: of normal numbers with one
# outlier of 100, a few standard deviations.
# Happens: its histogram has 128 bins, and it tries ranges of 128 bins and more only, so that one is left: all of it.
# quantize_static has no option for the bins. Nothing is said. create_calibrator with num_bins=2048 cuts off.
# Seen: range of x by MinMax and by Entropy, without an outlier: -4.49 to 4.73 by both; with one of 100: -4.41 to 100
# by both; by Entropy with 2048 bins: -4.41 to 8.01. Steps of quantize_static with the outlier: 0.409 by both.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import contextlib
import io

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, quantize_static
from onnxruntime.quantization.calibrate import CalibrationMethod, create_calibrator

random = np.random.default_rng(0)
weight = random.normal(size=(64, 8)).astype(np.float32)
graph = helper.make_graph(
    [helper.make_node("MatMul", ["x", "weight"], ["y"])],
    "graph",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 64])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 8])],
    [numpy_helper.from_array(weight, "weight")],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
onnx.checker.check_model(model, full_check=True)
onnx.save(model, "float.onnx")
METHODS = (CalibrationMethod.MinMax, CalibrationMethod.Entropy, CalibrationMethod.Percentile)


class Inputs(CalibrationDataReader):
    def __init__(self, batches):
        self.left = iter([{"x": batch} for batch in batches])

    def get_next(self):
        return next(self.left, None)


def span(method, batches, **options):
    with contextlib.redirect_stdout(io.StringIO()):
        calibrator = create_calibrator("float.onnx", calibrate_method=method, extra_options=options)
        calibrator.collect_data(Inputs(batches))
        low, high = calibrator.compute_data()["x"].range_value
    return float(np.ravel(low)[0]), float(np.ravel(high)[0])


def step(method, batches):
    with contextlib.redirect_stdout(io.StringIO()):
        quantize_static("float.onnx", "quantized.onnx", Inputs(batches), calibrate_method=method)
    held = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load("quantized.onnx").graph.initializer}
    return float(held["x_scale"])


for outlier in (None, 100):
    batches = [random.normal(size=(64, 64)).astype(np.float32) for _ in range(20)]
    if outlier is not None:
        batches[3][0, 0] = outlier
    spans = {method.name: span(method, batches) for method in METHODS}
    spans["Entropy, 2048 bins"] = span(CalibrationMethod.Entropy, batches, num_bins=2048)
    steps = {method.name: step(method, batches) for method in METHODS}
    print(f"outlier {outlier}: ranges", {name: [round(end, 2) for end in ends] for name, ends in spans.items()})
    print(f"outlier {outlier}: steps", {name: round(size, 3) for name, size in steps.items()})
    assert np.allclose(spans["Entropy"], spans["MinMax"]) and np.isclose(steps["Entropy"], steps["MinMax"])
    if outlier is not None:
        assert spans["Entropy"][1] == outlier and spans["Entropy, 2048 bins"][1] < 10
END
