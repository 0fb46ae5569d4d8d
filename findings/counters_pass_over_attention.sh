#!/usr/bin/env bash
# calflops 0.3.2, ptflops 0.7.5: attention by scaled_dot_product_attention counts no multiplications, nor does x @ y.
#
# Expected: products of queries and keys, and of these and values, count; they grow with the square of the tokens.
# Happens: calflops looks for modules and a list of functions, ptflops' backend "aten" for a list of operators.
# scaled_dot_product_attention, as timm's and torchvision's transformers call it, is in neither. calflops counts
# torch.matmul and not the sign @. Nothing is said. torch's FlopCounterMode counts all.
# Seen, shares of torch's count, calflops and ptflops: ViT-Tiny of 224 x 224 pixels 0.86, 0.86; of 448 x 448 0.60, 0.60;
# ResNet-18 1.00, 1.00; images @ weights 0, 1.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python calflops==0.3.2 transformers==5.24.0 ptflops==0.7.5 \
    timm==1.0.31 torch==2.15.0 torchvision==0.29.2 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import contextlib
import io

import calflops
import ptflops
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode


class Product(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(224, 8))

    def forward(self, x):
        return x @ self.weight


def of_ptflops(network, x):
    options = {"as_strings": False, "print_per_layer_stat": False, "backend": "aten"}
    return ptflops.get_model_complexity_info(network, tuple(x.shape[1:]), **options)[0]


def of_calflops(network, x):
    options = {"output_as_string": False, "print_results": False, "print_detailed": False}
    return calflops.calculate_flops(network, args=[x], **options)[1]


for name, network, size, wanted in (
    ("ResNet-18", timm.create_model("resnet18"), 224, (1.00, 1.00)),
    ("ViT-Tiny, 224 pixels", timm.create_model("vit_tiny_patch16_224"), 224, (0.86, 0.86)),
    ("ViT-Tiny, 448 pixels", timm.create_model("vit_tiny_patch16_224", img_size=448), 448, (0.60, 0.60)),
    ("images @ weights", Product(), 224, (0, 1)),
):
    network.eval()
    x = torch.randn(1, 3, size, size)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network(x)
    whole = counter.get_total_flops() / 2
    with contextlib.redirect_stdout(io.StringIO()):
        counts = of_calflops(network, x), of_ptflops(network, x)
    shares = [round(count / whole, 2) for count in counts]
    print(f"{name}: torch {whole / 1e6:.2f} million, shares of calflops, ptflops:", *shares)
    assert all(abs(share - number) <= 0.02 for share, number in zip(shares, wanted, strict=True))
END
