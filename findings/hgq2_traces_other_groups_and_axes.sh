#!/usr/bin/env bash
# hgq2 0.2.0: traced for da4ml 0.6.0, convolutions in groups and pools of channels first give other numbers.
#
# Expected: the numbers of the Keras network, as the package promises, or an error.
# Happens: in n groups, kernel i meets the channels i, i + n, i + 2 n, not neighbours. One group, and one channel a
# group, are right. A pool with data_format="channels_first" pools over channels and columns; of images that are
# squares, the number of outputs is right. Nothing is said. Convolutions with channels first are right.
# Seen, as largest error by largest output: QConv2D with 8 filters of 4 channels in 1, 2, 4 groups: 0, 0.4, 0; QConv1D:
# 0, 0.5, 0. QMaxPooling2D(2) with channels last 0, first 1.0; QAveragePooling2D(2) 0 and 0.6. The numbers of 2 groups
# are those that Keras gives for the channels 0, 2, 1, 3.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python hgq2==0.2.0 da4ml==0.6.0 keras==3.15.1 jax==0.10.2 numpy==2.4.6
KERAS_BACKEND=jax JAX_PLATFORMS=cpu environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import keras
import numpy as np
from da4ml.converter import trace_model
from da4ml.trace import comb_trace
from hgq.layers import QAveragePooling2D, QConv1D, QConv2D, QMaxPooling2D
from hgq.utils import trace_minmax

random = np.random.default_rng(0)
keras.utils.set_random_seed(0)
images = (np.rint(random.normal(size=(100, 6, 6, 4)) * 8) / 8).clip(-4, 3.875).astype(np.float32)
images[0], images[1] = -4, 3.875  # the same range, and so the same quantizer, in every place
turned = np.ascontiguousarray(images.transpose(0, 3, 1, 2))
mixed, pairs = images[..., [0, 2, 1, 3]], turned.reshape(100, 2, 2, 6, 3, 2)
first = {"data_format": "channels_first"}
cases = [(f"QConv2D, {n} groups", QConv2D(8, 3, groups=n), images, mixed if n == 2 else None) for n in (1, 2, 4)]
lines = images[:, 0]
cases += [(f"QConv1D, {n} groups", QConv1D(8, 3, groups=n), lines, mixed[:, 0] if n == 2 else None) for n in (1, 2, 4)]
cases += [
    ("QConv2D, channels first", QConv2D(8, 3, **first), turned, None),
    ("QMaxPooling2D, channels last", QMaxPooling2D(2), images, None),
    ("QMaxPooling2D, channels first", QMaxPooling2D(2, **first), turned, pairs.max((2, 5))),
    ("QAveragePooling2D, channels last", QAveragePooling2D(2), images, None),
    ("QAveragePooling2D, channels first", QAveragePooling2D(2, **first), turned, pairs.mean((2, 5))),
]
for name, layer, inputs, instead in cases:
    network = keras.Sequential([keras.layers.Input(inputs.shape[1:]), layer])
    trace_minmax(network, inputs, verbose=0)
    wanted = np.asarray(network.predict(inputs, verbose=0)).reshape(100, -1)
    found = comb_trace(*trace_model(network)).predict(inputs.reshape(100, -1))
    error = abs(found - wanted).max() / abs(wanted).max()
    print(f"{name}: largest error by largest output {error:.1f}")
    if instead is None:
        assert (found == wanted).all()
    else:
        other = np.asarray(network.predict(instead, verbose=0)) if "groups" in name else instead
        assert error > 0.3 and (found == other.reshape(100, -1)).all()
END
