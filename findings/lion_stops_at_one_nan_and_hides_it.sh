#!/usr/bin/env bash
# torch 2.15.0, lion-pytorch 0.2.5, timm 1.0.31: torch.sign of NaN is 0, so that one NaN gradient stops Lion for good.
#
# Expected: as numpy's sign, torch.sign gives NaN for NaN; a gradient of NaN makes weights NaN, as with SGD and Adam,
# and the loss tells of it.
# Happens: torch.sign and torch.sgn give 0, compiled or not. Lion steps by the sign of a moving average, which stays NaN
# after a single bad batch: such weights never move again, except by decay, and all stay finite. The loss looks as that
# of a network that has learned all it can. Nothing is said.
# Seen: after one batch with NaN, 100 steps with a gradient of 1 move Lion's weight of lion-pytorch, timm and
# pytorch-optimizer by 0, one without that batch by 0.1; with Adam the weight is NaN.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python lion-pytorch==0.2.5 timm==1.0.31 pytorch-optimizer==4.1.0 \
  torch==2.15.0 torchvision==0.29.2 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import lion_pytorch
import numpy as np
import pytorch_optimizer
import timm.optim
import torch

values = [float("nan"), 2.0, -2.0]
found = {"torch.sign": torch.sign(torch.tensor(values)), "torch.sgn": torch.sgn(torch.tensor(values))}
found |= {"numpy": np.sign(np.array(values))}
for name, signs in found.items():
    print(name, *[float(sign) for sign in signs])
    assert (float(signs[0]) == 0) if "torch" in name else np.isnan(float(signs[0]))


def train(kind, first):
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = kind([weight], lr=1e-3)
    for gradient in [first] + [1.0] * 100:
        weight.grad = torch.tensor([gradient])
        optimizer.step()
    return float(weight)


for kind in (lion_pytorch.Lion, timm.optim.Lion, pytorch_optimizer.Lion):
    hurt, whole = train(kind, float("nan")), train(kind, 1.0)
    print(kind.__module__, "after a NaN", hurt, "without", round(whole, 4))
    assert hurt == 0 and -0.11 < whole < -0.09
adam = train(torch.optim.Adam, float("nan"))
print("Adam after a NaN", adam)
assert np.isnan(adam)
END
