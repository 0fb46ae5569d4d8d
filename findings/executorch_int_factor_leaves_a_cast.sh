#!/usr/bin/env bash
# ExecuTorch 1.5.1: a factor that is a Python int leaves a cast in the file, outside of XNNPACK; a float leaves none.
#
# Expected: `x * 4` and `x * 4.0` of a float tensor are the same operator of the same constant: both lie in the delegate.
# Happens: the int becomes a tensor of int64, and each inference casts it to float by ExecuTorch's own kernel first.
# Seen: 4 -> _to_dim_order_copy, delegate; 4.0 -> delegate
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python executorch==1.5.1 torch==2.15.0
environment/bin/python -W ignore - 2>/dev/null <<'END'
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower


class Scaled(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return torch.nn.functional.hardtanh(x * self.factor)


casts = []
for factor in (4, 4.0):
    exported = torch.export.export(Scaled(factor), (torch.zeros(1, 3, 4, 4),))
    lowered = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
    calls = [str(node.target) for node in lowered.exported_program().graph.nodes if node.op == "call_function"]
    names = ["_to_dim_order_copy" if "_to_dim_order_copy" in call else call for call in calls if "getitem" not in call]
    print(factor, "->", *names)
    casts.append("_to_dim_order_copy" in names)
assert casts == [True, False]
END
