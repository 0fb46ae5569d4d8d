#!/usr/bin/env bash
# hls4ml 1.3.0: from PyTorch it drops `divisor_override` of AvgPool2d, and `dilation` and `ceil_mode` of pools.
#
# Expected: the C simulation gives PyTorch's numbers, or an error says that an option isn't supported, as it does for
# padding modes and groups of convolutions.
# Happens: AvgPool2d(2, divisor_override=1), which sums 4 numbers, gives means. MaxPool2d(2, 1, dilation=2) takes
# the largest of neighbours, and with ceil_mode=True the last row and column are missing. Nothing is said.
# Seen, largest difference or numbers in place of PyTorch's: AvgPool2d(2) 0.00; divisor 1: 3.62; MaxPool2d(2, 1,
# dilation=2): 72 for 50; ceil_mode: 18 for 32.
# Needs g++.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python hls4ml==1.3.0 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - >log 2>&1 <<'END' || { cat log; exit 1; }
import hls4ml
import numpy as np
import torch
from torch import nn

torch.set_num_threads(1)


def outputs(layer, size):
    """What PyTorch and hls4ml give, with channels last."""
    torch.manual_seed(0)
    image = torch.randn(1, 2, size, size)
    model = nn.Sequential(layer).eval()
    config = hls4ml.utils.config_from_pytorch_model(
        model, (2, size, size), backend="Vitis", default_precision="fixed<32,12>", transpose_outputs=False
    )
    found = hls4ml.converters.convert_from_pytorch_model(
        model, output_dir="project", backend="Vitis", hls_config=config
    )
    found.compile()
    return model(image).permute(0, 2, 3, 1).numpy().ravel(), found.predict(image.numpy()).ravel()


for divisor in (None, 1):
    right, found = outputs(nn.AvgPool2d(2, divisor_override=divisor), 6)
    difference = np.abs(right - found).max()
    print(f"RESULT AvgPool2d, divisor {divisor}: largest difference {difference:.2f}")
    assert np.allclose(found * 4 if divisor else found, right, atol=1e-3)
    assert (difference > 1) == bool(divisor)
for layer, counts in ((nn.MaxPool2d(2, 1, dilation=2), (50, 72)), (nn.MaxPool2d(2, ceil_mode=True), (32, 18))):
    right, found = outputs(layer, 7)
    print(f"RESULT {layer}: {found.size} numbers for {right.size}")
    assert (right.size, found.size) == counts
END
sed -n 's/^RESULT //p' log
