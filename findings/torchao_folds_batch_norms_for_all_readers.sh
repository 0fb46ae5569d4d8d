#!/usr/bin/env bash
# torchao 0.18.0: prepare_pt2e folds a batch norm into a convolution that has another reader, or runs twice.
#
# Expected: prepare_pt2e in eval mode only adds observers, and a batch norm is folded where nobody else sees the sums.
# Happens: it folds each batch norm behind a convolution. A skip connection from the convolution then gets normalized
# sums, too; a convolution that runs twice in one program, as with a batch norm for each domain or scale, is folded with
# both of them. Nothing is said. With one batch norm and one reader, all is right.
# Seen: all numbers of norm(conv(x)) + conv(x) and of second(conv(norm(conv(x)))) are wrong, by up to 0.4 and 0.7 of the
# largest.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torchao==0.18.0 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from torchao.quantization.pt2e.quantize_pt2e import prepare_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)

PROGRAMS = {
    "norm(conv(x))": lambda self, x: self.norm(self.conv(x)),
    "norm(conv(x)) + conv(x)": lambda self, x: self.norm(y := self.conv(x)) + y,
    "second(conv(norm(conv(x))))": lambda self, x: self.second(self.conv(self.norm(self.conv(x)))),
    "norm(conv(norm(conv(x))))": lambda self, x: self.norm(self.conv(self.norm(self.conv(x)))),
    "norm(conv(norm(other(x))))": lambda self, x: self.norm(self.conv(self.norm(self.other(x)))),
}


class Network(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.conv, self.other = torch.nn.Conv2d(3, 3, 3, padding=1), torch.nn.Conv2d(3, 3, 3, padding=1)
        self.norm, self.second = torch.nn.BatchNorm2d(3), torch.nn.BatchNorm2d(3)
        for norm in (self.norm, self.second):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2)
            torch.nn.init.uniform_(norm.weight, 0.5, 2)
            torch.nn.init.normal_(norm.bias)
        self.function = function

    def forward(self, x):
        return self.function(self, x)


torch.manual_seed(0)
x = torch.randn(2, 3, 9, 9)
for name, function in PROGRAMS.items():
    network = Network(function).eval()
    exact = network(x)
    quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
    found = prepare_pt2e(torch.export.export(network, (x,)).module(), quantizer)(x)
    errors = (found - exact).abs() / exact.abs().max()
    wrong = float((errors > 1e-4).float().mean())
    print(f"{name}: {wrong:.0%} of the numbers wrong, by up to {errors.max():.2f} of the largest")
    if name in ("norm(conv(x)) + conv(x)", "second(conv(norm(conv(x))))"):
        assert wrong > 0.99 and errors.max() > 0.1
    else:
        assert wrong == 0
END
