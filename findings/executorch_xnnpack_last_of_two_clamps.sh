#!/usr/bin/env bash
# ExecuTorch 1.5.1: of two activations behind a convolution, XNNPACK's partitioner computes the last one only.
#
# Expected: ReLU, then Hardtanh from -1 to 0.3, gives numbers from 0 to 0.3, as in torch. Clipped activations (PACT) and
# the ends of codes are such pairs.
# Happens: both become the ends of the convolution, and the second pair of ends replaces the first: numbers below 0
# stay. Nothing is said. With clamp in place of Hardtanh the result is right.
# Seen, for a convolution by 1 of -0.5, 0.2, 2: torch 0.0 0.2 0.3, XNNPACK -0.5 0.2 0.3; with clamp 0.0 0.2 0.3
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python executorch==1.5.1 torch==2.15.0
environment/bin/python -W ignore - 2>/dev/null <<'END'
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import to_edge_transform_and_lower
from executorch.runtime import Runtime
from torch import nn


class Clamp(nn.Module):
    def forward(self, x):
        return x.clamp(-1.0, 0.3)


images, outputs = torch.tensor([-0.5, 0.2, 2.0]).view(1, 1, 1, 3), {}
for name, last in (("Hardtanh", nn.Hardtanh(-1.0, 0.3)), ("clamp", Clamp())):
    network = nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), last).eval()
    nn.init.ones_(network[0].weight)
    nn.init.zeros_(network[0].bias)
    lowered = to_edge_transform_and_lower(torch.export.export(network, (images,)), partitioner=[XnnpackPartitioner()])
    content = lowered.to_executorch().buffer
    program = Runtime.get().load_program(content)
    found = program.load_method("forward").execute([images])[0]
    outputs[name] = [[round(number, 4) for number in each.flatten().tolist()] for each in (network(images), found)]
    print(name, "torch", *outputs[name][0], "XNNPACK", *outputs[name][1])
assert outputs["Hardtanh"] == [[0.0, 0.2, 0.3], [-0.5, 0.2, 0.3]]
assert outputs["clamp"] == [[0.0, 0.2, 0.3]] * 2
END
