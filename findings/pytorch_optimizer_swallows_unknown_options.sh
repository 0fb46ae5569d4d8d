#!/usr/bin/env bash
# pytorch-optimizer 4.1.0: over 100 optimizers take any option, and ignore it.
#
# Expected: an option that an optimizer lacks, or that is misspelt, is a TypeError, as in torch.optim.
# Happens: their constructors end in **kwargs, for a handful of options read by name, and pass over the rest. So weight
# decay with a typing error is none, and torch's names (amsgrad, nesterov, dampening, fused) do nothing: the package
# writes ams_bound. Fromage, FTRL, SM3 and others have no weight decay at all, and take one. Nothing is said.
# Seen: 109 optimizers take no_such_option=1. AdamP with weight_decy=0.5 moves as with 0, AdaBelief with amsgrad=True as
# without, while ams_bound=True changes it; SM3 with weight_decay=0.5 as with 0.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python pytorch-optimizer==4.1.0 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import pytorch_optimizer
import torch


def make(name, **options):
    weight = torch.nn.Parameter(torch.linspace(1, 2, 4))
    return weight, pytorch_optimizer.load_optimizer(name)([weight], lr=1e-2, **options)


def train(name, **options):
    weight, optimizer = make(name, **options)
    for step in range(20):
        weight.grad = torch.linspace(-1, 1, 4) / (1 + step)
        optimizer.step()
    return weight.detach()


taken, refused = [], []
for name in pytorch_optimizer.get_supported_optimizers():
    try:
        make(name)
    except Exception:  # needs more than weights and a rate
        continue
    try:
        make(name, no_such_option=1)
        taken.append(name)
    except TypeError:
        refused.append(name)
print(len(taken), "take it; refused by", *refused)
assert len(taken) > 100 and "adamw" in refused and {"adamp", "adabelief", "sm3", "lamb", "lion"} <= set(taken)
for name, wrong, right in (
    ("adamp", {"weight_decy": 0.5}, {"weight_decay": 0.5}),
    ("adabelief", {"amsgrad": True}, {"ams_bound": True}),
    ("sm3", {"weight_decay": 0.5}, None),
):
    plain, found = train(name), train(name, **wrong)
    print(name, wrong, "changes weights by", float((found - plain).abs().max()))
    assert torch.equal(plain, found) and (right is None or not torch.equal(plain, train(name, **right)))
END
