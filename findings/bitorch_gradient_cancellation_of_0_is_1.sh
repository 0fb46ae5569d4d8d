#!/usr/bin/env bash
# bitorch 0.4.1: gradient_cancellation_threshold=0, which is to switch it off, is a threshold of 1.
#
# Expected: QActivation's description says that a threshold of 0 disables the cancellation, and 0 is its default there:
# each input of a sign gets the gradient.
# Happens: 0 counts as not given, and the library's own default of 1 is taken. Nothing is said. The same is so in
# QConv2d and QLinear. Numbers other than 0 are kept, so a very large one switches it off, as does a negative one.
# Seen: inputs of -3, -0.5, 0.5 and 3 have gradients 0, 1, 1, 0 with 0, with 1 and without an argument; 1, 1, 1, 1 with
# -1 and with 1e9. A convolution of inputs from -3 to 3 gives no gradient to 66 %.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python bitorch==0.4.1 torch==2.15.0 torchvision==0.29.2 numpy==2.4.6 \
    setuptools==80.9.0
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from bitorch.layers import QActivation, QConv2d, QLinear

points = [-3.0, -0.5, 0.5, 3.0]
for arguments in ({}, {"gradient_cancellation_threshold": 1.0}, {"gradient_cancellation_threshold": 0.0}):
    x = torch.tensor(points, requires_grad=True)
    QActivation("sign", **arguments)(x).sum().backward()
    print(f"QActivation({arguments}): inputs {points}, gradients {x.grad.tolist()}")
    assert x.grad.tolist() == [0, 1, 1, 0]
for threshold in (-1.0, 1e9):
    x = torch.tensor(points, requires_grad=True)
    QActivation("sign", gradient_cancellation_threshold=threshold)(x).sum().backward()
    print(f"threshold {threshold:g}: gradients {x.grad.tolist()}")
    assert x.grad.tolist() == [1, 1, 1, 1]

torch.manual_seed(0)
for kind, sizes, shape in ((QConv2d, (4, 8, 3), (8, 4, 16, 16)), (QLinear, (64, 8), (64, 64))):
    inputs = torch.rand(shape) * 6 - 3
    shares = {}
    for threshold in (0.0, 1.0, 1e9):
        torch.manual_seed(1)
        layer = kind(
            *sizes,
            bias=False,
            input_quantization="sign",
            weight_quantization="sign",
            gradient_cancellation_threshold=threshold,
        )
        x = inputs.clone().requires_grad_()
        output = layer(x)
        (output * torch.randn_like(output)).sum().backward()
        shares[threshold] = float((x.grad == 0).double().mean())
    print(f"{'QLinear' if len(shape) == 2 else 'QConv2d'}: inputs without gradient by threshold {shares}")
    outside = float((inputs.abs() > 1).double().mean())
    assert shares[0.0] == shares[1.0] and abs(shares[0.0] - outside) < 0.02 and shares[1e9] < 0.02
END
