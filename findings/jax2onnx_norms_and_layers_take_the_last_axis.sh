#!/usr/bin/env bash
# jax2onnx 0.17.1: norms and LinearGeneral of Flax nnx with an axis of their own work on the last one in ONNX.
#
# Expected: BatchNorm(axis=1), for pictures with channels first, RMSNorm(reduction_axes=...) and LinearGeneral(axis=...)
# keep their axes, or an error. RMSNorm and DenseGeneral of linen do.
# Happens: BatchNorm's axis and RMSNorm's reduction_axes are ignored, and feature_axes of LayerNorm, too; LinearGeneral
# sums over the last axes, as many as it was given. If the sizes fit by chance, as in square pictures or with as many
# channels as columns, the file is valid, and all its numbers are wrong; RMSNorm needs no such chance. Nothing is said.
# With other sizes, ONNX Runtime refuses the file of BatchNorm and LayerNorm.
# Seen, for 2 x 8 x 8 x 8, as largest error by largest output: BatchNorm(axis=-1) 0, axis=1 0.97; RMSNorm of the last
# axis 0, of rows and columns 0.29, for 2 x 6 x 7 x 8 0.30; of linen 0, 0; LayerNorm(feature_axes=1) 0.65; LinearGeneral
# over the last two axes 0, over axes 1 and 2 1.5; DenseGeneral of linen 0, 0.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python \
    jax2onnx==0.17.1 jax==0.10.2 flax==0.12.8 equinox==0.13.8 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python -W ignore - >output 2>errors <<'END' || { cat output errors; exit 1; }
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
from flax import linen, nnx
from jax2onnx import to_onnx

print("jax2onnx", version("jax2onnx"), "flax", version("flax"))
random = np.random.default_rng(0)
rngs = nnx.Rngs(0)


def error(layer, shape=(2, 8, 8, 8)):
    x = random.normal(size=shape).astype(np.float32)
    if isinstance(layer, linen.Module):
        shapes = layer.init(jax.random.key(0), jnp.asarray(x))
        numbers = jax.tree.map(lambda array: jnp.asarray(random.uniform(0.3, 2, array.shape), jnp.float32), shapes)
        function = lambda x: layer.apply(numbers, x)
    else:
        function = layer
        for name in ("scale", "bias", "mean", "var"):
            held = getattr(layer, name, None)
            if held is not None and not isinstance(layer, nnx.LinearGeneral):
                held[...] = jnp.asarray(random.uniform(0.3, 2, held.shape), jnp.float32)
    exact = np.asarray(function(jnp.asarray(x)))
    model = to_onnx(function, [jax.ShapeDtypeStruct(shape, np.float32)])
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, {session.get_inputs()[0].name: x})[0]
    assert found.shape == exact.shape
    return np.abs(found - exact).max() / np.abs(exact).max()


last, other = {"axis": -1, "use_running_average": True}, {"axis": 1, "use_running_average": True}
cases = {
    "nnx BatchNorm(axis=-1)": (nnx.BatchNorm(8, rngs=rngs, **last), True),
    "nnx BatchNorm(axis=1)": (nnx.BatchNorm(8, rngs=rngs, **other), False),
    "nnx RMSNorm(reduction_axes=-1)": (nnx.RMSNorm(8, rngs=rngs), True),
    "nnx RMSNorm(reduction_axes=(1, 2))": (nnx.RMSNorm(8, reduction_axes=(1, 2), rngs=rngs), False),
    "linen RMSNorm(reduction_axes=-1)": (linen.RMSNorm(), True),
    "linen RMSNorm(reduction_axes=(1, 2))": (linen.RMSNorm(reduction_axes=(1, 2)), True),
    "nnx LayerNorm(feature_axes=-1)": (nnx.LayerNorm(8, rngs=rngs), True),
    "nnx LayerNorm(feature_axes=1)": (nnx.LayerNorm(8, feature_axes=1, rngs=rngs), False),
    "nnx LinearGeneral(axis=(-2, -1))": (nnx.LinearGeneral((8, 8), 5, axis=(-2, -1), rngs=rngs), True),
    "nnx LinearGeneral(axis=(1, 2))": (nnx.LinearGeneral((8, 8), 5, axis=(1, 2), rngs=rngs), False),
    "linen DenseGeneral(axis=(-2, -1))": (linen.DenseGeneral(5, axis=(-2, -1)), True),
    "linen DenseGeneral(axis=(1, 2))": (linen.DenseGeneral(5, axis=(1, 2)), True),
}
for name, (layer, right) in cases.items():
    found = error(layer)
    print(f"{name}: largest error by largest output {found:.2g}")
    assert found < 1e-5 if right else found > 0.2
found = error(nnx.RMSNorm(8, reduction_axes=(1, 2), rngs=rngs), (2, 6, 7, 8))
print(f"nnx RMSNorm(reduction_axes=(1, 2)), no two sizes alike: {found:.2g}")
assert found > 0.2
try:
    error(nnx.BatchNorm(6, rngs=rngs, **other), (2, 6, 7, 8))
    raise SystemExit("ONNX Runtime took BatchNorm of axis 1 with other sizes")
except onnxruntime.capi.onnxruntime_pybind11_state.Fail as refusal:
    print("nnx BatchNorm(axis=1), no two sizes alike:", str(refusal)[:60])
END
cat output
