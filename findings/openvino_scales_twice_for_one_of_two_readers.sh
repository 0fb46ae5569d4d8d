#!/usr/bin/env bash
# OpenVINO 2026.4.1 (CPU): a product behind an int8 convolution of batches of any size is seen by its other readers, too.
#
# Expected: the convolution's scaled sums go to both readers; one of them multiplies them by a number of its own.
# Happens: the plugin makes that product part of the convolution, and gives the multiplied sums to the other reader. So
# a comparison, a residual sum or a second output is computed from wrong numbers. Nothing is said. A batch of fixed
# size, a bias, a ReLU or a Clamp between, or float weights: all numbers are right.
# Seen: of 1,152 numbers of floor(10 a) + (a > 0.5) for a = scale * conv(x), 1,146 are wrong with a batch of -1, and none
# with 1, with a bias, or with a Clamp to the range of floats, which is a way around it.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python openvino==2026.4.1 numpy==2.4.6
environment/bin/python - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import openvino
from openvino import opset14 as nodes

rng = np.random.default_rng(0)
weight = rng.integers(-100, 100, (32, 16, 1, 1)).astype(np.int8)
scale = rng.uniform(0.001, 0.002, (1, 32, 1, 1)).astype(np.float32)
images = rng.integers(0, 256, (1, 16, 6, 6)).astype(np.float32)


def of(values):
    return nodes.constant(np.asarray(values, np.float32))


def wrong(batch=-1, bias=0.0, is_clamped=False, is_quantized=True):
    """How many numbers of a network are wrong."""
    x = nodes.parameter([batch, 16, 6, 6], np.float32)
    codes = nodes.fake_quantize(x, of(0), of(255), of(0), of(255), 256) if is_quantized else x
    filters = nodes.convert(nodes.constant(weight), "f32") if is_quantized else of(weight)
    filters = nodes.multiply(filters, of(np.ones((32, 1, 1, 1))))
    a = nodes.multiply(nodes.convolution(codes, filters, [1, 1], [0, 0], [0, 0], [1, 1]), of(scale))
    a = nodes.add(a, of(np.full((1, 32, 1, 1), bias))) if bias else a
    a = nodes.clamp(a, -3e38, 3e38) if is_clamped else a
    first = nodes.floor(nodes.multiply(a, of(10.0)))
    second = nodes.convert(nodes.greater(a, of(0.5)), "f32")
    model = openvino.Model([nodes.result(nodes.add(first, second))], [x], "model")
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    found = openvino.Core().compile_model(model, "CPU", settings)(images)[0]
    exact = np.einsum("oc,nchw->nohw", weight[:, :, 0, 0].astype(np.float64), images) * scale + bias
    near = np.abs(exact * 10 - np.round(exact * 10)) < 1e-3
    return int(((found != np.floor(exact * 10) + (exact > 0.5)) & ~near).sum())


counts = wrong(), wrong(batch=1), wrong(bias=1.3), wrong(is_clamped=True), wrong(is_quantized=False)
print("found wrong numbers of 1,152: batch -1, 1, with a bias, with a clamp, of floats:", *counts)
assert counts[0] > 1000 and counts[1:] == (0, 0, 0, 0)
END
