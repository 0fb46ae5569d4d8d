#!/usr/bin/env bash
# onnx-neural-compressor 1.0: a Clip without maximum, or that leaves out 0, is dropped; Abs and Sign work on codes.
#
# Expected: a Clip is left out only if the range of the codes before it does the same; QOperator files give the numbers
# of QDQ files.
# Happens: each Clip behind a quantized layer is dropped. The range is cut only if the Clip has three inputs, so one
# with two, the tensor and a minimum of 0, is lost, and negative numbers pass. As a range always holds 0, a Clip from 1
# to 3 is lost as well. In QOperator files, Abs and Sign get codes of uint8, which are never negative: Abs changes
# nothing, and Sign gives code 1 nearly everywhere. Nothing is said.
# Seen, as relative error between two convolutions, QDQ and QOperator: Relu 0.02 0.02; Clip from 0 to 6 0.02 0.02; Clip
# from 0 0.97 0.97, Clip from 1 to 3 1.06 1.06; Abs 0.01 1.27, Sign 0.11 3.49.
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
from onnx import TensorProto, helper, numpy_helper
from onnx_neural_compressor import data_reader
from onnx_neural_compressor.quantization import QuantFormat, QuantType, config, quantize

logging.disable(logging.CRITICAL)
print("onnx-neural-compressor", version("onnx-neural-compressor"), "onnxruntime", version("onnxruntime"))
random = np.random.default_rng(0)
images = [{"x": random.normal(size=(1, 8, 16, 16)).astype(np.float32)} for _ in range(4)]
weights = {
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


def network(kind, bounds):
    constants = weights | dict(zip(("low", "high"), map(np.array, bounds)))
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "w", "b"], ["y"], "first", pads=[1] * 4),
            helper.make_node(kind, ["y", "low", "high"][: 1 + len(bounds)], ["z"], "activation"),
            helper.make_node("Conv", ["z", "v"], ["out"], "second", pads=[1] * 4),
        ],
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, 16, 16])],
        [helper.make_tensor_value_info("out", TensorProto.FLOAT, [1, 8, 16, 16])],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def run(model):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(None, image)[0] for image in images])


def quantized(model, **options):
    for name in ("float.onnx", "quantized.onnx", "quantized.onnx_data"):
        if os.path.exists(name):
            os.remove(name)
    onnx.save(model, "float.onnx")
    quantize("float.onnx", "quantized.onnx", config.StaticQuantConfig(calibration_data_reader=Reader(), **options))
    return onnx.load("quantized.onnx")


for kind, bounds, wrong in (
    ("Relu", (), ()),
    ("Clip", (0, 6), ()),
    ("Clip", (0,), ("QDQ", "QOperator")),
    ("Clip", (1, 3), ("QDQ", "QOperator")),
    ("Abs", (), ("QOperator",)),
    ("Sign", (), ("QOperator",)),
):
    model = network(kind, bounds)
    exact = run(model)
    for form in (QuantFormat.QDQ, QuantFormat.QOperator):
        # weights of uint8: with int8, sums of QLinearConv may saturate on processors without VNNI
        result = quantized(model, quant_format=form, weight_type=QuantType.QUInt8)
        error = np.linalg.norm(run(result) - exact) / np.linalg.norm(exact)
        left = [node.op_type for node in result.graph.node]
        print(f"{kind} {bounds}, {form.name}: error {error:.2f},", "left" if kind in left else "not left")
        assert error > 0.5 if form.name in wrong else error < 0.3
        assert kind in left or kind in ("Relu", "Clip")
END
cat output
