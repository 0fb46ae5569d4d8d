#!/usr/bin/env bash
# torch 2.15.0: int32 codes that are too large, as of the biases of small filters, become the most negative one on x86.
#
# Biases have 32 bits and the step of input times weight, which is tiny for a small filter.
# Expected: a bias beyond the largest code saturates there, as a negative one saturates at the smallest, and as
# torch.quantize_per_tensor and torch.quantize_per_channel have it. Its sign stays.
# Happens: quantized_decomposed.quantize_per_tensor and quantize_per_channel, the operators of PT2E programs, clamp in
# float32, where the largest code, 2**31 - 1, is 2**31; that wraps to -2**31. So a large positive bias becomes
# negative and switches its channel off. Nothing is said.
# Seen, for 100, 200, 300 and -300 and a step of 1e-7: torch's 100 200 214.7 -214.7; both of PT2E 100 200 -214.7 -214.7.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
[ "$(uname -m)" = x86_64 ] || { echo "needs x86-64"; exit 1; }
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
import torch.ao.quantization.fx._decomposed  # noqa: F401, registers quantized_decomposed

operators = torch.ops.quantized_decomposed
biases, step = torch.tensor([100.0, 200, 300, -300]), 1e-7
steps, zeros = torch.full((4,), step), torch.zeros(4, dtype=torch.int32)
ends = -(2**31), 2**31 - 1
codes = {
    "torch.quantize_per_tensor": torch.quantize_per_tensor(biases, step, 0, torch.qint32).int_repr(),
    "torch.quantize_per_channel": torch.quantize_per_channel(biases, steps, zeros, 0, torch.qint32).int_repr(),
    "PT2E, per tensor": operators.quantize_per_tensor(biases, step, 0, *ends, torch.int32),
    "PT2E, per channel": operators.quantize_per_channel(biases, steps, zeros, 0, *ends, torch.int32),
}
found = {name: [round(code * step, 1) for code in tensor.tolist()] for name, tensor in codes.items()}
for name, numbers in found.items():
    print(f"{name}:", *numbers)
for name, numbers in found.items():
    assert numbers == [100, 200, -214.7 if "PT2E" in name else 214.7, -214.7]
END
