#!/usr/bin/env bash
# pytorch-optimizer 4.1.0: Ranger goes uphill in its first five steps, by the plain gradient.
#
# Expected: each step lowers the loss, or waits, while the moving average is too short to be rectified: RAdam of the
# same package does not move, Ranger of torch-optimizer goes on by plain momentum.
# Happens: for such steps the package's helper returns a negative size, as a mark for "do nothing". Ranger does not look
# at the sign, and adds the momentum to the weights: the larger the gradient, the farther away. With lookahead of k=6
# about half of it is taken back. It is so with the defaults; degenerated_to_sgd=True goes downhill. Nothing is said.
# Seen, for the loss 50 * w ** 2 from w = 1 at a rate of 0.01: 50, 200, 617, 1640, 3949 and 8863 in five steps, at
# 0.001 50, 60, 73, 87, 103 and 121; of RAdam 50 in all, of torch-optimizer's Ranger 50, 40, 32, 26, 20 and 15.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python pytorch-optimizer==4.1.0 torch-optimizer==0.3.0 torch==2.15.0 \
  numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import pytorch_optimizer
import torch
import torch_optimizer


def losses(kind, steps=5, rate=1e-2, **options):
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = kind([weight], lr=rate, **options)
    found = []
    for _ in range(steps + 1):
        loss = 50 * weight.square().sum()
        found.append(round(float(loss), 3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return found


ranger = losses(pytorch_optimizer.Ranger)
sgd = losses(pytorch_optimizer.Ranger, degenerated_to_sgd=True, rate=1e-3)
radam = losses(pytorch_optimizer.RAdam)
other = losses(torch_optimizer.Ranger, rate=1e-3)
small = losses(pytorch_optimizer.Ranger, rate=1e-3)
print("Ranger", *ranger)
print("Ranger, rate 0.001", *small)
print("Ranger, degenerated_to_sgd=True, rate 0.001", *sgd)
print("RAdam", *radam)
print("Ranger of torch-optimizer, rate 0.001", *other)
assert all(first < second for found in (ranger, small) for first, second in zip(found, found[1:]))
assert all(first > second for found in (sgd, other) for first, second in zip(found, found[1:]))
assert set(radam) == {50.0}
END
