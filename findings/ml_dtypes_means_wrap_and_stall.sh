#!/usr/bin/env bash
# ml_dtypes 0.6.0, numpy 2.4.6: means of int4 arrays wrap around at 4 bits, those of bfloat16 arrays add up to 256.
#
# ONNX's numpy_helper.to_array gives 4-bit and bfloat16 weights in these types.
# Expected: numpy adds int8 in 64 bits, and averages int8 in float64 and float16 in float32, so it does the same for the
# other types that are too narrow for sums.
# Happens: sum, mean, std, median and norms stay in the array's own type. Nothing is said, and nothing is raised.
# Seen, for a thousand sevens, as sum, mean, median: int8 7000 7.0 7.0; int4 -8 0 -1.
# The mean of a thousand ones: float16 1.0; bfloat16 0.256; float8_e4m3fn 0.016.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python ml-dtypes==0.6.0 numpy==2.4.6
environment/bin/python -W error - <<'END'
import ml_dtypes
import numpy as np

sevens = np.full(1000, 7, np.int8)
for dtype, wanted in ((np.int8, [7000, 7, 7]), (ml_dtypes.int4, [-8, 0, -1])):
    array = sevens.astype(dtype)
    found = [array.sum(), array.mean(), np.median(array)]
    print(array.dtype, *found)
    assert found == wanted
assert sevens.astype(ml_dtypes.int4).sum(dtype=np.int64) == 7000

for dtype, is_right in ((np.float16, True), (ml_dtypes.bfloat16, False), (ml_dtypes.float8_e4m3fn, False)):
    mean = float(np.ones(1000, dtype).mean())
    print(np.dtype(dtype), f"{mean:.3f}")
    assert (mean == 1) == is_right
    assert is_right or mean < 0.3
END
