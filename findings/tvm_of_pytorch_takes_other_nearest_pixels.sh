#!/usr/bin/env bash
# TVM 0.27.0: of a PyTorch program, interpolate with mode "nearest" takes other pixels.
#
# Expected: from_exported_program gives PyTorch's pixels: the mode "nearest" takes floor(target * inputs / outputs).
# Happens: TVM takes those of half pixels, round((target + 0.5) * inputs / outputs - 0.5), which PyTorch calls
# "nearest-exact". Nothing is said. For whole factors, as 2, both are the same when an image becomes larger.
# Seen, a row of pixels 0 to 6 to 10: PyTorch 0 0 1 2 2 3 4 4 5 6, TVM 0 1 1 2 3 3 4 5 5 6; to 3 PyTorch 0 2 4, TVM 1 3
# 5.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python apache-tvm==0.27.0.post1 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import torch
import tvm
from tvm import relax
from tvm.relax.frontend.torch import from_exported_program


class Resize(torch.nn.Module):
    def __init__(self, length):
        super().__init__()
        self.length = length

    def forward(self, x):
        return torch.nn.functional.interpolate(x, size=(1, self.length), mode="nearest")


x = torch.arange(7.0).reshape(1, 1, 1, 7)
for length in (10, 3, 14):
    network = Resize(length).eval()
    module = relax.get_pipeline("zero")(from_exported_program(torch.export.export(network, (x,))))
    found = relax.VirtualMachine(tvm.compile(module, target="llvm"), tvm.cpu())["main"](tvm.runtime.tensor(x.numpy()))
    found = (found if hasattr(found, "numpy") else found[0]).numpy().ravel()
    expected = network(x).numpy().ravel()
    targets = np.arange(length)
    centers = np.ceil((targets + 0.5) * 7 / length - 1)
    print(f"7 to {length} pixels: PyTorch", *expected.astype(int), "TVM", *found.astype(int))
    assert np.array_equal(expected, np.floor(targets * 7 / length))
    assert np.array_equal(found, centers)
    assert np.array_equal(found, expected) == (length == 14)
END
