#!/usr/bin/env bash
# torchinfo 1.8.0: a Linear layer counts the multiplications of one token, however many tokens or pixels it computes.
#
# Expected: a Linear layer on batch x tokens x channels does tokens times the work of one on batch x channels, and as
# much as a convolution of 1 x 1 on as many pixels. torch's FlopCounterMode and fvcore count so.
# Happens: the number of weights is multiplied by the batch alone. A vision transformer's layers, and those of ConvNeXt
# and MLP-Mixer, which are Linear on all pixels, come out too cheap by the number of tokens, often 196.
# Seen, for 14 x 14 tokens, 64 to 64 channels, a batch of 2: Linear 8192, convolution 1605632; FlopCounterMode 1605632
# and 1605632.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torchinfo==1.8.0 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from torch.utils.flop_counter import FlopCounterMode
from torchinfo import summary

WORK = 2 * 14 * 14 * 64 * 64
for layer, shape, wanted in (
    (torch.nn.Linear(64, 64, bias=False), (2, 196, 64), 2 * 64 * 64),
    (torch.nn.Linear(64, 64, bias=False), (2, 14, 14, 64), 2 * 64 * 64),
    (torch.nn.Conv2d(64, 64, 1, bias=False), (2, 64, 14, 14), WORK),
):
    found = summary(layer, input_size=shape, verbose=0).total_mult_adds
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(shape))
    right = counter.get_total_flops() // 2
    print(type(layer).__name__, shape, "torchinfo", found, "FlopCounterMode", right)
    assert (found, right) == (wanted, WORK)
END
