#!/usr/bin/env bash
# jax2onnx 0.17.1: pools of Flax with padding as numbers pad nothing; max_pool of nnx without strides takes the window.
#
# Expected: max_pool(x, (3, 3), (2, 2), ((1, 1), (1, 1))), the first pool of a ResNet, keeps its padding in ONNX, or an
# error, as min_pool has: "linen.pool only supports padding='SAME' or 'VALID'".
# Happens: numbers as padding are made a text, which isn't "SAME", and is so taken for "VALID". The picture gets smaller
# and moves by a pixel. The default of strides is 1 in both APIs of Flax; for max_pool of nnx, that of the ONNX file is
# the window. Nothing is said. What sums over pixels behind, as a global pool, works on with other numbers.
# Seen, for 1 x 16 x 16 x 4, as outputs of Flax and ONNX: nnx and linen, maxima and averages, window 3, stride 2 and
# padding 1: 8 x 8, 7 x 7; same padding and no padding: equal; nnx.max_pool, window 2, no strides: 15 x 15, 8 x 8;
# avg_pool, and linen: 15 x 15, twice. Global average behind the padded pool of maxima: off by up to 0.14 of 1.54.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python \
    jax2onnx==0.17.1 jax==0.10.2 flax==0.12.8 equinox==0.13.8 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python -W ignore - >output 2>errors <<'END' || { cat output errors; exit 1; }
from importlib.metadata import version

import jax
import numpy as np
import onnxruntime
from flax import linen, nnx
from jax2onnx import to_onnx

print("jax2onnx", version("jax2onnx"), "flax", version("flax"))
x = np.random.default_rng(0).normal(size=(1, 16, 16, 4)).astype(np.float32)


def both(function):
    model = to_onnx(function, [jax.ShapeDtypeStruct(x.shape, np.float32)])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return np.asarray(function(x)), session.run(None, {session.get_inputs()[0].name: x})[0]


def equal(flax, onnx):
    return flax.shape == onnx.shape and np.abs(flax - onnx).max() < 1e-5


for api in (nnx, linen):
    for kind in ("max_pool", "avg_pool"):
        name = f"{api.__name__}.{kind}"
        for padding, right in (("SAME", True), ("VALID", True), (((1, 1), (1, 1)), False), (((0, 1), (0, 1)), False)):
            options = {"window_shape": (3, 3), "strides": (2, 2), "padding": padding}
            flax, onnx = both(lambda x: getattr(api, kind)(x, **options))
            print(f"{name}, padding {padding}: {flax.shape} in Flax, {onnx.shape} in ONNX, equal: {equal(flax, onnx)}")
            assert equal(flax, onnx) == right
            if padding == ((1, 1), (1, 1)):
                assert flax.shape[1:3] == (8, 8) and onnx.shape[1:3] == (7, 7)
        flax, onnx = both(lambda x: getattr(api, kind)(x, window_shape=(2, 2)))
        print(f"{name} without strides: {flax.shape} in Flax, {onnx.shape} in ONNX")
        assert flax.shape[1:3] == (15, 15) and onnx.shape[1:3] == ((8, 8) if name == "flax.nnx.max_pool" else (15, 15))
flax, onnx = both(
    lambda x: nnx.max_pool(x, window_shape=(3, 3), strides=(2, 2), padding=((1, 1), (1, 1))).mean((1, 2))
)
print("global average of maxima in Flax:", flax, "in ONNX:", onnx)
assert flax.shape == onnx.shape and np.abs(flax - onnx).max() > 0.1
END
cat output
