#!/usr/bin/env bash
# LiteRT 2.3.0: in reference kernels, SUM takes int8 codes for uint8.
#
# Expected: the sum of pixels or channels, within a code, as with the default kernels and those without XNNPACK; by the
# reference kernels (BUILTIN_REF) others are checked.
# Happens: a code of -1 counts as 255, and a sum beyond 127 is kept as a code of uint8, which reads as a negative one.
# Nothing is said. With codes and sums of 0 to 127 only, it is right; so are MEAN, REDUCE_MAX and REDUCE_MIN.
# Seen, largest errors in steps of default kernels, those without XNNPACK, and reference kernels, and share of wrong
# sums of the latter, over 8 x 8 pixels: codes 0 to 6 0.5, 0.5, 0.8, 0 %; 0 to 12 0, 0, 227, 100 %; -20 to 20 0.5,
# 0.5, 57.5, 92 %; zero point -128, codes up to 0 0.5, 0.5, 12.1, 38 %.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python ai-edge-litert==2.3.0 flatbuffers==25.12.19 numpy==2.4.6
environment/bin/python 2>errors - <<'END' || { cat errors; exit 1; }
from importlib.metadata import version

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType

print("LiteRT", version("ai-edge-litert"))
RESOLVERS = ("AUTO", "BUILTIN_WITHOUT_DEFAULT_DELEGATES", "BUILTIN_REF")


def outputs(reduction, codes, axes, zeros, steps):
    model, graph, code, operator = schema.ModelT(), schema.SubGraphT(), schema.OperatorCodeT(), schema.OperatorT()
    axes_buffer = schema.BufferT()
    axes_buffer.data = list(np.array(axes, np.int32).tobytes())
    model.version, model.subgraphs, model.operatorCodes = 3, [graph], [code]
    model.buffers = [schema.BufferT(), axes_buffer]
    graph.tensors, graph.operators, graph.inputs, graph.outputs = [], [operator], [0], [2]
    reduced = [size for axis, size in enumerate(codes.shape) if axis not in axes]
    for i, shape in enumerate((codes.shape, [len(axes)], reduced)):
        tensor = schema.TensorT()
        tensor.name, tensor.shape, tensor.buffer = f"tensor{i}", list(shape), int(i == 1)
        tensor.type = getattr(schema.TensorType, "INT32" if i == 1 else codes.dtype.name.upper())
        if i != 1:
            tensor.quantization = schema.QuantizationParametersT()
            tensor.quantization.scale, tensor.quantization.zeroPoint = [steps[i // 2]], [zeros[i // 2]]
        graph.tensors.append(tensor)
    code.version, code.builtinCode = 1, getattr(schema.BuiltinOperator, reduction)
    code.deprecatedBuiltinCode = code.builtinCode
    operator.inputs, operator.outputs = [0, 1], [2]
    operator.builtinOptionsType = schema.BuiltinOptions.ReducerOptions
    operator.builtinOptions = schema.ReducerOptionsT()
    builder = flatbuffers.Builder()
    builder.Finish(model.Pack(builder), b"TFL3")
    results = []
    for resolver in RESOLVERS:
        interpreter = Interpreter(
            model_content=bytes(builder.Output()),
            experimental_op_resolver_type=getattr(OpResolverType, resolver),
            num_threads=1,
        )
        interpreter.allocate_tensors()
        interpreter.set_tensor(0, codes)
        interpreter.invoke()
        results.append(interpreter.get_tensor(interpreter.get_output_details()[0]["index"]))
    return results


def case(name, reduction, low, high, zeros, steps, kind="int8", axes=(1, 2), right=False):
    codes = np.random.default_rng(0).integers(low, high + 1, (4, 8, 8, 16)).astype(kind)
    numpy = {"SUM": np.sum, "MEAN": np.mean, "REDUCE_MAX": np.max, "REDUCE_MIN": np.min}[reduction]
    numbers = numpy((codes.astype(float) - zeros[0]) * steps[0], axis=axes) / steps[1] + zeros[1]
    ends = np.iinfo(kind)
    found = outputs(reduction, codes, axes, zeros, steps)
    errors = [np.abs(codes_of - np.clip(numbers, ends.min, ends.max)) for codes_of in found]
    print(f"{name}: largest errors in steps", *(f"{error.max():.1f}" for error in errors), end="; ")
    print(f"in reference kernels {(errors[2] > 1.5).mean():.0%} of the sums are wrong")
    assert errors[0].max() < 1.5 and errors[1].max() < 1.5
    assert errors[2].max() < 1.5 if right else (errors[2] > 1.5).mean() > 0.3
    if reduction == "SUM" and kind == "int8":
        unsigned = np.sum(codes.view(np.uint8).astype(float) - zeros[0], axis=axes) * steps[0] / steps[1] + zeros[1]
        difference = np.abs(found[2].view(np.uint8) - np.clip(unsigned, 0, 255)).max()
        print(f"    largest difference from codes of uint8, read as such: {difference:.1f} steps")
        assert difference < 1.5


case("int8 SUM, codes 0 to 6", "SUM", 0, 6, (0, 0), (1, 4), right=True)
case("int8 SUM, codes 0 to 12", "SUM", 0, 12, (0, 0), (1, 2))
case("int8 SUM, codes -20 to 20", "SUM", -20, 20, (0, 0), (1, 4))
case("int8 SUM, codes -20 to 20, one step", "SUM", -20, 20, (0, 0), (1, 1), axes=(2,))
case("int8 SUM behind ReLU, zero point -128, codes -128 to 0", "SUM", -128, 0, (-128, -128), (1, 64))
case("int8 SUM of channels, codes -20 to 20", "SUM", -20, 20, (0, 0), (1, 4), axes=(3,))
for name in ("MEAN", "REDUCE_MAX", "REDUCE_MIN"):
    for kind in ("int8", "int16"):
        case(f"{kind} {name}, codes -20 to 20", name, -20, 20, (0, 0), (1, 1), kind=kind, right=True)
END
