#!/usr/bin/env bash
# torch 2.15.0: a cast to float8_e4m3fn turns infinity and all overflow into 448, unlike the other float8 types.
#
# Expected: NaN, as this format has no infinity: as ml_dtypes and torch 2.12.1 give it, as float8_e4m3fnuz and
# float8_e5m2fnuz still do, and as an infinity stays one in float8_e5m2. A diverged network shows by its NaN.
# Happens: everything beyond 448, infinity too, becomes the largest finite number, in eager mode and compiled. NaN stays
# NaN. A quantizer of E4M3 hides infinities that one of E5M2 shows, and a check for NaN behind it finds none.
# Seen, for 464, 480, 10000, infinity from float32, float16 and bfloat16: float8_e4m3fn 448 448 448 448, ml_dtypes 448
# NaN NaN NaN; e4m3fnuz NaN NaN NaN NaN; e5m2 448 512 10240 infinity; e5m2fnuz 448 512 10240 NaN, ml_dtypes the same.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 ml-dtypes==0.6.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import ml_dtypes
import numpy as np
import torch

nan, infinity = float("nan"), float("inf")
values = torch.tensor([464.0, 480.0, 10000.0, infinity])
wanted = {
    "float8_e4m3fn": ([448, 448, 448, 448], [448, nan, nan, nan]),
    "float8_e4m3fnuz": ([nan] * 4, [nan] * 4),
    "float8_e5m2": ([448, 512, 10240, infinity], [448, 512, 10240, infinity]),
    "float8_e5m2fnuz": ([448, 512, 10240, nan], [448, 512, 10240, nan]),
}
for name, (torchs, others) in wanted.items():
    dtype = getattr(torch, name)
    for source in (torch.float32, torch.float16, torch.bfloat16):
        given = values.to(source)
        found = given.to(dtype).float().numpy()
        compiled = torch.compile(lambda x, dtype=dtype: x.to(dtype).float(), backend="aot_eager")(given).numpy()
        other = given.float().numpy().astype(getattr(ml_dtypes, name)).astype(np.float32)
        print(name, "from", source, *found, "ml_dtypes", *other)
        assert np.array_equal(found, torchs, equal_nan=True) and np.array_equal(compiled, found, equal_nan=True)
        if source == torch.float32:
            assert np.array_equal(other, others, equal_nan=True)
        assert torch.tensor([nan], dtype=source).to(dtype).float().isnan().all()
END
