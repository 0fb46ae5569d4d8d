#!/usr/bin/env bash
# torch 2.15.0: with the engine qnnpack, average pools of quantized images drop count_include_pad and divisor_override.
#
# Expected: the dequantized pool of PyTorch, rounded to codes, for each engine; fbgemm, x86 and onednn give it.
# Happens: for quint8 the kernel always counts the padding, and always divides by the kernel's size. Nothing is said.
# With qint8 both options are kept.
# Seen, an image of ones, kernel 3, padding 1, count_include_pad=False: 0.44 in the corners and 0.69 at the edges, where
# fbgemm has 1; kernel 2, divisor_override=1: 1, where fbgemm has 4.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from torch.nn.functional import avg_pool2d

ones = torch.ones(1, 1, 4, 4)
for engine, dtype in (("qnnpack", torch.quint8), ("qnnpack", torch.qint8), ("fbgemm", torch.quint8)):
    torch.backends.quantized.engine = engine
    x = torch.quantize_per_tensor(ones, 0.0625, 0, dtype)
    inside = avg_pool2d(x, 3, 1, 1, count_include_pad=False).dequantize()[0, 0]
    total = avg_pool2d(x, 2, divisor_override=1).dequantize()[0, 0, 0, 0].item()
    corner, edge = inside[0, :2].tolist()
    print(f"{engine}, {dtype}: corner {corner:.2f}, edge {edge:.2f}, sum of 2 x 2 {total}")
    assert torch.equal(avg_pool2d(ones, 3, 1, 1, count_include_pad=False), ones)
    if engine == "qnnpack" and dtype == torch.quint8:
        assert (corner, edge, total) == (0.4375, 0.6875, 1)
    else:
        assert (corner, edge, total) == (1, 1, 4)
END
