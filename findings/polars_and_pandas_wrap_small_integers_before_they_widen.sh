#!/usr/bin/env bash
# polars 2.1.0, pandas 3.1.1: means, products and differences of uint8 columns wrap at 256, though the result is wide.
#
# Expected: a result of type float64 or int64 is computed in that type, as sums, means, cumulative and rolling sums of
# uint8 are.
# Happens: polars' mean_horizontal adds the columns, and dot multiplies them, in uint8 first; pandas' diff subtracts in
# uint8, and then has floats, for the sake of the missing first one. Nothing is said. polars' diff is right.
# Seen: mean_horizontal of 200 and 100 is 22, not 150. dot of 200, 100 and 100, 200 is 64, not 40,000. pandas' diff from
# 200 to 100 is 156.0; its dot is uint8, and 64, too.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python polars==2.1.0 pandas==3.1.1 numpy==2.4.6
environment/bin/python - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import pandas
import polars

a, b = np.array([200, 100], np.uint8), np.array([100, 200], np.uint8)
frame = polars.DataFrame({"a": a, "b": b})
found = frame.select(
    mean=polars.mean_horizontal("a", "b"),
    dot=polars.col("a").dot("b"),
    difference=polars.col("a").diff(),
    sum=polars.col("a").sum(),
    running=polars.col("a").cum_sum(),
)
print(found)
assert found["mean"].dtype == polars.Float64 and found["mean"].to_list() == [22, 22]
assert found["dot"].dtype == polars.Int64 and found["dot"][0] == 64
assert found["difference"].to_list() == [None, -100]
assert found["sum"][0] == 300 and found["running"].to_list() == [200, 300]

series = pandas.Series(a)
difference = series.diff()
print("pandas: diff", *difference, "dot", series.dot(pandas.Series(b)))
assert difference.dtype == np.float64 and difference[1] == 156
assert series.dot(pandas.Series(b)) == 64
assert series.cumsum().tolist() == [200, 300] and series.rolling(2).sum()[1] == 300
assert pandas.DataFrame({"a": a, "b": b}).mean(axis=1).tolist() == [150, 150]
END
