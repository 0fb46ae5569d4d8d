#!/usr/bin/env bash
# OpenVINO 2026.4.1: converted from PyTorch, layers lose options: beta, decimals, correction, and the scale of
# antialias.
#
# Expected: convert_model of a module gives PyTorch's numbers, or an error for what it can't convert, as for Hardshrink.
# Happens: Softplus loses beta and threshold; round loses decimals, so a quantizer by decimal steps rounds to whole
# numbers; std with a correction of 3 has 1; an antialiased interpolate by scale_factor resizes by the ratio of sizes.
# Nothing is said.
# Seen, normal numbers, largest differences: Softplus(beta=2) 0.35, and 1e-7 from Softplus(); round(decimals=1) 0.5, and
# 0 from round; std of 11 numbers 0.2, and 1e-7 from correction=1; interpolate by 0.4 of 11 pixels 0.4, and 1e-7 from
# size=4.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python openvino==2026.4.1 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import openvino
import torch
from torch.nn.functional import interpolate, softplus


class Network(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


CASES = {
    "Softplus(beta=2)": (lambda x: softplus(x, beta=2.0), softplus),
    "round(decimals=1)": (lambda x: torch.round(x, decimals=1), torch.round),
    "std(correction=3)": (lambda x: torch.std(x, 3, correction=3), lambda x: torch.std(x, 3, correction=1)),
    "antialias by 0.4": (
        lambda x: interpolate(x, scale_factor=0.4, mode="bilinear", antialias=True),
        lambda x: interpolate(x, size=(4, 4), mode="bilinear", antialias=True),
    ),
    "antialias to 4": (lambda x: interpolate(x, size=(4, 4), mode="bilinear", antialias=True), None),
    "interpolate by 0.4": (lambda x: interpolate(x, scale_factor=0.4, mode="bilinear"), None),
}
torch.manual_seed(0)
x = torch.randn(1, 2, 11, 11)
for name, (function, without) in CASES.items():
    network = openvino.convert_model(Network(function).eval(), example_input=x)
    compiled = openvino.Core().compile_model(network, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found = torch.from_numpy(compiled(x.numpy())[0])
    difference = (found - function(x)).abs().max().item()
    from_without = (found - (without or function)(x)).abs().max().item()
    print(f"{name}: difference {difference:.2f}, without the option {from_without:.2f}")
    assert from_without < 1e-4
    assert difference > 0.03 if without else difference < 1e-4
END
