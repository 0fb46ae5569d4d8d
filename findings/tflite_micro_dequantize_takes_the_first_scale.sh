#!/usr/bin/env bash
# LiteRT for Microcontrollers (tflite-micro 0.dev20261023182759): DEQUANTIZE takes the first scale for all channels.
#
# Expected: a tensor of integers with a scale for each channel becomes floats by these scales, as in LiteRT 2.3.0. Or the
# file is refused.
# Happens: all channels are multiplied by the first scale, without a word.
# Seen, for the integers 1, 1, 1 with the scales 1, 2, 4: LiteRT [1, 2, 4], LiteRT for Microcontrollers [1, 1, 1].
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python ai-edge-litert==2.3.0 flatbuffers==25.12.19 numpy==2.4.6 \
    tflite-micro==0.dev20261023182759
environment/bin/python 2>/dev/null - <<'END'
import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from tflite_micro import runtime

SCALES = [1.0, 2.0, 4.0]
codes, zeros = np.ones(3, np.int8), np.zeros(3, np.float32)
model, graph, builtin = schema.ModelT(), schema.SubGraphT(), schema.BuiltinOperator
model.version, model.subgraphs, model.operatorCodes = 3, [graph], []
model.buffers = [schema.BufferT() for _ in range(2)]
model.buffers[1].data = codes.view(np.uint8)
graph.tensors, graph.operators, graph.inputs, graph.outputs = [], [], [0], [3]
for place, name in enumerate(("input", "codes", "floats", "sum")):
    tensor = schema.TensorT()
    tensor.name, tensor.buffer, tensor.shape = name, int(name == "codes"), [3]
    tensor.type = schema.TensorType.INT8 if name == "codes" else schema.TensorType.FLOAT32
    graph.tensors.append(tensor)
graph.tensors[1].quantization = schema.QuantizationParametersT()
graph.tensors[1].quantization.scale, graph.tensors[1].quantization.zeroPoint = SCALES, [0, 0, 0]
for name, version, given, result, options in (
    ("DEQUANTIZE", 2, [1], 2, schema.DequantizeOptionsT()),
    ("ADD", 1, [0, 2], 3, schema.AddOptionsT()),
):
    code, operator = schema.OperatorCodeT(), schema.OperatorT()
    code.builtinCode = code.deprecatedBuiltinCode = getattr(builtin, name)
    code.version, operator.opcodeIndex = version, len(model.operatorCodes)
    operator.inputs, operator.outputs, operator.builtinOptions = given, [result], options
    operator.builtinOptionsType = getattr(schema.BuiltinOptions, type(options).__name__[:-1])
    model.operatorCodes.append(code)
    graph.operators.append(operator)
builder = flatbuffers.Builder()
builder.Finish(model.Pack(builder), b"TFL3")
content = bytes(builder.Output())

large = Interpreter(model_content=content, experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES)
large.allocate_tensors()
large.set_tensor(0, zeros)
large.invoke()
micro = runtime.Interpreter.from_bytes(content, arena_size=1 << 20)
micro.set_input(zeros, 0)
micro.invoke()
found = large.get_tensor(3).tolist(), micro.get_output(0).tolist()
print("LiteRT", found[0])
print("LiteRT for Microcontrollers", found[1])
assert found == (SCALES, [1.0, 1.0, 1.0])
END
