#!/usr/bin/env bash
# torch 2.15.0, CPU: histc, index_add, segment_reduce and cross_entropy sum in bfloat16 or float16, one by one.
#
# Expected: reductions of 16-bit floats sum in float32 and round once, as sum, mean, cumsum and scatter_add do.
# Happens: these round after each number. In bfloat16 a sum of ones ends at 256, in float16 at 2048: counts of a
# histogram, means of segments, sums by index, which scatter_add gets right. Each thread of histc ends there by itself.
# cross_entropy counts rows, or pixels of segmentation, in float16: beyond 65,504 it divides by infinity, so that the
# loss is 0, or nan if the sum is infinite, too. Nothing is said.
# Seen, for 10,000 ones, in float32, bfloat16, float16: index_add 10000, 256, 2048, and scatter_add 10000, 9984, 10000;
# counts of histc 10000, 256, 2048; means by segment_reduce 1, 0.0256, 0.2048. cross_entropy of 300 x 300 pixels of two
# equal classes 0.693, 0.691, 0; of 200 x 300 pixels in float16 0.693.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch

torch.set_num_threads(1)
ones, first = torch.ones(10_000), torch.zeros(10_000, dtype=torch.long)


def loss(rows, kind):
    labels = torch.zeros(1, rows, 300, dtype=torch.long)
    return torch.nn.functional.cross_entropy(torch.zeros(1, 2, rows, 300, dtype=kind), labels)


ways = {
    "sum": lambda kind: ones.to(kind).sum(),
    "scatter_add": lambda kind: torch.zeros(1, dtype=kind).scatter_add(0, first, ones.to(kind)),
    "index_add": lambda kind: torch.zeros(1, dtype=kind).index_add(0, first, ones.to(kind)),
    "histc": lambda kind: torch.histc(ones.to(kind), 1, 0, 2),
    "segment_reduce": lambda kind: torch.segment_reduce(ones.to(kind), "mean", lengths=torch.tensor([10_000])),
    "cross_entropy": lambda kind: loss(300, kind),
    "of fewer pixels": lambda kind: loss(200, kind),
}
kinds = torch.float32, torch.bfloat16, torch.float16
found = {name: [float(way(kind)) for kind in kinds] for name, way in ways.items()}
for name, numbers in found.items():
    print(f"{name}:", *(f"{number:.4g}" for number in numbers))
assert found["sum"] == found["scatter_add"] == [10_000, 9984, 10_000]
assert found["index_add"] == found["histc"] == [10_000, 256, 2048]
assert [round(number, 3) for number in found["segment_reduce"]] == [1, 0.026, 0.205]
assert [round(number, 2) for number in found["cross_entropy"]] == [0.69, 0.69, 0]
assert [round(number, 2) for number in found["of fewer pixels"]] == [0.69, 0.69, 0.69]
END
