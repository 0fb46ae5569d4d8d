#!/usr/bin/env bash
# jax 0.10.2: the mean of int2 codes is an int2 code, and so is a true division: 1 / 2 is 0, the mean of ones is -1.
#
# Expected: a float32, as jnp.mean, jnp.average and / of int4, uint4 and int8 give it, or an error, as jnp.var,
# jnp.median and jnp.sum of int2 raise it.
# Happens: mean, nanmean, average and true division of int2 and uint2 stay in two bits. Ternary weights are int2: their
# mean, and what is scaled by a division, is a code from -2 to 1. Nothing is said, in eager mode or under jit.
# Seen, for 1 1 0 1 0 0 1 1: mean 0.625 of int4, uint4, int8; of int2 -1, of uint2 3. Their halves: 0.5 0.5 0 0.5 of
# int4; 0 0 0 0 of int2 and uint2.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python jax==0.10.2 ml-dtypes==0.6.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import jax
import jax.numpy as jnp
import numpy as np

bits = np.array([1, 1, 0, 1, 0, 0, 1, 1])
for name, wrong in (("int2", -1), ("uint2", 3), ("int4", None), ("uint4", None), ("int8", None)):
    codes = jnp.asarray(bits).astype(name)
    means = [function(codes) for function in (jnp.mean, jnp.nanmean, jnp.average, jax.jit(jnp.mean))]
    halves = codes / 2
    found = sorted({float(mean.astype(jnp.float32)) for mean in means})
    print(f"found {name}: mean {means[0].dtype}", *found, f"halves {halves.dtype}", *halves[:4].astype(jnp.float32))
    if wrong is None:
        assert all(mean.dtype == halves.dtype == jnp.float32 for mean in means) and found == [0.625]
        assert np.array_equal(halves, bits / 2)
    else:
        assert all(mean.dtype == halves.dtype == name for mean in means) and found == [wrong]
        assert not np.asarray(halves.astype(jnp.int32)).any()
for function in (jnp.var, jnp.median, jnp.sum):
    try:
        function(jnp.asarray(bits).astype("int2"))
    except Exception as error:
        print(f"of {function.__name__}: {type(error).__name__}")
    else:
        raise AssertionError(f"{function.__name__} of int2 was accepted")
END
