#!/usr/bin/env bash
# TVM 0.27.0: of a PyTorch program, add, sub and rsub drop alpha, and two lists of places give all combinations of
# them.
#
# Expected: from_exported_program gives PyTorch's numbers.
# Happens: torch.sub(x, y, alpha=2) is x - y, and the like. Two tensors as indices, which name a place together, are
# taken one after the other. Nothing is said. One tensor as index is right.
# Seen: x - 2 y is x - y in all places; x[:, [1, 2], [3, 4]] of 1 x 8 x 10 x 10 is 1 x 2 x 2 x 10, not 1 x 2 x 10.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python apache-tvm==0.27.0.post1 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
import tvm
from tvm import relax
from tvm.relax.frontend.torch import from_exported_program


class Program(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def both(function, x):
    module = relax.get_pipeline("zero")(from_exported_program(torch.export.export(Program(function), (x,))))
    found = relax.VirtualMachine(tvm.compile(module, target="llvm"), tvm.cpu())["main"](tvm.runtime.tensor(x.numpy()))
    return function(x), torch.from_numpy((found if hasattr(found, "numpy") else found[0]).numpy().copy())


torch.manual_seed(0)
x = torch.randn(1, 8, 10, 10)
y = x.flip(3)
for name, with_alpha, without in (("add", x + 2 * y, x + y), ("sub", x - 2 * y, x - y), ("rsub", y - 2 * x, y - x)):
    exact, found = both(lambda x, function=getattr(torch, name): function(x, x.flip(3), alpha=2), x)
    print(f"{name}: {((found - exact).abs() > 1e-4).float().mean():.0%} wrong")
    assert torch.allclose(exact, with_alpha, atol=1e-5) and torch.allclose(found, without, atol=1e-5)

exact, found = both(lambda x: x[:, torch.tensor([1, 2]), torch.tensor([3, 4])], x)
print("two lists of places:", *exact.shape, "became", *found.shape)
assert exact.shape == (1, 2, 10) and found.shape == (1, 2, 2, 10)
exact, found = both(lambda x: x[:, torch.tensor([1, 2])], x)
assert torch.equal(exact, found)
END
