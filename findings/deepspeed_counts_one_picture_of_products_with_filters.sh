#!/usr/bin/env bash
# DeepSpeed 0.19.8: the FLOPs profiler counts one picture of filters @ patches, and 9 of 16 pixels of a 2 x 2 window.
#
# Expected: get_model_profile counts the multiplications that are done, as torch's FlopCounterMode does, whatever the
# way a layer is written.
# Happens: of a product, the size of the left factor is multiplied by the columns of the right one. So a convolution as
# filters @ unfold(x), as in quantized layers that work on codes, counts one picture of a batch; x @ vector counts the
# vector's size too often. padding="same" with windows of even sizes is taken as smaller by a pixel. An einsum has no
# multiply-accumulates, but FLOPs. Upsample to a size counts one channel of one picture, or one row; by scale_factor,
# all. Nothing is said.
# Seen, 16 pictures, multiply-accumulates by torch and DeepSpeed: Conv2d 2359296, twice; filters @ unfold(x) 2359296,
# 147456; the same transposed 2359296, twice; 2 x 2 window, same padding, 4 x 4 pixels 4096, 2304; einsum 409600, 0; x @
# vector, which is 12800, 0 and 128000. Upsample to 20 x 20, 51200 numbers: scale_factor 51200, size 400, or 20.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python deepspeed==0.19.8 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' >output || { cat output errors; exit 1; }
import contextlib
import io
import logging
import math
from importlib.metadata import version

import torch
from torch import nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

logging.disable(logging.CRITICAL)
from deepspeed.profiling.flops_profiler import get_model_profile

print("DeepSpeed", version("deepspeed"), "torch", torch.__version__)


class Layer(nn.Module):
    def __init__(self, function, *shape):
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.ones(shape))

    def forward(self, x):
        return self.function(x, self.weight)


def counts(layer, shape):
    with contextlib.redirect_stdout(io.StringIO()):
        flops, products, _ = get_model_profile(
            layer, input_shape=shape, print_profile=False, detailed=False, as_string=False
        )
    with FlopCounterMode(display=False) as counter:
        outputs = layer(torch.ones(shape))
    return counter.get_total_flops() // 2, products, flops, outputs.numel()


pictures, patches = (16, 8, 10, 10), 16 * 64 * 32 * 72
for name, layer, shape, exact, expected in (
    ("Conv2d 3 x 3", nn.Conv2d(8, 32, 3, bias=False), pictures, patches, patches),
    ("filters @ unfold(x)", Layer(lambda x, w: w @ functional.unfold(x, 3), 32, 72), pictures, patches, patches // 16),
    (
        "unfold(x).mT @ filters",
        Layer(lambda x, w: functional.unfold(x, 3).mT @ w, 72, 32),
        pictures,
        patches,
        patches,
    ),
    ("einsum", Layer(lambda x, w: torch.einsum("oc,bchw->bohw", w, x), 32, 8), pictures, 16 * 100 * 256, 0),
    ("x @ vector", Layer(lambda x, w: x @ w, 10), pictures, 16 * 8 * 100, 16 * 8 * 100 * 10),
    ("2 x 2, same, 4 x 4", nn.Conv2d(8, 8, 2, padding="same", bias=False), (1, 8, 4, 4), 16 * 256, 9 * 256),
    ("3 x 3, same, 4 x 4", nn.Conv2d(8, 8, 3, padding="same", bias=False), (1, 8, 4, 4), 16 * 576, 16 * 576),
):
    by_torch, found, flops, _ = counts(layer, shape)
    print(f"{name}: exact {exact}, torch {by_torch}, DeepSpeed {found}, FLOPs / 2 {flops / 2:.0f}")
    assert by_torch == (0 if name == "x @ vector" else exact) and found == expected
    assert name != "einsum" or abs(flops / 2 - exact) < 0.01 * exact
for name, layer, expected in (
    ("scale_factor=2", nn.Upsample(scale_factor=2), math.prod(pictures) * 4),
    ("size=(20, 20)", nn.Upsample(size=(20, 20)), 400),
    ("size=20", nn.Upsample(size=20), 20),
):
    _, _, flops, pixels = counts(layer, pictures)
    print(f"Upsample({name}): {pixels} numbers, DeepSpeed {flops} FLOPs")
    assert flops == expected and pixels == math.prod(pictures) * 4
END
cat output
