#!/usr/bin/env bash
# torchao 0.18.0: PARQ's QuantOptimizer with a step for each filter does not quantize convolutions of channels_last.
#
# Expected: after each step weights have 2 ** quant_bits values, whatever the order of the numbers in memory; pictures
# are mostly trained in channels_last, as it is faster.
# Happens: with quant_per_channel=True a weight is flattened, which copies one of channels_last, and the copy is
# quantized. The weights of the network stay as float as they were. With one step for all filters all is well.
# Nothing is said.
# Seen, as values in a filter of 72 weights after 5 steps with 2 bits: contiguous 4, channels_last 72; with one step for
# all filters 4 and 4.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 torchao==0.18.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from torchao.prototype.parq.optim import ProxHardQuant, QuantOptimizer
from torchao.prototype.parq.quant import LSBQuantizer, UnifQuantizer


def values(quantizer, memory_format, each_filter):
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(8, 4, 3).to(memory_format=memory_format)
    groups = [{"params": [layer.weight], "quant_bits": 2}, {"params": [layer.bias]}]
    sgd = torch.optim.SGD(groups, lr=0.01)
    optimizer = QuantOptimizer(sgd, quantizer, ProxHardQuant(), quant_per_channel=each_filter)
    for _ in range(5):
        optimizer.zero_grad()
        layer(torch.randn(2, 8, 9, 9)).square().mean().backward()
        optimizer.step()
    return {len(each.unique()) for each in layer.weight.detach()}


for quantizer in (UnifQuantizer(), LSBQuantizer()):
    for each_filter, wanted in ((True, ({4}, {72})), (False, ({4}, {4}))):
        formats = torch.contiguous_format, torch.channels_last
        found = tuple(values(quantizer, each, each_filter) for each in formats)
        print(type(quantizer).__name__, f"each_filter={each_filter}: values of contiguous, channels_last:", *found)
        assert found == wanted
END
