#!/usr/bin/env bash
# torch 2.15.0: with the engine qnnpack, clamp, hardtanh and ReLU6 of quantized channels_last images scramble the
# pixels.
#
# Expected: the same numbers for each memory format, as relu gives them, and the engines fbgemm, x86 and onednn.
# Happens: for quint8 the kernel clamps the numbers in the order of memory, and hands them out as if they lay in the
# standard order. Shapes and ranges are right, and nothing is said. Images made contiguous are right.
# Seen, 2 x 8 x 9 x 7 numbers: 70 to 73 % of the codes of clamp, hardtanh and ReLU6 are wrong, and equal to the clamped
# memory; with relu, with contiguous images, with qint8 and with fbgemm none.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch

OPERATORS = {
    "clamp": lambda x: x.clamp(-0.5, 0.8),
    "hardtanh": lambda x: torch.nn.functional.hardtanh(x, -0.5, 0.8),
    "relu6": torch.nn.functional.relu6,
    "relu": torch.relu,
}
torch.manual_seed(0)
numbers = torch.randn(2, 8, 9, 7) * 2
for engine, dtype in (("qnnpack", torch.quint8), ("qnnpack", torch.qint8), ("fbgemm", torch.quint8)):
    torch.backends.quantized.engine = engine
    zero = 128 if dtype == torch.quint8 else 0
    x = torch.quantize_per_tensor(numbers, 0.05, zero, dtype)
    channels_last = x.contiguous(memory_format=torch.channels_last)
    memory = torch.quantize_per_tensor(numbers.permute(0, 2, 3, 1).reshape(x.shape), 0.05, zero, dtype)
    assert torch.equal(x.int_repr(), channels_last.int_repr())
    for name, operator in OPERATORS.items():
        exact, found = operator(x).int_repr(), operator(channels_last).int_repr()
        wrong = float((found != exact).float().mean())
        print(f"{engine}, {dtype}, {name}: {wrong:.0%} of the codes of channels_last images wrong")
        low, high = {"relu": (0, 99), "relu6": (0, 6)}.get(name, (-0.5, 0.8))
        assert (operator(x).dequantize() - x.dequantize().clamp(low, high)).abs().max() < 1e-6
        if name != "relu" and (engine, dtype) == ("qnnpack", torch.quint8):
            assert torch.equal(found, operator(memory).int_repr())
            assert wrong > 0.5
        else:
            assert wrong == 0
END
