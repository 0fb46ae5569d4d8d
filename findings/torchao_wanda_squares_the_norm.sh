#!/usr/bin/env bash
# torchao 0.18.0: WandaSparsifier weighs weights with the square of an input's norm, and so drops the wrong ones.
#
# Expected: what the Wanda paper, which its docstring names, says, and what the code's own comment says: the magnitude
# of a weight times the norm of its input.
# Happens: the observer, whose docstring says that it keeps the norm, keeps its square, and nobody takes the root. So
# the sizes of inputs count twice. Nothing is said.
# Seen: of weights 1 and 0.4 behind inputs of norms 10 and 20 it keeps 0.4, whose product is 8, and drops 1, whose
# product is 10. Half of the weights of a layer pruned, inputs of sizes from 0.1 to 10: it drops 8 % of those that
# the paper keeps.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 torchao==0.18.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from torchao.sparsity import WandaSparsifier


def kept(weight, x):
    model = torch.nn.Sequential(torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False))
    model[0].weight.data.copy_(weight)
    sparsifier = WandaSparsifier(0.5)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
    model(x)
    sparsifier.step()
    sparsifier.squash_mask()
    return model[0].weight != 0


def larger_half(products):
    return products > products.flatten().sort().values[products.numel() // 2 - 1]


weight, x = torch.tensor([[1.0, 0.4]]), torch.tensor([[10.0, 0.0], [0.0, 20.0]])
found, wanted = kept(weight, x), larger_half(weight.abs() * x.norm(dim=0))
print("of weights 1 and 0.4, products 10 and 8, kept:", weight[found].item(), "by the paper:", weight[wanted].item())
assert (found == torch.tensor([[False, True]])).all()
assert (wanted == torch.tensor([[True, False]])).all()

torch.manual_seed(0)
weight, x = torch.randn(64, 64), torch.randn(256, 64) * torch.logspace(-1, 1, 64)
found, magnitudes, norms = kept(weight, x), weight.abs(), x.norm(dim=0)
once, twice = larger_half(magnitudes * norms), larger_half(magnitudes * norms**2)
print("dropped of those that the paper keeps:", (once & ~found).sum().item() / once.sum().item())
assert (found == twice).all()
assert 0.05 < (once & ~found).sum() / once.sum() < 0.3
END
