#!/usr/bin/env bash
# onnx 1.23.2: the ReferenceEvaluator's QLinearConv of signals and volumes scales along another axis than the filters.
#
# Expected: w_scale of shape (M) holds a scale for each of M filters, as the standard says, for inputs of any rank.
# Happens: the scales become (1, M, 1, 1), which is right for images alone. In volumes they lie along the depth; signals
# gain a dimension, as each output is computed with the scale of every filter. If the depth of the output, or the batch,
# is neither M nor 1, numpy refuses the shapes; else nothing is said.
# Seen, 4 filters, one scale of which is 8 times the others, outputs 4 wide; codes that differ from the exact ones:
# images 0 of 64; volumes 96 of 256 (ONNX Runtime 1.32.0: 0); signals have shape (1, 4, 4, 4) in place of (1, 4, 4).
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
from itertools import product

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

print("onnx", onnx.__version__, "onnxruntime", onnxruntime.__version__)
draw = np.random.default_rng(0)
scales = np.array([0.7, 0.7, 5.6, 0.7], np.float32)


def exact(x: np.ndarray, w: np.ndarray, rank: int) -> np.ndarray:
    """By its definition, in float64; the output has 4 places along each side."""
    sums = np.zeros((1, 4) + (4,) * rank)
    for place in product(range(4), repeat=rank):
        window = tuple(slice(start, start + 3) for start in place)
        products = (x[0][(slice(None), *window)].astype(np.int64) - 128) * w.astype(np.int64)
        sums[(0, slice(None), *place)] = products.reshape(4, -1).sum(1)
    ratios = scales.astype(np.float64).reshape(-1, *(1,) * rank) / 900
    return np.clip(np.rint(sums * ratios) + 128, 0, 255)


for rank in (1, 2, 3):
    x = draw.integers(0, 256, (1, 3) + (6,) * rank).astype(np.uint8)
    w = draw.integers(-128, 128, (4, 3) + (3,) * rank).astype(np.int8)
    zero = np.array(128, np.uint8)
    one = np.array(1, np.float32)
    values = [x, one, zero, w, scales, np.zeros(4, np.int8), np.array(900, np.float32), zero]
    feed = dict(zip("abcdefgh", values))
    kinds = [helper.np_dtype_to_tensor_dtype(value.dtype) for value in values]
    inputs = [helper.make_tensor_value_info(name, kind, feed[name].shape) for name, kind in zip(feed, kinds)]
    output = helper.make_tensor_value_info("y", TensorProto.UINT8, (1, 4) + (4,) * rank)
    node = helper.make_node("QLinearConv", list(feed), ["y"])
    model = helper.make_model(
        helper.make_graph([node], "g", inputs, [output]), opset_imports=[helper.make_opsetid("", 21)], ir_version=10
    )
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    wanted, runtime = exact(x, w, rank), session.run(None, feed)[0]
    reference = ReferenceEvaluator(model).run(None, feed)[0]
    print(f"rank {rank}: {reference.shape}, ONNX Runtime {runtime.shape}: {(runtime != wanted).sum()} differ", end="")
    assert (runtime == wanted).all()
    if rank == 1:
        print()
        assert reference.shape == (1, 4, 4, 4)
    else:
        print(f"; reference: {(reference != wanted).sum()} of {wanted.size}")
        assert ((reference != wanted).sum() > 50) == (rank == 3)
        assert rank == 3 or (reference == wanted).all()
END
