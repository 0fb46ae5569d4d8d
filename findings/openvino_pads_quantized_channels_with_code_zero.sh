#!/usr/bin/env bash
# OpenVINO 2026.4.1: channels that a Pad adds between two quantizers get the code 0, not the zero point.
#
# A shortcut that widens a quantized network (zero channels, as in the CIFAR ResNets) is DequantizeLinear, Pad of the
# channels by 0.0, QuantizeLinear. ONNX Runtime's quantizer writes it so, with asymmetric codes.
# Expected: the new channels are 0.0, as in ONNX Runtime; or the file is refused.
# Happens: they are (0 - zero point) * scale. Padded rows and columns are right, and so are channels where the zero point
# is 0. No message. The same file with int8 codes in a whole ResNet-20 is refused at compilation ("inconsistent shapes").
# Seen, as the largest error with scale 0.05, for a zero point of -5 (int8), 0 (int8), 123 (uint8), 0 (uint8):
# channels 0.25, 0.0, 6.15, 0.0; rows and columns at most 1.2e-07
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python openvino==2026.4.1 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python -W ignore - <<'END'
import numpy as np
import onnx
import onnxruntime
import openvino
from onnx import helper, numpy_helper


def widened(zero_point, pads):
    numbers = {"scale": np.float32(0.05), "zero": zero_point, "pads": np.array(pads, np.int64)}
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "zero"], ["codes"]),
        helper.make_node("DequantizeLinear", ["codes", "scale", "zero"], ["floats"]),
        helper.make_node("Pad", ["floats", "pads"], ["padded"]),
        helper.make_node("QuantizeLinear", ["padded", "scale", "zero"], ["padded codes"]),
        helper.make_node("DequantizeLinear", ["padded codes", "scale", "zero"], ["y"]),
    ]
    shapes = [1, 4, 6, 6], [1, *(size + before + after for size, before, after in zip((4, 6, 6), pads[1:4], pads[5:]))]
    ends = [helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, s) for n, s in zip("xy", shapes)]
    held = [numpy_helper.from_array(np.asarray(number), name) for name, number in numbers.items()]
    graph = helper.make_graph(nodes, "widened", ends[:1], ends[1:], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    return model.SerializeToString()


CHANNELS, SIDES = [0, 2, 0, 0, 0, 2, 0, 0], [0, 0, 1, 1, 0, 0, 1, 1]
image = np.linspace(-4, 4, 144, dtype=np.float32).reshape(1, 4, 6, 6)
errors = {}
for zero in (np.int8(-5), np.int8(0), np.uint8(123), np.uint8(0)):
    for what, pads in (("channels", CHANNELS), ("sides", SIDES)):
        file = widened(zero, pads)
        wanted = onnxruntime.InferenceSession(file).run(None, {"x": image})[0]
        network = openvino.Core().read_model(file)
        compiled = openvino.Core().compile_model(network, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        errors[zero.dtype.name, int(zero), what] = float(abs(compiled([image])[0] - wanted).max())
        print(zero.dtype, int(zero), what, errors[zero.dtype.name, int(zero), what])
assert abs(errors["int8", -5, "channels"] - 0.25) < 1e-6
assert abs(errors["uint8", 123, "channels"] - 6.15) < 1e-6
assert all(error < 1e-6 for (_, zero, what), error in errors.items() if what == "sides" or zero == 0)
END
