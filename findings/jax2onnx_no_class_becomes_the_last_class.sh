#!/usr/bin/env bash
# jax2onnx 0.17.1: jax.nn.one_hot of a label -1, "no class", is the last class in ONNX.
#
# Expected: what JAX documents: labels outside of the classes have only zeros, so that pixels to be ignored, as -1 marks
# them, count for nothing in a loss or a sum of classes.
# Happens: the label goes to OneHot of ONNX as it is, which counts negative labels from the end. -1 is the last class,
# -2 the one before. Labels beyond the last class are right, so 255 for "ignore" is. Nothing is said.
# Seen, as ones for 4 classes in JAX and ONNX: label 0: class 0, 0; 3: class 3, 3; 4 and 255: none, none; -1: none,
# class 3; -4: none, class 0; -5: none, none. Pixels of each class of a map in which half have no class: 7, 6, 11, 8 and
# 7, 6, 11, 40.
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
from jax2onnx import to_onnx

print("jax2onnx", version("jax2onnx"), "jax", version("jax"))


def both(function, labels):
    labels = np.asarray(labels, np.int32)
    model = to_onnx(function, [jax.ShapeDtypeStruct(labels.shape, np.int32)])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: labels})[0]
    exact = np.asarray(function(labels))
    assert exact.shape == found.shape
    return exact, found


labels = [0, 3, 4, 255, -1, -4, -5]
exact, found = both(lambda labels: jax.nn.one_hot(labels, 4), labels)
for label, right, wrong in zip(labels, exact, found):
    print(f"label {label}: ones in JAX {np.flatnonzero(right).tolist()}, in ONNX {np.flatnonzero(wrong).tolist()}")
    assert right.sum() == (0 <= label < 4)
    assert np.flatnonzero(wrong).tolist() == ([label % 4] if -4 <= label < 4 else [])
random = np.random.default_rng(0)
classes = random.integers(0, 4, (8, 8))
classes[:, 4:] = -1
exact, found = both(lambda labels: jax.nn.one_hot(labels, 4).sum((0, 1)), classes)
print("pixels of each class in JAX:", exact.tolist(), "in ONNX:", found.tolist())
assert exact.sum() == 32 and found.sum() == 64 and found[3] == exact[3] + 32
END
cat output
