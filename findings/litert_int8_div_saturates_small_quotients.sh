#!/usr/bin/env bash
# LiteRT 2.3.0: DIV of int8 codes gives the largest or the lowest code for small quotients.
#
# Expected: the nearest code of the quotient, as DIV gives for large ones. TensorFlow's converter writes such a DIV for
# each division of activations, as in softsign or a normalization.
# Happens: a small numerator over a large divisor becomes the end of the range with the sign of the quotient, in the
# default kernels, those without XNNPACK, and the reference kernels. Nothing is said.
# Seen, numerators from -1 to 1 (step 1/128), divisors up to 8 (step 1/32), outputs from -4 to 4 (step 1/32): of all
# 65,025 pairs 1,120 are off by 127 or 128 codes, all others by 1 at most. 1/128 over 7.96875 is 3.96875, -1/128 over
# 7.96875 is -4. Of the pairs with a numerator of 1/128, 192 of 255 are so.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python ai-edge-litert==2.3.0 flatbuffers==25.12.19 numpy==2.4.6
environment/bin/python 2>errors - <<'END' || { cat errors; exit 1; }
import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType

first, second = (codes.ravel() for codes in np.meshgrid(np.arange(-127, 128), np.arange(1, 256), indexing="ij"))
STEPS, ZEROS = (1 / 128, 1 / 32, 1 / 32), (0, -128, 0)

model, graph, code, division = schema.ModelT(), schema.SubGraphT(), schema.OperatorCodeT(), schema.OperatorT()
model.version, model.subgraphs, model.operatorCodes, model.buffers = 3, [graph], [code], [schema.BufferT()]
graph.tensors, graph.operators, graph.inputs, graph.outputs = [], [division], [0, 1], [2]
for name, step, zero in zip(("numerator", "divisor", "quotient"), STEPS, ZEROS, strict=True):
    tensor, tensor.quantization = schema.TensorT(), schema.QuantizationParametersT()
    tensor.name, tensor.buffer, tensor.shape, tensor.type = name, 0, [first.size], schema.TensorType.INT8
    tensor.quantization.scale, tensor.quantization.zeroPoint = [step], [zero]
    graph.tensors.append(tensor)
code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.DIV
code.version, division.inputs, division.outputs = 2, [0, 1], [2]
division.builtinOptionsType, division.builtinOptions = schema.BuiltinOptions.DivOptions, schema.DivOptionsT()
builder = flatbuffers.Builder()
builder.Finish(model.Pack(builder), b"TFL3")
content = bytes(builder.Output())

wanted = np.clip(np.rint(first * STEPS[0] / (second * STEPS[1]) / STEPS[2]), -128, 127)
for resolver in ("AUTO", "BUILTIN_WITHOUT_DEFAULT_DELEGATES", "BUILTIN_REF"):
    interpreter = Interpreter(model_content=content, experimental_op_resolver_type=getattr(OpResolverType, resolver))
    interpreter.allocate_tensors()
    interpreter.set_tensor(0, first.astype(np.int8))
    interpreter.set_tensor(1, (second - 128).astype(np.int8))
    interpreter.invoke()
    found = interpreter.get_tensor(2).astype(int)
    wrong = abs(found - wanted) > 1
    one = {sign: found[(first == sign) & (second == 255)].item() * STEPS[2] for sign in (1, -1)}
    print(f"{resolver}: {wrong.sum()} of {wrong.size} off by", abs(found - wanted)[wrong].min(), "to", end=" ")
    print(abs(found - wanted).max(), "codes; 1/128 and -1/128 over 7.96875:", one[1], one[-1], end="; ")
    print("numerator 1/128:", wrong[first == 1].sum(), "of", (first == 1).sum())
    assert wrong.sum() == 1120
    assert np.array_equal(found[wrong], np.where(first[wrong] > 0, 127, -128))
    assert abs(wanted[wrong]).max() <= 5
END
