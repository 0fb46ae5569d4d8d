#!/usr/bin/env bash
# ExecuTorch 1.5.1: XNNPACKQuantizer gives no weight a step below 1/4096, so filters of small weights lose their bits.
#
# Expected: with is_per_channel=True, a filter's step is its largest weight / 127, so that every filter keeps 8 bits.
# Happens: steps are at least 2**-12, for weights and inputs. After batch normalization with a small factor is joined
# with it, or in a layer with small weights, a filter keeps few codes or only zeros. Nothing is said. torchao's observer
# by itself, PerChannelMinMaxObserver, keeps 8 bits.
# Seen, as the largest code of a filter, and the error of its weights in percent, for weights up to 0.2: 127 0.4;
# up to 0.02: 82 0.6; up to 0.002: 8 6.0; up to 0.0001: 0 100.0. By the observer: 127 0.4 for all.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python executorch==1.5.1 torch==2.15.0 torchao==0.18.0
environment/bin/python -W ignore - 2>/dev/null <<'END'
import torch
from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
    XNNPACKQuantizer,
    get_symmetric_quantization_config,
)
from torchao.quantization.pt2e import PerChannelMinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

LARGEST = 0.2, 0.02, 0.002, 0.0001
torch.manual_seed(0)
layer = torch.nn.Conv2d(16, 4, 3, bias=False)
with torch.no_grad():
    for weight, largest in zip(layer.weight, LARGEST, strict=True):
        weight *= largest / weight.abs().max()
images = torch.randn(8, 16, 12, 12)
quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config(is_per_channel=True))
prepared = prepare_pt2e(torch.export.export(layer, (images,)).module(), quantizer)
prepared(images)
buffers = dict(convert_pt2e(prepared).named_buffers())
(codes,) = (value for value in buffers.values() if value.dtype == torch.int8)
(steps,) = (value for value in buffers.values() if value.dtype == torch.float32 and value.shape == (4,))

observer = PerChannelMinMaxObserver(
    ch_axis=0, dtype=torch.int8, quant_min=-127, quant_max=127, qscheme=torch.per_channel_symmetric
)
observer(layer.weight.detach())
usual = observer.calculate_qparams()[0]


def described(steps, codes):
    difference = codes * steps.view(-1, 1, 1, 1) - layer.weight
    errors = difference.flatten(1).norm(dim=1) / layer.weight.flatten(1).norm(dim=1)
    return [(int(code.abs().max()), round(100 * error.item(), 1)) for code, error in zip(codes, errors, strict=True)]


found = described(steps, codes.int())
plain = described(usual, (layer.weight / usual.view(-1, 1, 1, 1)).round())
for largest, *values in zip(LARGEST, found, plain, strict=True):
    print(f"weights up to {largest}: XNNPACKQuantizer {values[0]}, observer {values[1]}")
assert steps[1:].eq(2**-12).all()
assert [code for code, _ in found] == [127, 82, 8, 0]
assert all(code == 127 and error < 1 for code, error in plain)
END
