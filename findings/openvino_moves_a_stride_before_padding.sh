#!/usr/bin/env bash
# OpenVINO 2026.4.1: a convolution of 1x1 with a stride and padding gives outputs of another size behind other nodes.
#
# The guess: a stride of 2 over 14 pixels with a padding of 1 on each side gives 8 pixels, as the model's own shape
# inference says. What happens: when the model is compiled, the stride of a window of one pixel moves to what comes
# before it, such as a ReLU, but the padding stays behind. So 9 pixels come out. A Pad node before the convolution
# has the same fate. Nothing is said.
# Windows of 3x3 are right. So is a StridedSlice in place of the stride.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
uv venv --quiet --python 3.11 venv
uv pip install --quiet --python venv/bin/python openvino==2026.4.1 numpy==2.4.6
venv/bin/python - <<'PYTHON'
import numpy as np
import openvino
from openvino import opset14 as nodes

pixels = np.random.default_rng(0).standard_normal((1, 1, 14, 14)).astype(np.float32)


def run(kernel: int, padding: int, is_padded: bool = False, as_slice: bool = False) -> tuple[tuple[int, ...], np.ndarray]:
    """Return the size that the model states, and the outputs."""
    image = nodes.parameter([1, 1, 14, 14], openvino.Type.f32, "image")
    x = nodes.relu(image)
    if is_padded:
        sides = nodes.constant(np.array([0, 0, 1, 1]))
        x = nodes.pad(x, sides, sides, "constant", nodes.constant(np.float32(0)))
    stride = 2
    if as_slice:
        ends = nodes.constant(np.array([0, 0])), nodes.constant(np.array([1000, 1000]))
        sides = nodes.constant(np.array([0, 0, padding, padding]))
        x = nodes.pad(x, sides, sides, "constant", nodes.constant(np.float32(0)))
        x = nodes.slice(x, *ends, nodes.constant(np.array([2, 2])), nodes.constant(np.array([2, 3])))
        stride, padding = 1, 0
    weight = np.zeros((1, 1, kernel, kernel), np.float32)
    weight[..., kernel // 2, kernel // 2] = 1
    pads = [padding + kernel // 2] * 2
    conv = nodes.convolution(x, nodes.constant(weight), [stride] * 2, pads, pads, [1, 1])
    model = openvino.Model([nodes.result(conv.output(0))], [image], "model")
    stated = tuple(model.output(0).shape)
    compiled = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return stated, compiled(pixels)[0]


print("openvino", openvino.__version__)
wanted = np.pad(np.maximum(pixels, 0), ((0, 0), (0, 0), (1, 1), (1, 1)))[..., ::2, ::2]
for name, found in {
    "padding of its own": run(1, 1),
    "behind a Pad": run(1, 0, is_padded=True),
}.items():
    stated, outputs = found
    print(f"{name}: the model states {stated}, the outputs are {outputs.shape}")
    assert stated == wanted.shape == (1, 1, 8, 8)
    assert outputs.shape == (1, 1, 9, 9)
for name, (stated, outputs) in {"window of 3x3": run(3, 1), "a slice": run(1, 1, as_slice=True)}.items():
    print(f"{name}: {outputs.shape}, equal: {np.array_equal(outputs, wanted)}")
    assert np.array_equal(outputs, wanted)
PYTHON
