#!/usr/bin/env bash
# OpenVINO 2026.4.1: the scales of a QLinearConv's filters are applied to its input channels.
#
# Expected: as ONNX defines it and ONNX Runtime computes it, w_scale has one number for each filter (axis 0 of the
# weight); or the file is refused.
# Happens: the weight is dequantized along axis 1. Unequal numbers of channels are refused with an error. With as many
# filters as input channels, as in most layers of a ResNet, the numbers are those of a weight whose input channels were
# scaled. Nothing is said. With one scale for all filters, all is right.
# Seen, for uint8, as share of outputs that are more than one code off: 4 to 4 channels, kernel 3: 90 %; kernel 1: 79 %;
# 3 to 3, kernel 3: 89 %; one scale, 4 to 8: 0 %; 4 to 8 with 8 scales: refused.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python onnx==1.23.2 onnxruntime==1.32.0 openvino==2026.4.1 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnx
import onnxruntime
import openvino
from numpy.lib.stride_tricks import sliding_window_view
from onnx import TensorProto, helper, numpy_helper

random = np.random.default_rng(0)
core = openvino.Core()
input_scale, output_scale, zero = np.float32(0.03), np.float32(0.25), np.uint8(121)


def convolved(x, weight):
    """The output codes, for a weight of real numbers."""
    windows = sliding_window_view(x.astype(np.float64) - zero, weight.shape[2:], (2, 3))
    real = np.einsum("nchwij,ocij->nohw", windows, weight) * np.float64(input_scale) / np.float64(output_scale)
    return np.clip(np.rint(real) + zero, 0, 255)


def wrong(found, wanted):
    return (abs(found.astype(np.float64) - wanted) > 1).mean()


for inputs, filters, kernel, is_single in ((4, 4, 3, 0), (4, 4, 1, 0), (3, 3, 3, 0), (4, 8, 3, 1), (4, 8, 3, 0)):
    x = random.integers(0, 256, (2, inputs, 8, 8)).astype(np.uint8)
    weight = random.integers(-127, 128, (filters, inputs, kernel, kernel)).astype(np.int8)
    scales = np.float32(0.005) if is_single else random.uniform(0.001, 0.01, filters).astype(np.float32)
    held = {"xs": input_scale, "xz": zero, "w": weight, "ws": scales, "wz": np.zeros(scales.shape, np.int8)}
    held |= {"ys": output_scale, "yz": zero}
    ends = [helper.make_tensor_value_info("x", TensorProto.UINT8, x.shape)]
    ends += [helper.make_tensor_value_info("y", TensorProto.UINT8, [2, filters, 9 - kernel, 9 - kernel])]
    node = helper.make_node("QLinearConv", ["x", *held], ["y"])
    initial = [numpy_helper.from_array(np.asarray(value), name) for name, value in held.items()]
    graph = helper.make_graph([node], "graph", ends[:1], ends[1:], initial)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, "network.onnx")
    wanted = convolved(x, weight * scales.astype(np.float64).reshape(-1, 1, 1, 1))
    session = onnxruntime.InferenceSession("network.onnx", providers=["CPUExecutionProvider"])
    assert wrong(session.run(None, {"x": x})[0], wanted) == 0
    name = f"{inputs} to {filters} channels, kernel {kernel}, {scales.size} scales"
    try:
        network = openvino.convert_model("network.onnx")
    except openvino.frontend.OpConversionFailure:
        print(f"{name}: refused")
        assert inputs != filters and not is_single
        continue
    found = core.compile_model(network, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([x])[0]
    print(f"{name}: {100 * wrong(found, wanted):.0f} % of the outputs are wrong")
    assert inputs == filters or is_single
    assert wrong(found, wanted) == 0 if is_single else wrong(found, wanted) > 0.5
    if not is_single:
        assert wrong(found, convolved(x, weight * scales.astype(np.float64).reshape(1, -1, 1, 1))) == 0
END
