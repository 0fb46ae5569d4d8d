#!/usr/bin/env bash
# timm 1.0.31: the schedule "multistep" decays one epoch early; "poly" holds its rate up to the last epoch.
#
# Expected: decay_milestones=[3, 6] trains epochs 0, 1 and 2 at the first rate, as torch's MultiStepLR and timm's own
# "step" with decay_epochs=3 do. "poly" of 10 epochs falls about as (1 - epoch / 10) ** power, with a power near 1.
# Happens: the milestones are compared with the epoch + 1, so that epoch 2 has the next rate. create_scheduler_v2 hands
# decay_rate, 0.1 by default and a factor for all others, to "poly" as its power. So the rate barely falls, until it
# drops to nothing after the end. Nothing is said.
# Seen, rates of epochs 0 to 9: multistep 1 1 0.1 0.1 0.1 0.01 ..., step 1 1 1 0.1 0.1 0.1 0.01 ...; poly 1, in the
# middle 0.933, in the last epoch 0.794.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python timm==1.0.31 torch==2.15.0 torchvision==0.29.2 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from timm.scheduler import create_scheduler_v2


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 1.0)


def rates(name, **options):
    steps = optimizer()
    scheduler, epochs = create_scheduler_v2(steps, sched=name, num_epochs=10, **options)
    found = []
    for epoch in range(epochs):  # as timm's train.py
        found.append(round(steps.param_groups[0]["lr"], 4))
        scheduler.step(epoch + 1)
    print(name, options, *found)
    return found


steps = optimizer()
scheduler = torch.optim.lr_scheduler.MultiStepLR(steps, [3, 6])
usual = []
for _ in range(10):
    usual.append(round(steps.param_groups[0]["lr"], 4))
    steps.step()
    scheduler.step()
print("torch", *usual)
assert usual == [1] * 3 + [0.1] * 3 + [0.01] * 4
assert rates("multistep", decay_milestones=[3, 6]) == [1] * 2 + [0.1] * 3 + [0.01] * 5
assert rates("step", decay_epochs=3) == [1] * 3 + [0.1] * 3 + [0.01] * 3 + [0.001]
found = rates("poly")
assert found == [round((1 - epoch / 10) ** 0.1, 4) for epoch in range(10)] and found[9] > 0.79
assert rates("poly", decay_rate=1.0) == [round(1 - epoch / 10, 4) for epoch in range(10)]
END
