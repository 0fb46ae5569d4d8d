#!/usr/bin/env bash
# bitsandbytes 0.50.2, CPU: quantize_blockwise turns 0 into 2.1e-5 times the largest magnitude of the block.
#
# Expected: its default table of 256 numbers has a 0, so pruned and ternary weights keep their zeros, and each number
# becomes the nearest of the table.
# Happens: around 0 it takes the wrong entry, four places up or down: 0 becomes +2.1e-5 and -1e-7 becomes -2.1e-5. So a
# sparse tensor has no zeros any more, all of the same sign. Only a block of zeros alone keeps them. -1 becomes -0.993,
# the lowest of the table, and a NaN becomes -0.993, too. Nothing is said. quantize_4bit (nf4) keeps -1, 0 and 1.
# Seen, of -1 0 1 in one block: -0.993 2.125e-05 1; nearest in the table: -0.993 0 1; nf4: -1 0 1. NaN beside 1: -0.993.
# Of 1001 numbers from -1e-5 to 1e-5 beside 1: all become 2.125e-05 or -2.125e-05, the table has 7 nearer ones.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python bitsandbytes==0.50.2 torch==2.15.0 numpy==2.4.6
CUDA_VISIBLE_DEVICES= environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from bitsandbytes import functional

torch.set_num_threads(1)
table = functional.create_dynamic_map()
assert (table == 0).sum() == 1


def after(x):
    return functional.dequantize_blockwise(*functional.quantize_blockwise(x))


def nearest(x):
    return table[(x[:, None] - table).abs().argmin(1)]


ternary = torch.tensor([-1.0, 0.0, 1.0]).repeat(64)
print("-1 0 1:", *after(ternary)[:3].tolist(), "nearest:", *nearest(ternary)[:3].tolist())
assert torch.allclose(after(ternary)[:3], torch.tensor([-0.99297, 2.125e-5, 1.0]), atol=1e-6)
assert nearest(ternary)[1] == 0
assert not after(torch.zeros(192)).any()
four_bits = functional.dequantize_4bit(*functional.quantize_4bit(ternary, quant_type="nf4")).flatten()
print("nf4:", *four_bits[:3].tolist())
assert torch.equal(four_bits, ternary)
print("NaN beside 1:", *after(torch.tensor([torch.nan, 1.0])).tolist())
assert after(torch.tensor([torch.nan, 1.0]))[0] < -0.99
small = torch.cat([torch.linspace(-1e-5, 1e-5, 1001), torch.ones(1)])
found, right = after(small)[:-1], nearest(small)[:-1]
print("small numbers:", *found.unique().tolist(), "nearest:", *right.unique().tolist())
assert len(found.unique()) == 2 and len(right.unique()) > 4
assert torch.allclose(found.abs(), torch.tensor(2.125e-5), atol=1e-9)
END
