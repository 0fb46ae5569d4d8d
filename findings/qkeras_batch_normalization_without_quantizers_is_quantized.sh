#!/usr/bin/env bash
# qkeras 0.9.0: QBatchNormalization() without arguments rounds to powers of two, and channels of negative gamma go to 0.
#
# Expected: QConv2D and QDense without quantizers compute in floats, so QBatchNormalization() does as well, and equals
# Keras' BatchNormalization of the same weights.
# Happens: gamma, beta, mean and variance have quantizers of powers of two unless each is given as None. Gamma's has a
# ReLU, so a negative gamma, as training brings about, becomes next to 0, and its channel is constant. Others are off by
# up to 41 %, as each is rounded by itself. Nothing is said.
# Seen, largest errors by largest output of channels with gamma 1, 0.7, 1.4, -0.5: 0.00, 0.13, 0.38, 1.00; with None
# four times, and of QConv2D and QDense without quantizers, 0.00.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python qkeras==0.9.0 tensorflow-cpu==2.21.0 tf-keras==2.21.0 \
    pyparsing==3.2.5 numpy==1.26.4
export TF_USE_LEGACY_KERAS=1 TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import qkeras
import tensorflow as tf

random = np.random.default_rng(0)
x = random.normal(size=(8, 10, 10, 4)).astype(np.float32)
GAMMA, BETA, MEAN, VARIANCE = [1, 0.7, 1.4, -0.5], [0, 0, 0, 0], [0, 0, 0, 0], [1, 1.5, 3, 1]
NONE = {f"{name}_quantizer": None for name in ("gamma", "beta", "mean", "variance")}


def errors(layer, plain, weights=None):
    layer.build(x.shape)
    plain.build(x.shape)
    weights = weights or [random.normal(size=each.shape) for each in plain.get_weights()]
    for each in (layer, plain):
        each.set_weights([np.array(values) for values in weights])
    exact, found = plain(x).numpy(), layer(x).numpy()
    return np.abs(found - exact).max((0, 1, 2)) / np.abs(exact).max((0, 1, 2)), found.std((0, 1, 2))


weights = [GAMMA, BETA, MEAN, VARIANCE]
default, deviations = errors(qkeras.QBatchNormalization(), tf.keras.layers.BatchNormalization(), weights)
none, _ = errors(qkeras.QBatchNormalization(**NONE), tf.keras.layers.BatchNormalization(), weights)
convolution, _ = errors(qkeras.QConv2D(4, 3), tf.keras.layers.Conv2D(4, 3))
dense, _ = errors(qkeras.QDense(4), tf.keras.layers.Dense(4))
for name, each in (("no argument", default), ("None", none), ("QConv2D", convolution), ("QDense", dense)):
    print(f"{name}: errors", *each.round(2))
print("standard deviation of the channel of gamma -0.5:", deviations[3])
for each in (none, convolution, dense):
    assert (each < 1e-5).all()
assert default[3] > 0.95 and deviations[3] < 0.01 and default[1:3].max() > 0.3
END
