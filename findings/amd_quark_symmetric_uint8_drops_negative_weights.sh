#!/usr/bin/env bash
# amd-quark 0.13: with Uint8PerChannelSpec as it comes, every negative weight becomes 0.
#
# Expected: codes 0 to 255 around a zero point near 128, the error of 8 bits, as with the specs of uint8 for a whole
# tensor and for groups.
# Happens: unlike those, this spec is symmetric unless told otherwise, and symmetric here means zero point 0, also for
# types without a sign. All weights below zero are cut off. Nothing is said. Symmetric specs of int8 are right.
# Seen, for normal weights of a linear layer and of a convolution, as error by norm: Uint8PerChannelSpec(ch_axis=0) 71 %
# and 72 %, no weight below 0; with symmetric=False, Uint8PerTensorSpec, Uint8PerGroupSpec and symmetric
# Int8PerChannelSpec 0.4 to 0.8 %.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python amd-quark==0.13 torch==2.12.1 torchvision==0.27.1 numpy==2.4.6 \
    onnxruntime==1.25.1 transformers==5.24.0
TORCH_EXTENSIONS_DIR="$PWD" environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from quark.torch import ModelQuantizer
from quark.torch.quantization import (
    Int8PerChannelSpec,
    QConfig,
    QLayerConfig,
    Uint8PerChannelSpec,
    Uint8PerGroupSpec,
    Uint8PerTensorSpec,
)

torch.manual_seed(0)
inputs = torch.eye(64)
specs = {
    "Uint8PerChannelSpec": Uint8PerChannelSpec(ch_axis=0),
    "Uint8PerChannelSpec, symmetric=False": Uint8PerChannelSpec(ch_axis=0, symmetric=False),
    "Uint8PerTensorSpec": Uint8PerTensorSpec(),
    "Uint8PerGroupSpec": Uint8PerGroupSpec(ch_axis=1, group_size=16),
    "Int8PerChannelSpec, symmetric=True": Int8PerChannelSpec(ch_axis=0, symmetric=True),
}
for name, spec in specs.items():
    for kind in ("linear", "convolution"):
        layer = torch.nn.Linear(64, 16, bias=False) if kind == "linear" else torch.nn.Conv2d(64, 16, 1, bias=False)
        torch.nn.init.normal_(layer.weight, std=0.1)
        weight = layer.weight.detach().clone().reshape(16, 64)
        x = inputs if kind == "linear" else inputs.reshape(64, 64, 1, 1)
        config = QConfig(global_quant_config=QLayerConfig(weight=spec.to_quantization_spec()))
        quantizer = ModelQuantizer(config)
        network = quantizer.freeze(quantizer.quantize_model(torch.nn.Sequential(layer), [x]))
        found = network(x).detach().reshape(64, 16).T
        percent = float(100 * (found - weight).norm() / weight.norm())
        print(f"found {name}, {kind}: error {percent:.1f} %, smallest weight {weight.min():.2f} is {found.min():.2f}")
        dropped = name == "Uint8PerChannelSpec"
        assert (percent > 60 and found.min() == 0) if dropped else (percent < 1 and found.min() < -0.2)
END
