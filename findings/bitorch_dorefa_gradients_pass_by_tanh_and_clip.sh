#!/usr/bin/env bash
# bitorch 0.4.1: gradients of DoReFa pass by its tanh and its clip, not only by its rounding.
#
# Expected: as in the paper (arXiv 1606.06160) that the classes name, the gradient goes straight through the rounding,
# and through all else as derived: weights get (1 - tanh(w)^2) / max |tanh(w)|, inputs outside [0, 1] get 0. With 16
# bits, that is the slope one sees when a weight or an input moves.
# Happens: WeightDoReFa and InputDoReFa hand the gradient on as it is. In a layer, inputs get 0 further than a threshold
# from 0, which is 1 by default, so those from -1 to 0, clipped to 0, get all of it. Nothing is said.
# Seen: weights up to 0.1 have a slope of 10, and a gradient of 1; one of 1.8, among some up to 2.2, a slope of 0.11. An
# input of -0.5 has the slope 0 and a gradient of 1. QConv2d of inputs from -1 to 0 gives 0, and gradients to 99 %.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python bitorch==0.4.1 torch==2.15.0 torchvision==0.29.2 numpy==2.4.6 \
    setuptools==80.9.0
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from bitorch.layers import QActivation, QConv2d
from bitorch.quantizations import InputDoReFa, WeightDoReFa

BITS, MOVE = 16, 0.01


def gradient(function, x, index):
    x = x.clone().requires_grad_()
    function(x).flatten()[index].backward()
    return float(x.grad.flatten()[index])


def slope(function, x, index):
    ends = []
    for move in (-MOVE, MOVE):
        moved = x.clone()
        moved.view(-1)[index] += move
        ends.append(float(function(moved).flatten()[index]))
    return (ends[1] - ends[0]) / (2 * MOVE)


def by_paper(x, index):
    x = x.double().clone().requires_grad_()
    squashed = torch.tanh(x)
    (squashed / squashed.abs().max().detach()).flatten()[index].backward()
    return float(x.grad.flatten()[index])


weights = WeightDoReFa(BITS)
for largest in (0.1, 2.2):
    x = torch.linspace(-largest, largest, 12).view(1, 3, 2, 2)
    for index in (6, 10):
        found, seen, exact = gradient(weights, x, index), slope(weights, x, index), by_paper(x, index)
        name = f"weight {float(x.flatten()[index]):.2g}, the largest {largest}"
        print(f"{name}: gradient {found:g}, slope {seen:.2g}, paper {exact:.2g}")
        assert found == 1 and abs(seen / exact - 1) < 0.05
        assert exact > 9.5 if largest == 0.1 else exact < 1

inputs = {
    "InputDoReFa": InputDoReFa(BITS),
    "QActivation": QActivation(InputDoReFa(BITS)),
    "QActivation, threshold 3": QActivation(InputDoReFa(BITS), gradient_cancellation_threshold=3.0),
}
points = torch.tensor([-2.0, -0.5, 0.5, 2.0])
wanted = {
    "InputDoReFa": [1, 1, 1, 1],
    "QActivation": [0, 1, 1, 0],
    "QActivation, threshold 3": [1, 1, 1, 1],
}
for name, function in inputs.items():
    found = [gradient(function, points, index) for index in range(4)]
    seen = [round(slope(function, points, index), 2) for index in range(4)]
    print(f"inputs {points.tolist()}, {name}: gradients {found}, slopes {seen}")
    assert seen == [0, 0, 1, 0] and found == wanted[name]

torch.manual_seed(0)
layer = QConv2d(3, 4, 3, bias=False, input_quantization=InputDoReFa(2), weight_quantization=WeightDoReFa(2))
x = (torch.rand(2, 3, 8, 8) - 1.01).requires_grad_()
output = layer(x)
output.sum().backward()
share = float((x.grad != 0).double().mean())
print(f"QConv2d of negative inputs: output {float(output.abs().max()):g}, gradients that are not 0: {share:.0%}")
assert float(output.detach().abs().max()) == 0 and share > 0.9
END
