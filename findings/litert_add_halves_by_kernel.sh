#!/usr/bin/env bash
# LiteRT 2.3.0: ADD of int8 codes rounds halves up with XNNPACK, its default, and away from 0 without.
#
# Expected: the int8 operators of one file have one result; TensorFlow Lite's specification of 8 bits was made for that.
# Happens: in a residual network, where a sum of two codes gets twice the step, every other sum is a half, and all that
# are negative get another code on another device, or in another build of the runtime.
# Seen, for all sums of -60 to 59, step 1, to step 2: 3660 of 14400 codes differ with and without XNNPACK. LiteRT's
# reference kernels agree with the latter.
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
    """One operator; `inputs` and `output` are pairs of an array's shape and its step."""
    model, graph = schema.ModelT(), schema.SubGraphT()
    model.version, model.subgraphs, model.buffers = 3, [graph], [schema.BufferT()]
    graph.tensors, graph.inputs, graph.outputs = [], list(range(len(inputs))), [len(inputs)]
    for place, (shape, step) in enumerate([*inputs, output]):
        tensor = schema.TensorT()
        tensor.name, tensor.buffer, tensor.shape = str(place), 0, list(shape)
        tensor.type, tensor.quantization = schema.TensorType.INT8, schema.QuantizationParametersT()
        tensor.quantization.scale, tensor.quantization.zeroPoint = [step], [0]
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


codes = np.arange(-60, 60, dtype=np.int8)
one, other = (array.reshape(1, 1, 1, -1) for array in np.meshgrid(codes, codes))
content = file("ADD", schema.AddOptionsT(), 2, [(one.shape, 1.0), (one.shape, 1.0)], (one.shape, 2.0))
xnnpack, own, reference = by_each_kernel(content, [one, other])
half = (one.astype(int) + other) / 2
print(f"ADD: {(xnnpack != own).sum()} of {half.size} codes differ with and without XNNPACK")
assert np.array_equal(xnnpack, np.floor(half + 0.5))
assert np.array_equal(own, np.sign(half) * np.floor(abs(half) + 0.5))
assert np.array_equal(own, reference)
END
