#!/usr/bin/env bash
# LiteRT 2.3.0: the code that QUANTIZE gives a half depends on its place in the tensor.
#
# Expected: the same float of one tensor gets the same code wherever it stands.
# Happens: LiteRT's own kernel rounds halves to even in groups of 8 numbers, and away from 0 in those that are left at
# the end. It runs int16 by default, and int8 without XNNPACK, which rounds halves to even everywhere.
# Seen, for 19 numbers 0.5, as codes: int16 sixteen 0 and three 1; int8 nineteen 0; int8 without XNNPACK sixteen 0 and
# three 1. LiteRT's reference kernels: nineteen 1.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python ai-edge-litert==2.3.0 flatbuffers==25.12.19 numpy==2.4.6
environment/bin/python - 2>errors <<'END' || { cat errors; exit 1; }
import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType


def file(name, options, version, inputs, output):
    """One operator; `inputs` and `output` are pairs of an array's shape and its type."""
    model, graph = schema.ModelT(), schema.SubGraphT()
    model.version, model.subgraphs, model.buffers = 3, [graph], [schema.BufferT()]
    graph.tensors, graph.inputs, graph.outputs = [], list(range(len(inputs))), [len(inputs)]
    for place, (shape, kind) in enumerate([*inputs, output]):
        tensor = schema.TensorT()
        tensor.name, tensor.buffer, tensor.shape = str(place), 0, list(shape)
        tensor.type = getattr(schema.TensorType, kind)
        if kind != "FLOAT32":
            tensor.quantization = schema.QuantizationParametersT()
            tensor.quantization.scale, tensor.quantization.zeroPoint = [1.0], [0]
        graph.tensors.append(tensor)
    code, operator = schema.OperatorCodeT(), schema.OperatorT()
    code.builtinCode = code.deprecatedBuiltinCode = getattr(schema.BuiltinOperator, name)
    code.version, operator.opcodeIndex = version, 0
    operator.inputs, operator.outputs, operator.builtinOptions = graph.inputs, graph.outputs, options
    operator.builtinOptionsType = getattr(schema.BuiltinOptions, type(options).__name__[:-1])
    model.operatorCodes, graph.operators = [code], [operator]
    builder = flatbuffers.Builder()
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def by_each_kernel(content, arrays):
    outputs = []
    for kernels in ("AUTO", "BUILTIN_WITHOUT_DEFAULT_DELEGATES", "BUILTIN_REF"):
        resolver = getattr(OpResolverType, kernels)
        interpreter = Interpreter(model_content=content, experimental_op_resolver_type=resolver, num_threads=1)
        interpreter.allocate_tensors()
        for place, array in enumerate(arrays):
            interpreter.set_tensor(place, array)
        interpreter.invoke()
        outputs.append(interpreter.get_tensor(len(arrays)).astype(int))
    return outputs


halves = np.full((1, 19), 0.5, np.float32)
even, away = [0] * 19, [1] * 19
mixed = [0] * 16 + [1] * 3
for kind, wanted in (("INT16", [mixed, mixed, away]), ("INT8", [even, mixed, away])):
    content = file("QUANTIZE", schema.QuantizeOptionsT(), 2, [(halves.shape, "FLOAT32")], (halves.shape, kind))
    found = [output.flatten().tolist() for output in by_each_kernel(content, [halves])]
    for name, codes in zip(("by default", "without XNNPACK", "reference"), found, strict=True):
        print(kind, f"{name}:", *codes)
    assert found == wanted
END
