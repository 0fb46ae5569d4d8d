#!/usr/bin/env bash
# LiteRT 2.3.0: in reference kernels, LOCAL_RESPONSE_NORMALIZATION leaves out the last channel of each window.
#
# Expected: a radius of 2 is a window of 5 channels, two on each side, as TensorFlow's tf.nn.lrn defines it, and as the
# default kernels and those without XNNPACK have it; by the reference kernels (BUILTIN_REF) others are checked.
# Happens: the window ends one channel too early, so it has 4 channels, two below and one above. With a radius of 1 it
# has 2 channels. Only the last channels, whose window ends with the picture, are right. Nothing is said.
# Seen, 16 channels, alpha 0.3, beta 0.5, largest errors by largest output of default kernels, without XNNPACK, and of
# reference kernels: radius 2 2e-7, 2e-7, 0.51; radius 1 4e-7, 4e-7, 0.48; radius 2, with alpha 0.0001 and beta 0.75, as
# AlexNet has them, 7e-8, 7e-8, 0.0015.
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
x = np.random.default_rng(0).normal(0, 3, (2, 5, 5, 16)).astype(np.float32)


def outputs(radius, bias, alpha, beta):
    model, graph, code, operator = schema.ModelT(), schema.SubGraphT(), schema.OperatorCodeT(), schema.OperatorT()
    model.version, model.subgraphs, model.operatorCodes, model.buffers = 3, [graph], [code], [schema.BufferT()]
    graph.tensors, graph.operators, graph.inputs, graph.outputs = [], [operator], [0], [1]
    for name in ("input", "output"):
        tensor = schema.TensorT()
        tensor.name, tensor.buffer, tensor.shape, tensor.type = name, 0, list(x.shape), schema.TensorType.FLOAT32
        graph.tensors.append(tensor)
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.LOCAL_RESPONSE_NORMALIZATION
    code.version, operator.inputs, operator.outputs = 1, [0], [1]
    options = schema.LocalResponseNormalizationOptionsT()
    options.radius, options.bias, options.alpha, options.beta = radius, bias, alpha, beta
    operator.builtinOptionsType = schema.BuiltinOptions.LocalResponseNormalizationOptions
    operator.builtinOptions = options
    builder = flatbuffers.Builder()
    builder.Finish(model.Pack(builder), b"TFL3")
    for resolver in RESOLVERS:
        interpreter = Interpreter(
            model_content=bytes(builder.Output()), experimental_op_resolver_type=getattr(OpResolverType, resolver)
        )
        interpreter.allocate_tensors()
        interpreter.set_tensor(0, x)
        interpreter.invoke()
        yield interpreter.get_tensor(1)


def formula(below, above, bias, alpha, beta):
    squares = x.astype(float) ** 2
    sums = [squares[..., max(0, c - below) : c + above + 1].sum(-1) for c in range(x.shape[-1])]
    return x / (bias + alpha * np.stack(sums, -1)) ** beta


for radius, *options in ((2, 1, 0.3, 0.5), (1, 1, 0.3, 0.5), (5, 1, 1, 0.5), (2, 2, 1e-4, 0.75)):
    right, short = formula(radius, radius, *options), formula(radius, radius - 1, *options)
    errors = [np.abs(found - right).max() / np.abs(right).max() for found in outputs(radius, *options)]
    *_, reference = outputs(radius, *options)
    print(f"radius {radius}, bias, alpha, beta {options}:", *(f"{error:.2g}" for error in errors), end="; ")
    print(f"of windows that end a channel early {np.abs(reference - short).max() / np.abs(right).max():.2g}", end="; ")
    print(f"last channel {np.abs(reference - right)[..., -1].max():.2g}")
    assert errors[0] < 1e-5 and errors[1] < 1e-5 and errors[2] > (0.1 if options[1] > 0.1 else 1e-4)
    assert np.abs(reference - short).max() < 1e-5 and np.abs(reference - right)[..., -1].max() < 1e-5
END
