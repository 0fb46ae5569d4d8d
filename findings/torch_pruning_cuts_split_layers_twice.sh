#!/usr/bin/env bash
# torch-pruning 1.6.1: of a convolution whose output is split in two, three quarters of the filters go instead of half.
#
# Expected: pruning_ratio=0.5 leaves half of the filters of each layer, as the readme says, and does so without a split.
# Happens: filter k of a split output goes together with its partner in the other half. But as many members of such
# pairs are picked one by one as filters shall go, and each takes its partner along. So up to twice as many go. Gated
# units, blocks of YOLO and of ShuffleNet have such layers. The network runs on, with far fewer weights. Nothing is
# said.
# Seen, filters left of 256: with 0.25 192 without a split, but 142 with chunk, split or slices; with 0.5 128 without,
# 54 with each of them.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch-pruning==1.6.1 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
import torch_pruning

FILTERS = 256


class Network(torch.nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.mode = mode
        self.first = torch.nn.Conv2d(3, FILTERS, 1)
        self.last = torch.nn.Conv2d(FILTERS if mode == "whole" else FILTERS // 2, 3, 1)

    def forward(self, pictures):
        found = self.first(pictures)
        if self.mode == "whole":
            return self.last(found.relu())
        half = found.shape[1] // 2
        if self.mode == "chunk":
            values, gates = found.chunk(2, 1)
        elif self.mode == "split":
            values, gates = found.split(half, 1)
        else:
            values, gates = found[:, :half], found[:, half:]
        return self.last(values * gates.sigmoid())


for mode in ("whole", "chunk", "split", "slices"):
    for ratio in (0.25, 0.5):
        torch.manual_seed(0)
        network, pictures = Network(mode).eval(), torch.randn(1, 3, 4, 4)
        torch_pruning.pruner.BasePruner(
            network,
            pictures,
            importance=torch_pruning.importance.MagnitudeImportance(p=2),
            pruning_ratio=ratio,
            ignored_layers=[network.last],
        ).step()
        left = network.first.out_channels
        assert network(pictures).shape == (1, 3, 4, 4) and left == network.first.weight.shape[0]
        print(f"{mode}, pruning_ratio={ratio}: {left} of {FILTERS} filters left")
        if mode == "whole":
            assert left == FILTERS * (1 - ratio)
        else:
            assert left < FILTERS * (1 - ratio) * 0.85
END
