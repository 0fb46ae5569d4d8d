#!/usr/bin/env bash
# h5py 3.16.0: stored with HDF5's scale-offset filter in as many bits as they need, the largest signed codes become 0.
#
# Expected: codes -8 to 7 fit 4 bits, so scaleoffset=4 loses none, as it loses none of 0 to 15; of floats, it keeps the
# decimals that are asked for, with errors up to half of the last one, and NaN.
# Happens: the filter keeps its largest pattern for the fill value, 0 in h5py, and other numbers get it, too: they are
# read as 0. Floats within one unit of the last decimal from 0 become 0, so errors there are twice as large, and NaN
# becomes a number. Nothing is said. scaleoffset=0, which counts the bits, or fillvalue=-8 keeps all codes.
# Seen: each 7 of int4, 127 of int8 and 1 of int2 becomes 0. With scaleoffset=1, numbers near 0 are wrong by 0.1, others
# by 0.05, and each of 40 NaN becomes about the smallest number.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python h5py==3.16.0 numpy==2.4.6
environment/bin/python - 2>errors <<'END' || { cat errors; exit 1; }
import h5py
import numpy as np


def stored(values, **options):
    with h5py.File("file.h5", "w") as file:
        file.create_dataset("x", data=values, **options)
    with h5py.File("file.h5") as file:
        return file["x"][()]


rng = np.random.default_rng(0)
for bits in (2, 4, 8):
    largest = 2 ** (bits - 1) - 1
    for dtype in (np.int8, np.int16, np.int32):
        codes = rng.integers(-largest - 1, largest, (64, 64), dtype, endpoint=True)
        if bits == 8 and dtype == np.int8:
            continue
        found = stored(codes, scaleoffset=bits)
        wrong = found != codes
        print(f"{dtype.__name__}, {bits} bits: {wrong.sum()} of {(codes == largest).sum()} codes {largest} became 0")
        assert wrong.any() and (wrong == (codes == largest)).all() and (found[wrong] == 0).all()
        assert (stored(codes, scaleoffset=0) == codes).all()
        assert (stored(codes, scaleoffset=bits, fillvalue=-largest - 1) == codes).all()
        unsigned = (codes + largest + 1).astype(np.uint16)
        assert (stored(unsigned, scaleoffset=bits) == unsigned).all()

numbers = rng.normal(size=(64, 64))
numbers[0, 0] = numbers.min() - 0.05
errors = np.abs(stored(numbers, scaleoffset=1) - numbers)
near = np.abs(numbers) < 0.1
print(f"one decimal: errors up to {errors[~near].max():.3f}, near 0 up to {errors[near].max():.3f}")
assert errors[~near].max() < 0.0501 and errors[near].max() > 0.099
assert (stored(numbers, scaleoffset=1)[near] == 0).all()
numbers[1, :40] = np.nan
found = stored(numbers, scaleoffset=1)
print("40 NaN became", *np.unique(found[1, :40]).round(2))
assert not np.isnan(found).any()
END
