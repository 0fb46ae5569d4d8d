#!/usr/bin/env bash
# LiteRT 2.3.0: the interpreter of reference kernels (BUILTIN_REF) has no ROUND, which all other interpreters have.
#
# Expected: reference kernels run each file that the others run.
# Happens: the interpreter refuses a file with ROUND.
# Seen, for 0.5, 1.5, 2.5: without XNNPACK [0, 2, 2]; BUILTIN_REF "Didn't find op for builtin opcode 'ROUND' version '1'".
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python ai-edge-litert==2.3.0 flatbuffers==25.12.19 numpy==2.4.6
environment/bin/python 2>/dev/null - <<'END'
import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType

numbers = np.array([0.5, 1.5, 2.5], np.float32)
model, graph, code, rounding = schema.ModelT(), schema.SubGraphT(), schema.OperatorCodeT(), schema.OperatorT()
model.version, model.subgraphs, model.operatorCodes, model.buffers = 3, [graph], [code], [schema.BufferT()]
graph.tensors, graph.operators, graph.inputs, graph.outputs = [], [rounding], [0], [1]
for name in ("input", "output"):
    tensor = schema.TensorT()
    tensor.name, tensor.buffer, tensor.shape, tensor.type = name, 0, [3], schema.TensorType.FLOAT32
    graph.tensors.append(tensor)
code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.ROUND
code.version, rounding.inputs, rounding.outputs = 1, [0], [1]
builder = flatbuffers.Builder()
builder.Finish(model.Pack(builder), b"TFL3")
content = bytes(builder.Output())

plain = Interpreter(model_content=content, experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES)
plain.allocate_tensors()
plain.set_tensor(0, numbers)
plain.invoke()
print("without XNNPACK", plain.get_tensor(1).tolist())
assert plain.get_tensor(1).tolist() == [0.0, 2.0, 2.0]
try:
    Interpreter(model_content=content, experimental_op_resolver_type=OpResolverType.BUILTIN_REF).allocate_tensors()
except ValueError as error:
    print("BUILTIN_REF", error)
    assert "Didn't find op for builtin opcode 'ROUND' version '1'" in str(error)
else:
    raise SystemExit("BUILTIN_REF has ROUND")
END
