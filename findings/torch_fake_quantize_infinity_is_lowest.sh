#!/usr/bin/env bash
# torch 2.15.0: with a scale for each channel, fake_quantize makes +inf the lowest code; and NaN becomes a code.
#
# Expected: +inf becomes the highest code, as with one scale for the tensor; and NaN becomes the same code everywhere.
# Happens: fake_quantize_per_channel_affine, also with a learned scale, converts x / scale to a 64-bit integer before it
# clips, and from 2**63 up this wraps to the lowest. With the scale 1.2e-7, which observers give to a filter of zeros,
# 1.2e12 is enough. NaN becomes the lowest code in fake_quantize, the highest in quantize_per_tensor and 0 in
# quantize_per_channel. So training that diverges goes on with finite numbers, and exploded weights are negative.
# Seen, as codes for scale 0.1, of -inf 1e3 1e18 inf NaN: fake_quantize of tensors -128 127 127 127 -128, of channels
# -128 127 -128 -128 -128; quantize of tensors -128 127 127 127 127, of channels -128 127 127 127 0.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - <<'END'
import torch

torch.set_num_threads(1)
x, ends = torch.tensor([[-torch.inf, 1e3, 1e18, torch.inf, torch.nan]]), (-128, 127)
zero, float_zero = torch.zeros(1, dtype=torch.int32), torch.zeros(1)


def codes(scale, x):
    scales = torch.tensor([scale])
    of_tensor = torch.fake_quantize_per_tensor_affine(x, scale, 0, *ends)
    of_channels = torch.fake_quantize_per_channel_affine(x, scales, zero, 0, *ends)
    learned = torch._fake_quantize_learnable_per_channel_affine(x, scales, float_zero, 0, *ends, 1.0)
    stored = torch.quantize_per_channel(x, scales, zero, 0, torch.qint8)
    return {
        "fake_quantize of tensors": (of_tensor / scale).round().ravel().tolist(),
        "fake_quantize of channels": (of_channels / scale).round().ravel().tolist(),
        "fake_quantize of channels, learned": (learned / scale).round().ravel().tolist(),
        "quantize of tensors": torch.quantize_per_tensor(x, scale, 0, torch.qint8).int_repr().ravel().tolist(),
        "quantize of channels": stored.int_repr().ravel().tolist(),
    }


found = codes(0.1, x)
for name, of_all in found.items():
    print(name, *of_all)
assert found["fake_quantize of tensors"] == [-128, 127, 127, 127, -128]
assert found["fake_quantize of channels"] == [-128, 127, -128, -128, -128]
assert found["fake_quantize of channels, learned"] == [-128, 127, -128, -128, -128]
assert found["quantize of tensors"] == [-128, 127, 127, 127, 127]
assert found["quantize of channels"] == [-128, 127, 127, 127, 0]
filter_of_zeros = torch.ao.quantization.PerChannelMinMaxObserver(qscheme=torch.per_channel_symmetric, dtype=torch.qint8)
filter_of_zeros(torch.zeros(1, 8))
scale = float(filter_of_zeros.calculate_qparams()[0])
found = codes(scale, torch.tensor([[1.2e12]]))
print(f"1.2e12 with scale {scale:.2g}:", {name: of_all[0] for name, of_all in found.items()})
assert found["fake_quantize of tensors"] == [127]
assert found["fake_quantize of channels"] == [-128]
END
