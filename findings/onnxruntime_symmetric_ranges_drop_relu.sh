#!/usr/bin/env bash
# ONNX Runtime 1.32.0: with CalibTensorRangeSymmetric, quantize_static takes every Relu and Clip out of a network.
#
# Expected: the option makes ranges symmetric about 0, so that half of the codes behind a Relu are of no use. That costs
# a bit, and changes nothing else.
# Happens: the quantizer leaves out a Relu or Clip, as the range of its output cuts off what it would. With this option
# the range is made symmetric first, so it cuts off nothing below 0, and yet Relu and Clip go. The network is linear
# then. So it is with codes of 8 and 16 bits, and in both formats. Likewise a Clip from 0.5 to 2 goes, though the range
# begins at 0. Nothing is said. With ActivationSymmetric besides, Relu and Clip stay.
# Seen: least output of a Conv and Relu: 0 in floats and without the option, -2.1 with it, where the largest is 2.1.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

random = np.random.default_rng(0)
inputs = random.normal(size=(16, 4, 8, 8)).astype(np.float32)
weight = (random.normal(size=(5, 4, 3, 3)) / 10).astype(np.float32)


class Inputs(CalibrationDataReader):
    def __init__(self):
        self.left = iter([{"x": inputs}])

    def get_next(self):
        return next(self.left, None)


def outputs(path):
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"x": inputs})[0]


def write(operator, *bounds):
    names = ["lower", "upper"][: len(bounds)]
    held = {"weight": weight, **{name: np.float32(bound) for name, bound in zip(names, bounds, strict=True)}}
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "weight"], ["sum"]),
            helper.make_node(operator, ["sum", *names], ["y"]),
        ],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [16, 4, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [16, 5, 6, 6])],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in held.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, "float.onnx")


def quantized(form, kind, **options):
    quantize_static(
        "float.onnx",
        "quantized.onnx",
        Inputs(),
        quant_format=form,
        activation_type=kind,
        reduce_range=True,
        extra_options=options,
    )
    kept = {node.op_type for node in onnx.load("quantized.onnx").graph.node} & {"Relu", "Clip"}
    return outputs("quantized.onnx"), sorted(kept)


cases = [
    (QuantFormat.QDQ, QuantType.QInt8),
    (QuantFormat.QDQ, QuantType.QUInt8),
    (QuantFormat.QDQ, QuantType.QInt16),
    (QuantFormat.QOperator, QuantType.QInt8),
]
for operator, bounds in (("Relu", ()), ("Clip", (0, 6))):
    write(operator, *bounds)
    wanted = outputs("float.onnx")
    assert wanted.min() == 0
    for form, kind in cases:
        usual, _ = quantized(form, kind)
        symmetric, kept = quantized(form, kind, CalibTensorRangeSymmetric=True)
        both, kept_by_both = quantized(form, kind, CalibTensorRangeSymmetric=True, ActivationSymmetric=True)
        print(
            f"{operator}, {form.name}, {kind.name}: least output as usual {usual.min():g}, symmetric "
            f"{symmetric.min():.2f} (kept: {kept}), with ActivationSymmetric {both.min():g} (kept: {kept_by_both})"
        )
        assert usual.min() == both.min() == 0 and kept_by_both == [operator]
        assert kept == [] and symmetric.min() < -1.5 < 1.5 < symmetric.max()
write("Clip", 0.5, 2)
found, kept = quantized(QuantFormat.QDQ, QuantType.QInt8)
print(f"Clip from 0.5 to 2: least output {found.min():g}, in floats {outputs('float.onnx').min():g}, kept: {kept}")
assert found.min() == 0 and kept == [] and outputs("float.onnx").min() == 0.5
END
