#!/usr/bin/env bash
# da4ml 0.6.0: predict gives other numbers than the traced circuit where a quantization keeps more than 32 bits.
#
# Expected: predict (the interpreter in C++) returns the numbers of the circuit called from Python, which are right, or
# an error for words too wide. Its words have 64 bits: sums of more than 32 bits are right.
# Happens: a quantization to 33 bits or more changes the numbers of half of the range. An average takes few bits to get
# there: 1/5 and 1/9 are written with 31 bits, and some steps of the multiplication are quantizations.
# Seen: of numbers of 40 bits, wrong after quantization to 24 and 32 bits: 0 %; to 33 and 36: 51 and 56 %. Largest error
# of the average of n inputs of 3 bits from -1 to 0.75, by predict and by a call: 5: 2.0 and 0; 9: 2.0 and 0; 4, 3 and
# 7: 0 and 0. HGQ2 0.2.0, a network with QAveragePooling2D(3), outputs up to 1.1: predict 8.0, its call 0.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python da4ml==0.6.0 hgq2==0.2.0 keras==3.15.1 jax==0.10.2 numpy==2.4.6
KERAS_BACKEND=jax JAX_PLATFORMS=cpu environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import keras
import numpy as np
from da4ml.converter import trace_model
from da4ml.trace import FixedVariableArray, comb_trace
from hgq.config import QuantizerConfigScope
from hgq.layers import QAveragePooling2D
from hgq.utils import trace_minmax

random = np.random.default_rng(0)


def inputs_of(count, fraction):
    """Signed inputs from -1 to 1 with `fraction` bits after the point, and 500 examples of them."""
    values = random.integers(-(2**fraction), 2**fraction, (500, count)) * 2.0**-fraction
    return FixedVariableArray.from_kif(np.ones(count, int), np.zeros(count, int), np.full(count, fraction)), values


def both(circuit, values):
    return circuit.predict(values), np.array([circuit(value) for value in values], float)


for bits, right in ((24, True), (32, True), (33, False), (36, False)):
    inputs, values = inputs_of(1, 39)
    outputs = inputs.quantize(np.ones(1, int), np.zeros(1, int), np.full(1, bits - 1))
    wanted = np.floor(values * 2.0 ** (bits - 1)) * 2.0 ** (1 - bits)
    predicted, called = both(comb_trace(inputs, outputs), values)
    print(f"quantized to {bits} bits: predict is wrong for {100 * (predicted != wanted).mean():.0f} %")
    assert (called == wanted).all()
    assert right == (predicted == wanted).all() and (right or 0.4 < (predicted != wanted).mean() < 0.6)

for count, right in ((4, True), (3, True), (7, True), (5, False), (9, False)):
    inputs, values = inputs_of(count, 2)
    mean = np.sum(inputs) / count
    circuit = comb_trace(inputs, FixedVariableArray(np.array([mean]), inputs.solver_options))
    predicted, called = (abs(found[:, 0] - values.mean(1)).max() for found in both(circuit, values))
    print(f"average of {count} inputs: largest error of predict {predicted:.1f}, of the circuit's call {called:.1f}")
    assert called < 1e-8
    assert (predicted < 1e-8) == right and (right or predicted > 1)

with QuantizerConfigScope(default_q_type="kif", overflow_mode="WRAP", f0=3, i0=3):
    network = keras.Sequential([keras.layers.Input((6, 6, 2)), QAveragePooling2D(3)])
images = random.normal(size=(100, 6, 6, 2)).astype(np.float32)
trace_minmax(network, images, verbose=0)
wanted = np.asarray(network.predict(images, verbose=0)).reshape(100, -1)
predicted, called = both(comb_trace(*trace_model(network)), images.reshape(100, -1))
errors = [abs(found - wanted).max() for found in (predicted, called)]
print(f"QAveragePooling2D(3), outputs up to {abs(wanted).max():.1f}: predict {errors[0]:.1f}, call {errors[1]:.1f}")
assert errors[0] > 1 and errors[1] < 1e-6
END
