#!/usr/bin/env bash
# pytorch-optimizer 4.1.0: AdaFactor passes over the learning rate, ApolloDQN over schedulers for 500 steps.
#
# Expected: lr=..., the rate of a group and a scheduler set the size of steps. torch's Adafactor multiplies by lr, that
# of transformers raises a ValueError if lr is given together with relative_step=True.
# Happens: AdaFactor has relative_step=True by default, and then never reads lr: with 0 it trains as with 1. ApolloDQN
# keeps the rate of its constructor, and warms up to that one, whatever the group's is: a group with the rate 0, or
# that a scheduler has switched off, moves. Nothing is said.
# Seen, 50 steps from 1 downhill on w ** 2: AdaFactor with lr=1, 0.001 and 0 the same 0.663; ApolloDQN with lr=0.01 ends
# at the same -0.032 whether a scheduler leaves its rate or makes it 0.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python pytorch-optimizer==4.1.0 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from pytorch_optimizer import AdaFactor, AdamP, ApolloDQN


def train(kind, rate, factor=1.0):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = kind([weight], lr=rate)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: factor)
    for _ in range(50):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
        scheduler.step()
    print(f"{kind.__name__}, lr={rate}, scheduler times {factor}: {float(weight[0]):.4f}")
    return float(weight[0])


assert train(AdaFactor, 1.0) == train(AdaFactor, 1e-3) == train(AdaFactor, 0.0) < 0.7
assert train(ApolloDQN, 1e-2) == train(ApolloDQN, 1e-2, 0.0) < 0.7
assert train(AdamP, 1e-2, 0.0) == 1 > train(AdamP, 1e-2)
END
