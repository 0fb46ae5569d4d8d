#!/usr/bin/env bash
# torch 2.15.0 (CPU): the square root of every seventh float32 is not the nearest float.
#
# Expected: IEEE 754's square root, rounded once, as NumPy, C and torch's own float64 root rounded to float32 have it.
# Happens: torch.sqrt of float32 is one unit in the last place off for 14 to 16 % of numbers, whatever the tensor's
# size; so is Tensor.pow(0.5). Quotients are rounded as they should.
# So a norm's output can't be had bit for bit in another runtime, and a code behind it may be its neighbour.
# Seen: 15 to 16 % of 100,000 numbers below 10 differ from NumPy's root, by one unit; of quotients 0 %.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 numpy==2.4.6
environment/bin/python - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import torch

rng = np.random.default_rng(0)
for count in (7, 100_000):
    x = (rng.random(count if count > 7 else 70_000) * 10).astype(np.float32)
    exact = np.sqrt(x)
    assert np.array_equal(exact, np.sqrt(x.astype(np.float64)).astype(np.float32))
    pieces = torch.from_numpy(x).split(count)
    found = torch.cat([piece.sqrt() for piece in pieces]).numpy()
    powers = torch.cat([piece.pow(0.5) for piece in pieces]).numpy()
    units = np.abs(found.view(np.int32) - exact.view(np.int32))
    y = rng.random(len(x)).astype(np.float32) + 1
    quotients = (torch.from_numpy(x) / torch.from_numpy(y)).numpy()
    off = [100 * (one != other).mean() for one, other in ((found, exact), (powers, exact), (quotients, x / y))]
    print(f"found for tensors of {count}: roots {off[0]:.1f} %, powers {off[1]:.1f} %, quotients {off[2]:.1f} %")
    assert units.max() == 1 and off[0] > 5 and off[1] > 5 and off[2] == 0
END
