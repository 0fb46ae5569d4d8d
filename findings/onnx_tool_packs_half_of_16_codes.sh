#!/usr/bin/env bash
# onnx-tool 1.0.1: weights of 4 bits and type "asym" are packed without their highest bit: codes 8 to 15 become 0 to 7.
#
# Expected: codes from 0 to 15, packed in pairs, which with scales and zero points give the weights up to half a step.
# Happens: pack_4bits reads codes as signed, and takes the sign from the bit of 128, which no code from 0 to 15 has. So
# the bit of 8 is lost in every code. About half of the weights are 8 steps too small. Nothing is said. Besides, the
# codes of a row may reach 16, which is packed as 0. With type "sym", and with 8 bits, codes are right.
# Seen: codes found in the packed weights: 0 to 7 for "asym", -7 to 7 for "sym". Largest error in steps: 8.5 and 0.4.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx-tool==1.0.1 onnx==1.23.2 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnx
import onnx_tool
from onnx import TensorProto, helper, numpy_helper
from onnx_tool.quantization import graph_quantize, quantize

weight = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
graph = helper.make_graph(
    [helper.make_node("MatMul", ["x", "weight"], ["y"])],
    "graph",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, [3, 8])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, [3, 16])],
    [numpy_helper.from_array(weight, "weight")],
)
model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
onnx.checker.check_model(model, full_check=True)
onnx.save(model, "float.onnx")
for kind in ("sym", "asym"):
    for bits in (8, 4):
        quantized = onnx_tool.Model("float.onnx").graph
        graph_quantize(quantized, "weight", block=-1, type=kind, bits=bits)
        names = ("q", "s", "z")[: 2 + (kind == "asym")]
        held = {name: quantized.tensormap[f"weight_ot_{name}"].numpy for name in names}
        codes = held["q"].astype(int)
        if bits == 4:
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(len(codes), -1)
            codes = np.where(codes > 7, codes - 16, codes) if kind == "sym" else codes
        scale, zero = held["s"].astype(float)[:, None], np.reshape(held.get("z", 0), (-1, 1)).astype(int)
        error = float((abs((codes - zero) * scale - weight.T) / scale).max())
        whole = quantize(weight.T, -1, kind, bits)[0]
        lost = float((whole != codes).mean())
        print(f"{kind}, {bits} bits: codes {codes.min()} to {codes.max()}, error {error:.1f} steps, wrong {lost:.0%}")
        if (kind, bits) == ("asym", 4):
            assert codes.max() == 7 and error > 7.5 and np.array_equal(codes, whole & 7)
        else:
            assert error < 0.6 and lost == 0
END
