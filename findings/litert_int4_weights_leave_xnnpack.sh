#!/usr/bin/env bash
# LiteRT 2.3.0: XNNPACK does not compute a convolution with int4 weights behind DEQUANTIZE, which is several times slower.
#
# Expected: constant weights behind DEQUANTIZE become floats when the file is loaded, with int4 as with int8, and XNNPACK
# computes the float convolution.
# Happens: with int8, XNNPACK takes both operators. With int4 it takes neither, without a word; the output is the same.
# Seen, for 16 channels of 32 x 32 and a 3 x 3 window: int8 DEQUANTIZE CONV_2D DELEGATE; int4 DEQUANTIZE CONV_2D, in 5 to 7
# times the time; equal outputs.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python ai-edge-litert==2.3.0 flatbuffers==25.12.19 numpy==2.4.6
environment/bin/python 2>/dev/null - <<'END'
import statistics
import time

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter

SIDE, CHANNELS = 32, 16
weight = np.random.default_rng(0).integers(-7, 8, (CHANNELS, 3, 3, CHANNELS)).astype(np.int8)
image = np.random.default_rng(1).integers(0, 16, (1, SIDE, SIDE, CHANNELS)).astype(np.float32)


def file(bits):
    pairs = weight.reshape(-1, 2) & 15
    stored = weight if bits == 8 else (pairs[:, 0] | pairs[:, 1] << 4).astype(np.uint8)
    kinds = schema.TensorType
    model, graph = schema.ModelT(), schema.SubGraphT()
    model.version, model.subgraphs, model.buffers = 3, [graph], []
    for data in (None, stored, None, np.zeros(CHANNELS, np.float32), None):
        buffer = schema.BufferT()
        buffer.data = None if data is None else np.frombuffer(data.tobytes(), np.uint8)
        model.buffers.append(buffer)
    graph.tensors, graph.inputs, graph.outputs = [], [0], [4]
    shapes = image.shape, weight.shape, weight.shape, (CHANNELS,), image.shape
    for place, shape in enumerate(shapes):
        tensor = schema.TensorT()
        tensor.name, tensor.buffer, tensor.shape, tensor.type = str(place), place, list(shape), kinds.FLOAT32
        graph.tensors.append(tensor)
    graph.tensors[1].type = kinds.INT8 if bits == 8 else kinds.INT4
    graph.tensors[1].quantization = schema.QuantizationParametersT()
    graph.tensors[1].quantization.scale, graph.tensors[1].quantization.zeroPoint = [1.0], [0]
    convolution = schema.Conv2DOptionsT()
    convolution.strideH = convolution.strideW = convolution.dilationHFactor = convolution.dilationWFactor = 1
    model.operatorCodes, graph.operators = [], []
    for name, options, inputs, output, version in (
        ("DEQUANTIZE", schema.DequantizeOptionsT(), [1], 2, 2),
        ("CONV_2D", convolution, [0, 2, 3], 4, 1),
    ):
        code, operator = schema.OperatorCodeT(), schema.OperatorT()
        code.builtinCode = code.deprecatedBuiltinCode = getattr(schema.BuiltinOperator, name)
        code.version, operator.opcodeIndex = version, len(model.operatorCodes)
        operator.inputs, operator.outputs, operator.builtinOptions = inputs, [output], options
        operator.builtinOptionsType = getattr(schema.BuiltinOptions, type(options).__name__[:-1])
        model.operatorCodes.append(code)
        graph.operators.append(operator)
    builder = flatbuffers.Builder()
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


outputs, operators, times = [], [], []
for bits in (8, 4):
    interpreter = Interpreter(model_content=file(bits), num_threads=1)
    interpreter.allocate_tensors()
    interpreter.set_tensor(0, image)
    taken = []
    for _ in range(200):
        start = time.perf_counter()
        interpreter.invoke()
        taken.append(time.perf_counter() - start)
    outputs.append(interpreter.get_tensor(4))
    operators.append([each["op_name"] for each in interpreter._get_ops_details()])
    times.append(statistics.median(taken))
    print(f"int{bits}:", *operators[-1])
print(f"int4 takes {times[1] / times[0]:.0f} times the time; equal outputs: {np.array_equal(*outputs)}")
assert np.array_equal(*outputs)
assert "DELEGATE" in operators[0]
assert "DELEGATE" not in operators[1]
END
