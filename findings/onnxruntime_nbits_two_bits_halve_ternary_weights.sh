#!/usr/bin/env bash
# ONNX Runtime 1.32.0: MatMulNBitsQuantizer makes -s, 0, s/2 of ternary weights -s, 0, s, with 2 bits and is_symmetric.
#
# Expected: a symmetric step for which the codes -1, 0, 1 give the ternary weights back: they fit in 2 bits.
# Happens: the step is s / 2 and the codes end at -2 and 1, so each +s is halved, and each block gets a negative mean.
# With 4 bits +s becomes 0.875 s, with 8 bits 0.992 s. Without is_symmetric both ends become 0.667 s, 0.933 s, 0.996 s.
# Nothing is said.
# Seen, as values / s and relative error: 2 bits -1 0 0.5, 0.37; 4 bits -1 0 0.875, 0.09; 8 bits -1 0 0.992, 0.01;
# 2 bits with a zero point -0.667 0 0.667, 0.33.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 onnx-ir==1.1.0 numpy==2.4.6 \
    ml-dtypes==0.6.0
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

INPUTS, SIZE = 64, np.float32(0.3)
weight = SIZE * np.random.default_rng(0).integers(-1, 2, (INPUTS, 8)).astype(np.float32)
WANTED = {
    (2, True): [-1, 0, 0.5],
    (4, True): [-1, 0, 0.875],
    (8, True): [-1, 0, 0.992],
    (2, False): [-0.667, 0, 0.667],
    (4, False): [-0.933, 0, 0.933],
    (8, False): [-0.996, 0, 0.996],
}
for (bits, is_symmetric), wanted in WANTED.items():
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "weight"], ["y"])],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [INPUTS, INPUTS])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [INPUTS, 8])],
        [numpy_helper.from_array(weight, "weight")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    tool = MatMulNBitsQuantizer(model, bits=bits, block_size=32, is_symmetric=is_symmetric)
    tool.process()
    session = onnxruntime.InferenceSession(tool.model.model.SerializeToString())
    found = session.run(None, {"x": np.eye(INPUTS, dtype=np.float32)})[0]
    values, error = np.unique((found / SIZE).round(3)), np.linalg.norm(found - weight) / np.linalg.norm(weight)
    print(f"{bits} bits,", "symmetric:" if is_symmetric else "zero point:", *values, f"error {error:.2f}")
    assert np.allclose(values, wanted, atol=2e-3)
    assert (found[weight == 0] == 0).all()
END
