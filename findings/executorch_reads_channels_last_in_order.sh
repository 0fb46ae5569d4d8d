#!/usr/bin/env bash
# ExecuTorch 1.5.1: its Python runtime takes an input in channels_last, and reads it in the order of memory.
#
# Expected: an image in channels_last, as a permuted numpy array is, gives what its contiguous copy gives, as in torch, or
# is refused, as tensors of other strides are ("should be contiguous or channels-last").
# Happens: a method that was exported with a contiguous image takes the numbers in the order of memory. Nothing is said.
# Seen, for 0 to 7 as (1, 2, 2, 2), plus 0.5: contiguous 0.5 1.5 2.5 3.5 4.5 5.5 6.5 7.5;
# channels_last 0.5 4.5 1.5 5.5 2.5 6.5 3.5 7.5
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python executorch==1.5.1 torch==2.15.0
environment/bin/python -W ignore - 2>/dev/null <<'END'
import torch
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime


class Plus(torch.nn.Module):
    def forward(self, x):
        return x + 0.5


image = torch.arange(8.0).view(1, 2, 2, 2)
content = to_edge_transform_and_lower(torch.export.export(Plus(), (image,))).to_executorch().buffer
program = Runtime.get().load_program(content)
forward = program.load_method("forward")
outputs = []
for form in (torch.contiguous_format, torch.channels_last):
    given = image.contiguous(memory_format=form)
    outputs.append(forward.execute([given])[0].flatten().tolist())
    print(form, *outputs[-1])
    assert Plus()(given).flatten().tolist() == outputs[0]
assert outputs[1] == [0.5, 4.5, 1.5, 5.5, 2.5, 6.5, 3.5, 7.5]
END
