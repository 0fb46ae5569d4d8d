#!/usr/bin/env bash
# thop 0.1.1, torchinfo 1.8.0, ptflops 0.7.5: a convolution whose weight is quantized counts no multiplications.
#
# Expected: a Conv2d with a parametrized weight, or a subclass of Conv2d that quantizes its weight, counts as a Conv2d.
# Happens: thop and ptflops look up the exact class, and torch.nn.utils.parametrize gives a layer a class of its own.
# torchinfo goes by parameters with the name "weight", and by "Conv" in the name of the class: without it, a subclass
# counts each weight once. Nothing is said. ptflops' other backend, "aten", and torch count right.
# Seen for 115,200 multiplications of a layer with weights -1 and 1: parametrized 0 from all three; a subclass
# SignLayer 0, 1,152 from torchinfo, and 0.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python thop==0.1.1.post2209072238 torchinfo==1.8.0 ptflops==0.7.5 \
    torch==2.15.0 torchvision==0.29.2 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import contextlib
import io

import ptflops
import thop
import torch
import torchinfo
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode


class Sign(torch.nn.Module):
    def forward(self, weight):
        return weight.sign()


class SignLayer(torch.nn.Conv2d):
    def forward(self, x):
        return torch.nn.functional.conv2d(x, self.weight.sign(), padding=1)


def convolution(kind=torch.nn.Conv2d):
    return kind(8, 16, 3, padding=1, bias=False)


def of_torch(layer, x):
    with FlopCounterMode(display=False) as counter:
        layer(x)
    return counter.get_total_flops() // 2


def of_ptflops(layer, x, **options):
    with contextlib.redirect_stdout(io.StringIO()):
        return ptflops.get_model_complexity_info(layer, tuple(x.shape[1:]), False, False, **options)[0]


COUNTERS = {
    "thop": lambda layer, x: thop.profile(layer, (x,), verbose=False)[0],
    "torchinfo": lambda layer, x: torchinfo.summary(layer, input_data=x, verbose=0).total_mult_adds,
    "ptflops": of_ptflops,
    "ptflops, aten": lambda layer, x: of_ptflops(layer, x, backend="aten"),
    "torch": of_torch,
}
x = torch.randn(1, 8, 10, 10)
found = {}
for name, counter in COUNTERS.items():
    layers = (
        convolution(),
        parametrize.register_parametrization(convolution(), "weight", Sign()),
        convolution(SignLayer),
    )
    found[name] = [int(counter(layer, x)) for layer in layers]
    print(f"{name}: Conv2d {found[name][0]:,}, parametrized {found[name][1]:,}, subclass {found[name][2]:,}")
exact = 8 * 16 * 9 * 10 * 10
assert found == {
    "thop": [exact, 0, 0],
    "torchinfo": [exact, 0, 8 * 16 * 9],
    "ptflops": [exact, 0, 0],
    "ptflops, aten": [exact] * 3,
    "torch": [exact] * 3,
}
END
