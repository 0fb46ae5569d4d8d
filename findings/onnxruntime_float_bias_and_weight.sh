#!/usr/bin/env bash
# ONNX Runtime 1.32.0: its default optimizations quantize the float bias or weight of a Conv between quantizers.
#
# Expected: a Conv whose input comes from DequantizeLinear and whose output goes to QuantizeLinear, with a float bias or
# a float weight, is computed with these floats.
# Happens: it becomes a QLinearConv in integers, without a word: a float bias is rounded to multiples of the input's step
# times the weight's, and a float weight to 8 bits. Without QuantizeLinear behind it, all stays float.
# Seen, as the largest difference from a session without optimizations, in steps of the output: float bias 2; float
# weight 1; the same two without QuantizeLinear behind the Conv 0 and 0.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python - <<'END'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

weight = np.random.default_rng(1).integers(-3, 4, (4, 2, 3, 3))
image = np.random.default_rng(0).uniform(0, 0.3, (1, 2, 8, 8)).astype(np.float32)
STEP = 0.01


def largest_difference(is_weight_float, is_quantized_behind):
    constants = {
        "step": np.float32(0.1),
        "zero": np.uint8(0),
        "weight_step": np.float32(0.5),
        "codes": weight.astype(np.int8),
        "weight_zero": np.int8(0),
        "float_weight": weight.astype(np.float32) * np.float32(0.4999),
        "bias": np.array([0.013, 0.021, -0.024, 0.077], np.float32),
        "output_step": np.float32(STEP),
        "output_zero": np.uint8(100),
    }
    nodes = [
        helper.make_node("QuantizeLinear", ["image", "step", "zero"], ["a"]),
        helper.make_node("DequantizeLinear", ["a", "step", "zero"], ["input"]),
        helper.make_node("DequantizeLinear", ["codes", "weight_step", "weight_zero"], ["weight"]),
        helper.make_node("Conv", ["input", "float_weight" if is_weight_float else "weight", "bias"], ["b"]),
        helper.make_node("QuantizeLinear", ["b", "output_step", "output_zero"], ["c"]),
        helper.make_node("DequantizeLinear", ["c", "output_step", "output_zero"], ["d"]),
    ]
    graph = helper.make_graph(
        nodes if is_quantized_behind else nodes[:4],
        "graph",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [1, 2, 8, 8])],
        [helper.make_tensor_value_info("d" if is_quantized_behind else "b", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(value, key) for key, value in constants.items()],
    )
    file = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10).SerializeToString()
    plain, usual = onnxruntime.SessionOptions(), onnxruntime.SessionOptions()
    plain.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    plain.log_severity_level = usual.log_severity_level = 4
    sessions = (onnxruntime.InferenceSession(file, options) for options in (plain, usual))
    one, other = (session.run(None, {"image": image})[0] for session in sessions)
    return round(float(np.abs(one - other).max()) / STEP, 3)


found = {key: largest_difference(*key) for key in ((False, True), (True, True), (False, False), (True, False))}
print("float bias, float weight, and both without QuantizeLinear behind:", *found.values())
assert found[False, True] >= 1
assert found[True, True] >= 1
assert found[False, False] < 0.01
assert found[True, False] < 0.01
END
