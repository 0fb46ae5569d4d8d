#!/usr/bin/env bash
# OpenVINO 2026.4.1: a Clip between two equal quantizers ends one code too low.
#
# Expected: with steps of 0.05, Clip(0, 1) lets code 20, 1.0, through, as numpy and ONNX Runtime do.
# Happens: the end becomes a code by rounding down, and 1 / 0.05 in float32 is just below 20: all that is clipped comes
# out as 0.95. An end between two codes goes to the lower one, not to the nearest: -1 with steps of 0.03 to code -34, in
# place of -33. Without the quantizer in front, and with other ends, such as 6 with steps of 6 / 255, it is right.
# Seen, as largest output and share of outputs that are one code off: Clip(0, 1) and steps of 0.05: 0.95 and 67 %,
# without the quantizer in front 1.0 and 0 %; Clip(0, 3), 0.05: 2.95 and 45 %; Clip(0, 6), 6 / 255: 6.0 and 0 %.
# Clip(-1, 1), 0.03: smallest -1.02, right -0.99, and 11 %.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 openvino==2026.4.1 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnx
import onnxruntime
import openvino
from onnx import TensorProto, helper, numpy_helper

core = openvino.Core()
x = np.linspace(-2, 7, 512, dtype=np.float32).reshape(2, 4, 8, 8)


def quantizer(source, target):
    return [
        helper.make_node("QuantizeLinear", [source, "step", "zero"], [f"{target}_codes"]),
        helper.make_node("DequantizeLinear", [f"{target}_codes", "step", "zero"], [target]),
    ]


for step, zero, low, high, is_first, right in (
    (0.05, 0, 0, 1, True, False),
    (0.05, 0, 0, 1, False, True),
    (0.05, 0, 0, 3, True, False),
    (6 / 255, 0, 0, 6, True, True),
    (0.03, 121, -1, 1, True, False),
):
    held = {"step": np.float32(step), "zero": np.uint8(zero), "low": np.float32(low), "high": np.float32(high)}
    nodes = quantizer("x", "a") if is_first else [helper.make_node("Identity", ["x"], ["a"])]
    nodes += [helper.make_node("Clip", ["a", "low", "high"], ["b"]), *quantizer("b", "y")]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name in "xy"]
    initial = [numpy_helper.from_array(np.asarray(value), name) for name, value in held.items()]
    graph = helper.make_graph(nodes, "graph", ends[:1], ends[1:], initial)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, "network.onnx")

    def quantized(values, held=held):
        codes = np.clip(np.rint(values / held["step"]) + held["zero"], 0, 255) - held["zero"]
        return codes.astype(np.float32) * held["step"]

    wanted = quantized(np.clip(quantized(x) if is_first else x, held["low"], held["high"]))
    session = onnxruntime.InferenceSession("network.onnx", providers=["CPUExecutionProvider"])
    assert abs(session.run(None, {"x": x})[0] - wanted).max() < 1e-5
    compiled = core.compile_model(openvino.convert_model("network.onnx"), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found = compiled([x])[0]
    share = (abs(found - wanted) > 0.5 * step).mean()
    front = "" if is_first else ", no quantizer in front"
    print(f"Clip({low}, {high}), steps of {step:.4f}{front}: from {found.min():.2f} to {found.max():.2f}", end=", ")
    print(f"right {wanted.min():.2f} to {wanted.max():.2f}, {100 * share:.0f} % off")
    assert share < 0.01 if right else share > 0.1
END
