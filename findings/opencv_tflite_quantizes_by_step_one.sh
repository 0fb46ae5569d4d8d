#!/usr/bin/env bash
# OpenCV 5.0.0: QUANTIZE of a TFLite file divides by 1 and takes -128 as zero point, whatever the file says.
#
# Expected: round(x / scale) + zero point, as LiteRT computes it. DEQUANTIZE of the same numbers gives the input again,
# to half a step.
# Happens: scale and zero point of the file get lost on the way in, and are used on the way out. Pictures of small
# numbers arrive as a handful of codes, all negative ones as one. The networks of 8 bits that TensorFlow's converter
# writes with inputs in floats begin with this operator: all their outputs are wrong. Nothing is said. Files with inputs
# in int8 are refused when they are given int8.
# Seen, for step 0.05, zero point 15 and -4, -1, 0, 0.3, 1, 2.6, 5: LiteRT the same numbers; OpenCV -7.15 four times,
# then -7.1, -7.0, -6.9, which is (clip(round(x), 0) - 128 - 15) * 0.05. The same with step 0.02, zero point -20, and
# with a max pool between.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python opencv-python-headless==5.0.0.93 ai-edge-litert==2.3.0 \
    flatbuffers==25.12.19 numpy==2.4.6
environment/bin/python - 2>errors <<'END' || { cat errors; exit 1; }
import cv2
import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter

x = np.array([-4, -1, 0, 0.3, 1, 2.6, 5], np.float32)


def file(scale, zero, pool, codes_in):
    model, graph = schema.ModelT(), schema.SubGraphT()
    names = ["QUANTIZE"] * (not codes_in) + ["MAX_POOL_2D"] * pool + ["DEQUANTIZE"]
    model.version, model.subgraphs, model.buffers, model.operatorCodes = 3, [graph], [schema.BufferT()], []
    graph.tensors, graph.operators, graph.inputs, graph.outputs = [], [], [0], [len(names)]
    graph.name, model.description = "main", "codes"
    for place in range(len(names) + 1):
        tensor = schema.TensorT()
        floats = place == len(names) or (place == 0 and not codes_in)
        tensor.name, tensor.buffer, tensor.shape = f"tensor{place}", 0, [1, 1, len(x), 1]
        tensor.type = schema.TensorType.FLOAT32 if floats else schema.TensorType.INT8
        tensor.quantization = schema.QuantizationParametersT()
        if not floats:
            tensor.quantization.scale, tensor.quantization.zeroPoint = [scale], [zero]
        graph.tensors.append(tensor)
    for place, name in enumerate(names):
        code, operator = schema.OperatorCodeT(), schema.OperatorT()
        code.builtinCode = code.deprecatedBuiltinCode = getattr(schema.BuiltinOperator, name)
        code.version, operator.opcodeIndex, operator.inputs, operator.outputs = 2, place, [place], [place + 1]
        if name == "MAX_POOL_2D":
            options = operator.builtinOptions = schema.Pool2DOptionsT()
            operator.builtinOptionsType = schema.BuiltinOptions.Pool2DOptions
            options.padding = schema.Padding.VALID
            options.strideW = options.strideH = options.filterWidth = options.filterHeight = 1
        model.operatorCodes.append(code)
        graph.operators.append(operator)
    builder = flatbuffers.Builder()
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


for scale, zero in ((0.05, 15), (0.02, -20)):
    for pool in (False, True):
        content = file(scale, zero, pool, False)
        interpreter = Interpreter(model_content=content)
        interpreter.allocate_tensors()
        interpreter.set_tensor(0, x.reshape(1, 1, -1, 1))
        interpreter.invoke()
        expected = interpreter.get_tensor(interpreter.get_output_details()[0]["index"]).reshape(-1)
        net = cv2.dnn.readNetFromTFLite(np.frombuffer(content, np.uint8))
        net.setInput(x.reshape(1, 1, 1, -1))
        found = net.forward().reshape(-1)
        print(f"found step {scale}, zero point {zero}: OpenCV", *found.round(2), "LiteRT", *expected.round(2))
        ends = (-128 - zero) * scale, (127 - zero) * scale
        assert abs(expected - x.clip(*ends)).max() <= 0.51 * scale
        by_one = (np.round(x).clip(0, 255) - 128 - zero) * scale
        assert abs(found - by_one).max() < 1e-5 and found.max() < 0
net = cv2.dnn.readNetFromTFLite(np.frombuffer(file(0.05, 15, True, True), np.uint8))
try:
    net.setInput(np.zeros((1, 1, 1, len(x)), np.int8))
except cv2.error as error:
    print("of int8:", str(error).split("tensor0': ")[1].strip())
else:
    raise AssertionError("int8 was accepted")
END
