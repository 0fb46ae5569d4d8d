#!/usr/bin/env bash
# APyTypes 0.5.1: a saturating cast that adds fractional bits overflows at 64 bits, and gives 0 or a number of wrong
# sign.
#
# Expected: the largest number for what is too large, the smallest for what is too small: APyTypes simulates fixed-point
# hardware bit by bit.
# Happens: where the integer bits of the source and the fractional bits of the result are more than 64 together, the
# number is shifted left in 64 bits before it is compared with the limits. Types of 32 and 48 bits are enough, scalar or
# array. Nothing is said. With fewer fractional bits, and in results of more than 64 bits, it is right.
# Seen, of fx with 32 integer bits to 8 integer and 40 fractional bits: 2147483647 becomes -1, 2**30 0, -2**31 0; right
# would be 127.999, 127.999, -128. Of 40 + 24 bits to 8 + 31: 2**38 becomes 0. 8 + 24 and 8 + 32 bits: right.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python apytypes==0.5.1 numpy==2.4.6
environment/bin/python - 2>errors <<'END' || { cat errors; exit 1; }
from apytypes import APyFixedArray, OverflowMode, fx

cases = [  # number, its bits, the result's bits, what it becomes (None: what is right)
    (2147483647, (32, 0), (8, 40), -1),
    (2**30, (32, 0), (8, 40), 0),
    (-(2**31), (32, 0), (8, 40), 0),
    (2**38, (40, 24), (8, 31), 0),
    (2147483647, (32, 0), (8, 24), None),
    (-(2**31), (32, 0), (8, 32), None),
    (2147483647, (32, 0), (8, 60), None),
]
for number, (integer, fraction), (to_integer, to_fraction), wanted in cases:
    largest = 2 ** (to_integer - 1)
    right = min(max(number, -largest), largest - 2.0**-to_fraction)
    options = dict(int_bits=to_integer, frac_bits=to_fraction, overflow=OverflowMode.SAT)
    scalar = fx(number, int_bits=integer, frac_bits=fraction)
    array = APyFixedArray.from_float([number], int_bits=integer, frac_bits=fraction)
    assert float(scalar) == number
    found = float(scalar.cast(**options))
    bits = f"{integer} + {fraction} to {to_integer} + {to_fraction} bits"
    print(f"found {number}, {bits}: {found:.2f}, right {right:.2f}")
    assert float(array.cast(**options)[0]) == found == (right if wanted is None else wanted)
END
