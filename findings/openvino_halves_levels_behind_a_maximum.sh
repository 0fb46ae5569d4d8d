#!/usr/bin/env bash
# OpenVINO 2026.4.1: a quantizer behind a maximum over the image has half of its levels before a convolution in 8 bits.
#
# The guess: ReduceMax, a product with a scale, and a FakeQuantize with levels 0 to 15 give whole numbers from 0 to 15,
# and a convolution of 8 bits gets them, as it gets those behind a mean.
# What happens: the convolution gets even numbers only: 4, 6, 8, 8, 6, 4 where 4, 6, 7, 7, 5, 5 are right.
# Without the product, without 8-bit weights, or with ReduceMean in place of ReduceMax the codes are right. ReduceMin
# has the same fate: the sums are wrong. Nothing is said.
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
pixels = abs(rng.standard_normal((4, 8, 12, 12))).astype(np.float32)
weight = rng.integers(-15, 16, (10, 8, 1, 1))


def number(value: float):
    return nodes.constant(np.float32(value))


def run(reduce: str, scale: float | None, in_bytes: bool = True) -> tuple[float, list, np.ndarray]:
    """How far the sums are off, and the codes that they come from."""
    image = nodes.parameter([4, 8, 12, 12], openvino.Type.f32, "image")
    reduced = getattr(nodes, reduce)(image, nodes.constant(np.array([2, 3])), True)
    values = {"reduce_max": pixels.max, "reduce_min": pixels.min, "reduce_mean": pixels.mean}[reduce]((2, 3))
    if scale is not None:
        reduced, values = nodes.multiply(reduced, number(scale)), values * np.float32(scale)
    codes = nodes.fake_quantize(reduced, number(0), number(15), number(0), number(15), 16)
    filters = nodes.constant(weight.astype(np.float32))
    if in_bytes:
        whole = nodes.convert(nodes.constant(weight.astype(np.int8)), "f32")
        filters = nodes.multiply(whole, nodes.constant(np.ones((10, 1, 1, 1), np.float32)))
    sums = nodes.convolution(codes, filters, [1, 1], [0, 0], [0, 0], [1, 1])
    model = openvino.Model([nodes.result(sums.output(0))], [image], "model")
    found = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(pixels)[0][..., 0, 0]
    matrix, right = weight[..., 0, 0].astype(float), np.clip(np.round(values), 0, 15)
    read = np.linalg.lstsq(matrix, found.T, rcond=None)[0].T
    return float(abs(found - right @ matrix.T).max()), read.round(3).tolist(), right


print("openvino", openvino.__version__)
off, found, right = run("reduce_max", 1.875)
print(f"maximum, product, codes, 8-bit weights: off by {off:.0f}; codes {found[0]}, right are {right[0].tolist()}")
assert off > 5 and not (np.array(found) % 2).any() and abs(found - right).max() == 1 and (right % 2).any()
pixels += 1
off, *_ = run("reduce_min", 7.3)
print(f"minimum, product, codes, 8-bit weights: off by {off:.0f}")
assert off > 5
for name, options in {
    "without a product": ("reduce_max", None),
    "float weights": ("reduce_max", 1.875, False),
    "a mean": ("reduce_mean", 9.0),
}.items():
    off, *_ = run(*options)
    print(f"{name}: off by {off:.0e}")
    assert off < 1e-3
PYTHON
