#!/usr/bin/env bash
# onnx 1.23.2: the ReferenceEvaluator's QuantizeLinear gives large numbers the lowest code.
#
# Expected: saturation, as the standard says: what lies above the range gets the highest code.
# Happens: x / scale is rounded to int32 before it is clamped. Where the ratio is 2^31 or more, that wraps to the
# smallest int32 (x86-64), and the clamp makes it the lowest code. Nothing is said. An outlier of 30 behind a step of
# 1e-8, or an infinite logit, becomes the smallest number. Ratios below -2^31 get the lowest code, by luck.
# Seen, codes of 30, 1e6, 3e9, 1e20, inf and -3e9 with step 1 and zero 3: 33, 255, 0, 0, 0, 0; ONNX Runtime 1.32.0:
# 33, 255, 255, 255, 255, 0. The same for int8, uint16 and a scale for each channel.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

print("onnx", onnx.__version__, "onnxruntime", onnxruntime.__version__)
numbers = np.array([30, 1e6, 3e9, 1e20, np.inf, -3e9], np.float32)


def codes(dtype: type, zero: int, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Of the evaluator and of ONNX Runtime, of images (1, 6, 1, channels or 1)."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    x = numbers.reshape(1, 6, 1) if channels == 1 else np.tile(numbers.reshape(6, 1, 1), (1, channels, 1))
    shape = () if channels == 1 else (channels,)
    feed = {"x": x, "s": np.ones(shape, np.float32), "z": np.full(shape, zero, dtype)}
    kinds = {"x": TensorProto.FLOAT, "s": TensorProto.FLOAT, "z": kind}
    inputs = [helper.make_tensor_value_info(name, kinds[name], value.shape) for name, value in feed.items()]
    node = helper.make_node("QuantizeLinear", ["x", "s", "z"], ["y"], axis=1)
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", kind, x.shape)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = ReferenceEvaluator(model).run(None, feed)[0], session.run(None, feed)[0]
    return tuple(each.reshape(6, -1)[:, 0] for each in found)


for dtype, zero, channels in ((np.uint8, 3, 1), (np.int8, 0, 1), (np.uint16, 3, 1), (np.uint8, 3, 2)):
    ends = np.iinfo(dtype)
    wanted = np.clip(numbers.astype(np.float64) + zero, ends.min, ends.max).astype(dtype)
    reference, runtime = codes(dtype, zero, channels)
    print(np.dtype(dtype).name, channels, "reference", reference, "ONNX Runtime", runtime)
    assert (runtime == wanted).all()
    assert (reference[[0, 1, 5]] == wanted[[0, 1, 5]]).all() and (reference[2:5] == ends.min).all()
END
