#!/usr/bin/env bash
# LiteRT 2.3.0: with XNNPACK, which it uses by default, denormal floats are 0.
#
# Expected: to add 0 changes no float. An operator gives the same result with XNNPACK as without.
# Happens: with XNNPACK, a denormal float (below 1.2e-38) plus 0 is 0. Other kernels of LiteRT keep it, also in the same
# file. So the sign of a denormal difference is lost.
# Seen, for -1.5e-38, -1e-38 and -1.4e-45 plus 0: with XNNPACK [-1.5e-38, 0, 0], without it [-1.5e-38, -1e-38, -1.4e-45].
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python ai-edge-litert==2.3.0 flatbuffers==25.12.19 numpy==2.4.6
environment/bin/python 2>/dev/null - <<'END'
import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType

numbers = np.array([-1.5e-38, -1e-38, -1.4e-45], np.float32)
model, graph, code, adding = schema.ModelT(), schema.SubGraphT(), schema.OperatorCodeT(), schema.OperatorT()
model.version, model.subgraphs, model.operatorCodes = 3, [graph], [code]
model.buffers = [schema.BufferT(), schema.BufferT(), schema.BufferT()]
model.buffers[1].data = np.zeros(4, np.uint8)  # the float 0
graph.tensors, graph.operators, graph.inputs, graph.outputs = [], [adding], [0], [2]
for place, name in enumerate(("input", "zero", "sum")):
    tensor = schema.TensorT()
    tensor.name, tensor.buffer, tensor.shape = name, place, [1 if name == "zero" else len(numbers)]
    tensor.type = schema.TensorType.FLOAT32
    graph.tensors.append(tensor)
code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.ADD
adding.inputs, adding.outputs = [0, 1], [2]
adding.builtinOptions, adding.builtinOptionsType = schema.AddOptionsT(), schema.BuiltinOptions.AddOptions
builder = flatbuffers.Builder()
builder.Finish(model.Pack(builder), b"TFL3")

found = []
for resolver in (OpResolverType.AUTO, OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES):
    interpreter = Interpreter(model_content=bytes(builder.Output()), experimental_op_resolver_type=resolver)
    interpreter.allocate_tensors()
    interpreter.set_tensor(0, numbers)
    interpreter.invoke()
    found.append(interpreter.get_tensor(2).tolist())
    print(resolver.name, found[-1])
assert found[0] == [numbers[0], 0, 0]
assert found[1] == numbers.tolist()
END
