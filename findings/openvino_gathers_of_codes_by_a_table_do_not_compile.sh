#!/usr/bin/env bash
# OpenVINO 2026.4.1: a Gather of quantized channels with indices of more than one dimension can't be compiled.
#
# The guess: Gather takes indices of any shape, and puts this shape in the place of the axis, before codes as before
# floats. What happens: with floats it does. Behind a FakeQuantize and a product by channels, if convolutions of 8 bits
# are there, compile_model raises an error: its pass for low precision subtracts and multiplies by tensors of three
# dimensions, where six are there.
# With flat indices and a Reshape the same model runs.
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

rng = np.random.default_rng(0)
pixels = rng.random((2, 8, 4, 4)).astype(np.float32)
table = np.array([[0, 1, 4], [5, 10, 15]])
scale = (rng.random((1, 8, 1, 1)) + 0.5).astype(np.float32)


def number(value: float):
    return nodes.constant(np.float32(value))


def in_bytes(weight: np.ndarray, steps: np.ndarray):
    return nodes.multiply(nodes.convert(nodes.constant(weight.astype(np.int8)), "f32"), nodes.constant(steps))


def run(is_coded: bool, is_flat: bool) -> str:
    image = nodes.parameter([2, 8, 4, 4], openvino.Type.f32, "image")
    x, ends = image, [nodes.constant(np.zeros_like(scale)), nodes.constant(np.float32(2.55) * scale)]
    if is_coded:
        x = nodes.fake_quantize(x, *(number(end) for end in (0, 2.55, 0, 2.55)), 256)
    weight = in_bytes(np.eye(8).reshape(8, 8, 1, 1), scale.reshape(8, 1, 1, 1))
    x = nodes.convolution(x, weight, [1, 1], [0, 0], [0, 0], [1, 1])
    if is_coded:
        x = nodes.fake_quantize(x, *ends, *ends, 256)
    axis, wanted = nodes.constant(np.int64(2)), nodes.constant(np.array([2, 8, 2, 3]))
    rows = nodes.reshape(x, nodes.constant(np.array([2, 8, 16])), False)
    found = nodes.gather(rows, nodes.constant(table.ravel() if is_flat else table), axis)
    if is_flat:
        found = nodes.reshape(found, wanted, False)
    last = in_bytes(np.ones((1, 8, 1, 1)), np.full((1, 1, 1, 1), 0.5, np.float32))
    sums = nodes.convolution(found, last, [1, 1], [0, 0], [0, 0], [1, 1])
    model = openvino.Model([nodes.result(sums.output(0))], [image], "model")
    try:
        openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(pixels)
    except RuntimeError as error:
        return "raises: " + str(error).strip().splitlines()[-1][:120]
    return "runs"


print("openvino", openvino.__version__)
for is_coded in False, True:
    for is_flat in True, False:
        said = run(is_coded, is_flat)
        print("codes," if is_coded else "floats,", "flat indices:" if is_flat else "a table:", said)
        assert said == ("raises: Argument shapes are inconsistent." if is_coded and not is_flat else "runs")
PYTHON
