#!/usr/bin/env bash
# LiteRT 2.3.0: RESIZE_BILINEAR of 16-bit codes takes its pixels from other places, the further right, the more.
#
# Expected: bilinear interpolation, within a code, as of floats, and as of 8-bit codes with the default kernels.
# Happens: the distance of two output pixels, in input pixels, is rounded to 1/1024, and then multiplied by the column.
# So each column adds up to a 2048th of an input pixel. The reference kernels of 8 bits do so, too. Nothing is said.
# Seen, rows of random pixels, largest errors in percent of the range, of int16, int8's reference kernels, int8: 7 to
# 224 with align_corners 5.1, 5.1, 0.2; with half_pixel_centers 32 to 48 0.8, 0.9, 0.2, 480 to 416 15.2, 15.1, 0.2,
# 640 to 416 10.5, 10.5, 0.2. Floats: 0.0. 65 to 513 with align_corners, where the distance is 1/8: 0.0, 0.2, 0.2.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python ai-edge-litert==2.3.0 flatbuffers==25.12.19 numpy==2.4.6
environment/bin/python 2>errors - <<'END' || { cat errors; exit 1; }
import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType


def network(kind, width, wanted, half, corners):
    """A file with one RESIZE_BILINEAR from 1 x width to 1 x wanted pixels."""
    model, graph, code, resize = schema.ModelT(), schema.SubGraphT(), schema.OperatorCodeT(), schema.OperatorT()
    size = schema.BufferT()
    size.data = np.frombuffer(np.array([1, wanted], np.int32).tobytes(), np.uint8)
    model.version, model.subgraphs, model.operatorCodes, model.buffers = 3, [graph], [code], [schema.BufferT(), size]
    graph.tensors, graph.operators, graph.inputs, graph.outputs = [], [resize], [0], [2]
    row, resized = ([1, 1, columns, 1] for columns in (width, wanted))
    for name, shape, of, buffer in (("row", row, kind, 0), ("size", [2], "INT32", 1), ("resized", resized, kind, 0)):
        tensor = schema.TensorT()
        tensor.name, tensor.shape, tensor.type, tensor.buffer = name, shape, getattr(schema.TensorType, of), buffer
        if of.startswith("INT") and name != "size":
            tensor.quantization = schema.QuantizationParametersT()
            tensor.quantization.scale, tensor.quantization.zeroPoint = [1.0], [0]
        graph.tensors.append(tensor)
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.RESIZE_BILINEAR
    code.version, resize.inputs, resize.outputs = 4, [0, 1], [2]
    resize.builtinOptionsType = schema.BuiltinOptions.ResizeBilinearOptions
    resize.builtinOptions = schema.ResizeBilinearOptionsT()
    resize.builtinOptions.halfPixelCenters, resize.builtinOptions.alignCorners = half, corners
    builder = flatbuffers.Builder()
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


KINDS = (
    ("FLOAT32", np.float32, 32767, "AUTO"),
    ("INT16", np.int16, 32767, "AUTO"),
    ("INT8", np.int8, 127, "AUTO"),
    ("INT8", np.int8, 127, "BUILTIN_REF"),
)
SEEN = (
    (7, 224, False, (0, 5.1, 0.2, 5.1)),
    (65, 513, False, (0, 0, 0.2, 0.2)),
    (32, 48, True, (0, 0.8, 0.2, 0.9)),
    (480, 416, True, (0, 15.2, 0.2, 15.1)),
    (640, 416, True, (0, 10.5, 0.2, 10.5)),
)
for width, wanted, half, seen in SEEN:
    column = np.arange(wanted)
    place = (column + 0.5) * width / wanted - 0.5 if half else column * (width - 1) / (wanted - 1)
    below = np.floor(place).astype(int)
    errors = []
    for kind, number, largest, kernels in KINDS:
        x = np.random.default_rng(0).uniform(-largest, largest, width).astype(number)
        left, right = (x.astype(float)[(below + next_one).clip(0, width - 1)] for next_one in (0, 1))
        interpreter = Interpreter(
            model_content=network(kind, width, wanted, half, not half),
            experimental_op_resolver_type=getattr(OpResolverType, kernels),
        )
        interpreter.allocate_tensors()
        interpreter.set_tensor(0, x.reshape(1, 1, width, 1))
        interpreter.invoke()
        exact = left + (right - left) * (place - below)
        errors.append(abs(interpreter.get_tensor(2).ravel() - exact).max() / (2 * largest) * 100)
    print(width, "to", wanted, "half_pixel_centers" if half else "align_corners", end=": ")
    print(*(f"{kind} {kernels} {error:.1f}" for (kind, *_, kernels), error in zip(KINDS, errors)), sep=", ")
    assert np.allclose(errors, seen, rtol=0, atol=0.06)
END
