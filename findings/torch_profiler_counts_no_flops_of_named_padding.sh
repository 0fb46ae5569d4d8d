#!/usr/bin/env bash
# torch 2.15.0: the profiler's with_flops counts nothing for padding="same", transposed, 1-D and 3-D convolutions, nor
# for attention.
#
# Expected: with_flops counts convolutions and matrix multiplications; 1-D ones and "same" are convolutions.
# Happens: only calls of aten::conv2d with paddings in numbers count. conv2d with a named padding, conv1d, conv3d,
# conv_transpose2d, scaled_dot_product_attention and LSTM have 0 operations, and sums over a network leave them out.
# FlopCounterMode counts all but LSTM. Nothing is said.
# Seen, in multiplications, profiler and FlopCounterMode: padding 1 460,800 both; "same" 0, 460,800; padding "valid" 0,
# 373,248; transposed 0, 460,800; 1-D 0, 14,592; 3-D 0, 1,185,408; attention 0, 128,000; LSTM 0, 0 of 7,680.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

image, row, cube = torch.randn(1, 8, 20, 20), torch.randn(1, 8, 40), torch.randn(1, 8, 9, 9, 9)
for name, layer, x, wanted in (
    ("padding 1", nn.Conv2d(8, 16, 3, padding=1, bias=False), image, (460_800, 460_800)),
    ('padding "same"', nn.Conv2d(8, 16, 3, padding="same", bias=False), image, (0, 460_800)),
    ('padding "valid"', nn.Conv2d(8, 16, 3, padding="valid", bias=False), image, (0, 373_248)),
    ("transposed", nn.ConvTranspose2d(8, 16, 3, 2, bias=False), image, (0, 460_800)),
    ("1-D", nn.Conv1d(8, 16, 3, bias=False), row, (0, 14_592)),
    ("3-D", nn.Conv3d(8, 16, 3, bias=False), cube, (0, 1_185_408)),
    ("linear", nn.Linear(20, 16, bias=False), image, (51_200, 51_200)),
    ("attention", lambda x: nn.functional.scaled_dot_product_attention(x, x, x), image, (0, 128_000)),
    ("LSTM", nn.LSTM(8, 16, bias=False, batch_first=True), row.transpose(1, 2)[:, :5], (0, 0)),
):
    with torch.no_grad():
        with profile(activities=[ProfilerActivity.CPU], with_flops=True) as profiler:
            layer(x)
        with FlopCounterMode(display=False) as counter:
            layer(x)
    found = sum(event.flops for event in profiler.key_averages()) // 2, counter.get_total_flops() // 2
    print(f"{name}: profiler {found[0]}, FlopCounterMode {found[1]}")
    assert found == wanted
END
