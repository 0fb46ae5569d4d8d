#!/usr/bin/env bash
# torch 2.15.0, DeepSpeed 0.19.8, ptflops 0.7.5: three counters count no multiplications of deformable convolutions.
#
# Expected: torchvision's DeformConv2d multiplies each weight with as many pixels as Conv2d does, so it counts as much,
# or more, for the pixels between which it interpolates; or it is named as unknown, as fvcore does in a warning.
# Happens: FlopCounterMode of torch, get_model_profile of DeepSpeed, and ptflops with its backend "aten", which replaces
# layers' counters by those of operators, count 0 and say nothing. So a network gets cheaper by each deformable layer.
# The other backend of ptflops and torchinfo count it.
# Seen, 8 to 16 channels, 3 x 3, 16 x 16 pixels, products: Conv2d 294912 by all five; DeformConv2d 0 by torch, DeepSpeed
# and ptflops with "aten", 350208 by ptflops with "pytorch", 294912 by torchinfo.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python deepspeed==0.19.8 ptflops==0.7.5 torchinfo==1.8.0 \
    torch==2.15.0 torchvision==0.29.2 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' >output || { cat output errors; exit 1; }
import contextlib
import io
import logging
from importlib.metadata import version

import ptflops
import torch
import torchinfo
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.ops import DeformConv2d

logging.disable(logging.CRITICAL)
from deepspeed.profiling.flops_profiler import get_model_profile

print(*(f"{name} {version(name)}" for name in ("torch", "torchvision", "deepspeed", "ptflops", "torchinfo")))
SHAPE = (1, 8, 16, 16)


class Deformed(nn.Module):
    """A deformable convolution whose offsets are given, so that nothing else is to be counted."""

    def __init__(self, zero):
        super().__init__()
        self.convolution = DeformConv2d(8, 16, 3, padding=1, bias=False)
        self.register_buffer("offsets", torch.full((1, 18, 16, 16), 0.0 if zero else 0.5))

    def forward(self, x):
        return self.convolution(x, self.offsets)


def counts(layer):
    with contextlib.redirect_stdout(io.StringIO()):
        by_ptflops = {
            backend: ptflops.get_model_complexity_info(
                layer, SHAPE[1:], as_strings=False, print_per_layer_stat=False, backend=backend
            )[0]
            for backend in ("aten", "pytorch")
        }
        profile = get_model_profile(layer, input_shape=SHAPE, print_profile=False, detailed=False, as_string=False)
    with FlopCounterMode(display=False) as counter:
        layer(torch.ones(SHAPE))
    return {
        "torch": counter.get_total_flops() // 2,
        "DeepSpeed": profile[1],
        "ptflops, aten": by_ptflops["aten"],
        "ptflops, pytorch": by_ptflops["pytorch"],
        "torchinfo": torchinfo.summary(layer, input_size=SHAPE, verbose=0).total_mult_adds,
    }


plain, exact = nn.Conv2d(8, 16, 3, padding=1, bias=False), 16 * 8 * 9 * 16 * 16
straight = Deformed(True)
straight.convolution.weight = plain.weight
x = torch.randn(SHAPE)
print("without offsets, DeformConv2d is Conv2d up to", (straight(x) - plain(x)).abs().max().item())
assert (straight(x) - plain(x)).abs().max() < 1e-5
for name, layer in (("Conv2d", plain), ("DeformConv2d", Deformed(False))):
    found = counts(layer)
    print(f"{name}, exact at least {exact}:", found)
    for counter, number in found.items():
        if name == "Conv2d":
            assert number == exact
        else:
            assert number == 0 if counter in ("torch", "DeepSpeed", "ptflops, aten") else number >= exact
END
cat output
