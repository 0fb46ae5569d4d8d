#!/usr/bin/env bash
# onnx-neural-compressor 1.0: reduce_range=True, which it asks for itself, changes nothing in static quantization.
#
# Expected: weights of 7 bits, so that sums of two products fit into 16 bits on processors without VNNI. Without the
# option, it warns on them: "reduce_range=True is recommended to avoid potential accuracy issue".
# Happens: the option is read, and left behind: codes and steps are the same, bit for bit. So QOperator files saturate
# as before, on the machines the warning is for. It is so for int8 and uint8, with one step and with a step for each
# filter. quantize_static of ONNX Runtime, whose options these are, halves the codes. Nothing is said.
# Seen, as lowest and highest code of the weights without and with reduce_range: int8 -127 127, -127 127; by filter
# -127 127, -127 127; uint8 0 255, 0 255; ONNX Runtime, int8: -127 127, -64 64.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx-neural-compressor==1.0 onnx==1.23.2 onnxruntime==1.32.0 \
    numpy==1.26.4 scipy==1.17.1 prettytable==3.18.0 psutil==7.2.2 py-cpuinfo==9.0.0 pydantic==2.14.4 \
    transformers==5.24.0 onnxruntime-extensions==0.15.2
environment/bin/python -W ignore - >output 2>errors <<'END' || { cat output errors; exit 1; }
import logging
import os
from importlib.metadata import version

import numpy as np
import onnx
import onnxruntime
import onnxruntime.quantization
from onnx import TensorProto, helper, numpy_helper
from onnx_neural_compressor import data_reader
from onnx_neural_compressor.quantization import QuantFormat, QuantType, config, quantize
from onnxruntime.quantization import quantize_static

logging.disable(logging.CRITICAL)
print("onnx-neural-compressor", version("onnx-neural-compressor"), "onnxruntime", version("onnxruntime"))
random = np.random.default_rng(0)
images = [{"x": random.normal(size=(1, 8, 16, 16)).astype(np.float32)} for _ in range(4)]
constants = {
    "w": random.normal(size=(8, 8, 3, 3)) * 0.12,
    "b": random.normal(size=8) * 0.1,
    "v": random.normal(size=(8, 8, 3, 3)) * 0.12,
}


class Reader(data_reader.CalibrationDataReader):
    def __init__(self):
        self.rewind()

    def get_next(self):
        return next(self.images, None)

    def rewind(self):
        self.images = iter(images)


graph = helper.make_graph(
    [
        helper.make_node("Conv", ["x", "w", "b"], ["y"], "first", pads=[1] * 4),
        helper.make_node("Relu", ["y"], ["z"], "activation"),
        helper.make_node("Conv", ["z", "v"], ["out"], "second", pads=[1] * 4),
    ],
    "network",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, 16, 16])],
    [helper.make_tensor_value_info("out", TensorProto.FLOAT, [1, 8, 16, 16])],
    [numpy_helper.from_array(value.astype(np.float32), name) for name, value in constants.items()],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
onnx.checker.check_model(model, full_check=True)


def run(model):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(None, image)[0] for image in images])


def held(function, **options):
    for name in ("float.onnx", "quantized.onnx", "quantized.onnx_data"):
        if os.path.exists(name):
            os.remove(name)
    onnx.save(model, "float.onnx")
    function(**options)
    result = onnx.load("quantized.onnx")
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in result.graph.initializer}
    return arrays, np.linalg.norm(run(result) - exact) / np.linalg.norm(exact)


def compressor(**options):
    quantize("float.onnx", "quantized.onnx", config.StaticQuantConfig(calibration_data_reader=Reader(), **options))


def runtime(**options):
    quantize_static("float.onnx", "quantized.onnx", Reader(), **options)


exact = run(model)
for form in (QuantFormat.QDQ, QuantFormat.QOperator):
    for kind in (QuantType.QInt8, QuantType.QUInt8):
        for channel in (False, True):
            options = {"quant_format": form, "weight_type": kind, "per_channel": channel}
            full, first = held(compressor, **options)
            reduced, second = held(compressor, reduce_range=True, **options)
            codes = [[a for a in each.values() if a.dtype.itemsize == 1 and a.ndim == 4] for each in (full, reduced)]
            ranges = [(int(min(a.min() for a in each)), int(max(a.max() for a in each))) for each in codes]
            same = full.keys() == reduced.keys() and all(np.array_equal(full[name], reduced[name]) for name in full)
            print(
                f"{form.name}, {kind.name}, by filter {channel}: codes {ranges[0]}, with reduce_range {ranges[1]}, all"
                f" constants the same: {same}; errors on this machine {first:.3f} {second:.3f}"
            )
            assert same and len(codes[0]) == 2 and ranges[0][1] - ranges[0][0] > 200
for reduce in (False, True):
    form, kind = onnxruntime.quantization.QuantFormat.QDQ, onnxruntime.quantization.QuantType.QInt8
    arrays, error = held(runtime, quant_format=form, weight_type=kind, reduce_range=reduce)
    found = [array for array in arrays.values() if array.dtype == np.int8 and array.ndim == 4]
    highest = max(np.abs(array.astype(int)).max() for array in found)
    print(f"ONNX Runtime, reduce_range {reduce}: highest code {highest}, error {error:.3f}")
    assert len(found) == 2 and highest == (64 if reduce else 127)
END
cat output
