#!/usr/bin/env bash
# thop 0.1.1 and torchinfo 1.8.0: a transposed convolution counts about stride * stride times its multiplications.
#
# Expected: each number of the input is multiplied by each weight of its channel once, so they are inputs * weights /
# input channels. fvcore, ptflops and torch's FlopCounterMode count so.
# Happens: both count outputs * weights / output channels, as for a convolution; a decoder seems to cost more than its
# encoder. torchinfo counts a Linear over rows of an image, as in attention, for one row of each image, too.
# Seen: from 8 to 16 channels, kernel 3, 10 x 10 pixels: 115,200 multiplications; with stride 2 both count 508,032, with
# stride 1 165,888; fvcore, ptflops and torch 115,200. Linear from 8 to 16 of 2 x 5 rows: 1,280, and torchinfo 256.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python thop==0.1.1.post2209072238 torchinfo==1.8.0 ptflops==0.7.5 \
    fvcore==0.1.5.post20221221 torch==2.15.0 torchvision==0.29.2 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import contextlib
import io

import ptflops
import thop
import torch
import torchinfo
from fvcore.nn import FlopCountAnalysis
from torch.utils.flop_counter import FlopCounterMode


def of_torch(layer, x):
    with FlopCounterMode(display=False) as counter:
        layer(x)
    return counter.get_total_flops() // 2


def of_ptflops(layer, x):
    options = {"as_strings": False, "print_per_layer_stat": False, "backend": "aten"}
    return ptflops.get_model_complexity_info(layer, tuple(x.shape[1:]), **options)[0] * len(x)


COUNTERS = {
    "thop": lambda layer, x: thop.profile(layer, (x,), verbose=False)[0],
    "torchinfo": lambda layer, x: torchinfo.summary(layer, input_data=x, verbose=0).total_mult_adds,
    "torch": of_torch,
    "fvcore": lambda layer, x: FlopCountAnalysis(layer, x).total(),
    "ptflops": of_ptflops,
}
image, rows = torch.randn(1, 8, 10, 10), torch.randn(2, 5, 8)
for name, layer, x, exact, expected in (
    ("stride 2", torch.nn.ConvTranspose2d(8, 16, 3, 2, bias=False), image, 115_200, (508_032, 508_032)),
    ("stride 1", torch.nn.ConvTranspose2d(8, 16, 3, 1, bias=False), image, 115_200, (165_888, 165_888)),
    ("convolution", torch.nn.Conv2d(8, 16, 3, 1, 1, bias=False), image, 115_200, (115_200, 115_200)),
    ("linear", torch.nn.Linear(8, 16, bias=False), rows, 1_280, (1_280, 256)),
):
    with contextlib.redirect_stdout(io.StringIO()):
        found = {counter: int(count(layer, x)) for counter, count in COUNTERS.items()}
    weights = layer.weight.numel()
    by_inputs = x.numel() * weights // 8
    assert exact == (by_inputs if name != "convolution" else layer(x).numel() * weights // 16)
    print(f"{name}: exact {exact}, found {found}")
    assert (found["thop"], found["torchinfo"]) == expected
    assert found["torch"] == found["fvcore"] == found["ptflops"] == exact
END
