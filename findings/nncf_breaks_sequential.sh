#!/usr/bin/env bash
# NNCF 3.4.0: quantize and compress_weights cannot trace a torch.nn.Sequential.
#
# Expected: the quantized network computes about the same numbers, as it does if a Module has the same layers.
# Happens: NNCF keeps its hooks in a Module of its own, which it adds to the network as a child. Sequential calls its
# children in turn, and so this one, too, which cannot be called. Both functions fail, with a text that names no cause.
# Seen: Sequential: Module [HookStorage] is missing the required "forward" function, by both; compress_weights of a
# Module around it: error 0.005.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python nncf==3.4.0 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import logging

import nncf
import torch
from torch import nn

nncf.set_log_level(logging.ERROR)
torch.set_num_threads(1)


class Wrapped(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = layers

    def forward(self, x):
        return self.layers(x)


def result(compress, is_wrapped):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    model = Wrapped(layers) if is_wrapped else layers
    wanted = model(x)
    try:
        return ((compress(model)(x) - wanted).norm() / wanted.norm()).item()
    except NotImplementedError as error:
        return str(error)


x = torch.randn(8, 3, 16, 16)
data = nncf.Dataset([x])
found = (
    result(lambda model: nncf.quantize(model, data), is_wrapped=False),
    result(lambda model: nncf.compress_weights(model, dataset=data), is_wrapped=False),
    result(lambda model: nncf.compress_weights(model, dataset=data), is_wrapped=True),
)
print("found: quantize of Sequential:", found[0])
print("found: compress_weights of Sequential:", found[1])
print("found: compress_weights of a Module around it: error", found[2])
assert all("HookStorage" in each for each in found[:2])
assert found[2] < 0.02
END
