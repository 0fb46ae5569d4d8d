#!/usr/bin/env bash
# fvcore 0.1.5, torchprofile 0.1.0: a convolution with padding="same" or "valid" counts no multiplications.
#
# Expected: padding="same" of a 3 x 3 kernel counts as padding=1, since it computes the same numbers.
# Happens: both count the operators of a traced program, where a padding that has a name makes another operator,
# `aten::_convolution_mode`, which neither knows. They warn of an operator left out, and give the sum all the same.
# Without a warning, torchprofile counts a transposed convolution stride * stride times, and one in g groups g times as
# often again, and calflops 0.3.2 counts a g-th of the latter. torch's FlopCounterMode is right in all.
# Seen, 8 to 16 channels, 10 x 10 pixels: 115,200 multiplications with padding=1, 0 with "same" and 73,728 or 0 with 0
# and "valid"; transposed, kernel and stride 2: 51,200, torchprofile 204,800; in 4 groups 12,800, torchprofile 204,800,
# calflops 3,200.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python fvcore==0.1.5.post20221221 torchprofile==0.1.0 calflops==0.3.2 \
    transformers==5.24.0 torch==2.15.0 torchvision==0.29.2 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import contextlib
import io

import torch
from calflops import calculate_flops
from fvcore.nn import FlopCountAnalysis
from torch.utils.flop_counter import FlopCounterMode
from torchprofile import profile_macs


def of_calflops(layer, x):
    with contextlib.redirect_stdout(io.StringIO()):
        return calculate_flops(layer, tuple(x.shape), output_as_string=False, print_results=False)[1]


def of_torch(layer, x):
    with FlopCounterMode(display=False) as counter:
        layer(x)
    return counter.get_total_flops() // 2


COUNTERS = {
    "torch": of_torch,
    "fvcore": lambda layer, x: FlopCountAnalysis(layer, x).total(),
    "torchprofile": profile_macs,
    "calflops": of_calflops,
}
LAYERS = {
    "padding 1": torch.nn.Conv2d(8, 16, 3, padding=1, bias=False),
    "same": torch.nn.Conv2d(8, 16, 3, padding="same", bias=False),
    "padding 0": torch.nn.Conv2d(8, 16, 3, bias=False),
    "valid": torch.nn.Conv2d(8, 16, 3, padding="valid", bias=False),
    "transposed": torch.nn.ConvTranspose2d(8, 16, 2, 2, bias=False),
    "transposed in groups": torch.nn.ConvTranspose2d(8, 16, 2, 2, groups=4, bias=False),
}
x = torch.randn(1, 8, 10, 10)
found = {name: [int(counter(layer, x)) for layer in LAYERS.values()] for name, counter in COUNTERS.items()}
print(*LAYERS, sep=", ")
for name, counts in found.items():
    print(f"{name}:", *(f"{count:,}" for count in counts))
exact = [115_200, 115_200, 73_728, 73_728, 51_200, 12_800]
assert found["torch"] == exact
assert found["fvcore"] == [115_200, 0, 73_728, 0, 51_200, 12_800]
assert found["torchprofile"] == [115_200, 0, 73_728, 0, 204_800, 204_800]
assert found["calflops"] == exact[:5] + [3_200]
END
