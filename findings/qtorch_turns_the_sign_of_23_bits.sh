#!/usr/bin/env bash
# qtorch 0.3.0 (QPyTorch): float_quantize(x, exp=8, man=23, rounding="nearest") is -x.
#
# Expected: 8 bits of exponent and 23 of mantissa are those of float32, so x comes back, as it does with
# rounding="stochastic"; one takes them as the baseline of a sweep over formats.
# Happens: half of the last bit is added before bits are cut off. With 23 bits none is cut off, and what is added turns
# the sign bit. Nothing is said. Zero becomes -2.4e-38. Up to 22 bits are right, but halves go away from zero, not to
# even as in bfloat16 and IEEE 754; fixed_point_quantize takes the even one.
# Seen: all of 10,000 numbers change their sign, also with 5 bits of exponent; gradient descent on x^2 goes up.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python qtorch==0.3.0 torch==2.15.0 numpy==2.4.6 ninja==1.13.0 \
    setuptools==80.9.0
export TORCH_EXTENSIONS_DIR="$PWD/extensions" PATH="$PWD/environment/bin:$PATH"  # qtorch builds its C++ when imported
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy
import torch
from qtorch import FloatingPoint
from qtorch.optim import OptimLP
from qtorch.quant import fixed_point_quantize, float_quantize, quantizer


def nearest(x, man):  # halves away from zero, with exponents of float32
    fraction, exponent = numpy.frexp(numpy.asarray(x, numpy.float64))
    scaled = fraction * 2.0 ** (man + 1)
    return numpy.ldexp(numpy.sign(scaled) * numpy.floor(numpy.abs(scaled) + 0.5), exponent - man - 1)


torch.manual_seed(0)
x = torch.randn(10000)
for exp, man, rounding in ((8, 23, "nearest"), (5, 23, "nearest"), (8, 23, "stochastic"), (8, 22, "nearest")):
    found = float_quantize(x, exp, man, rounding=rounding)
    turned, right = float((found == -x).double().mean()), float((found.double().numpy() == nearest(x, man)).mean())
    print(f"exp={exp}, man={man}, {rounding}: {right:.0%} right, {turned:.0%} with the other sign")
    assert (turned, right) == ((1, 0) if (man, rounding) == (23, "nearest") else (0, 1))
zero = float(float_quantize(torch.zeros(1), 8, 23, rounding="nearest"))
print(f"zero becomes {zero:.2g}")
assert -2.4e-38 < zero < -2.3e-38

halves = torch.tensor([256.5, 257.0, 259.0])  # bfloat16 has steps of 2 here
found = float_quantize(halves, 8, 7, rounding="nearest").tolist()
print(f"halves {halves.tolist()}: {found}, bfloat16 {halves.bfloat16().tolist()}")
assert found == [256, 258, 260] and halves.bfloat16().tolist() == [256, 256, 260]
assert fixed_point_quantize(torch.tensor([0.5, 1.5, 2.5]), 8, 0, rounding="nearest").tolist() == [0, 2, 2]

for man in (22, 23):
    weight = torch.nn.Parameter(torch.ones(1))
    number = FloatingPoint(exp=8, man=man)
    optimizer = OptimLP(
        torch.optim.SGD([weight], 0.1),
        grad_quant=quantizer(forward_number=number, forward_rounding="nearest"),
    )
    for _ in range(10):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
    print(f"10 steps down x^2 from 1, gradients with {man} bits: {float(weight):.2f}")
    assert float(weight) > 6 if man == 23 else 0.1 < float(weight) < 0.12
END
