#!/usr/bin/env bash
# litert-torch 0.10.0: the indices of max_pool2d are all 0 in the file, so that max_unpool2d puts maxima elsewhere.
#
# Expected: return_indices=True gives the place of each maximum, as in PyTorch, or an error, as for adaptive_max_pool2d.
# Networks for segmentation, such as SegNet, put numbers back with them.
# Happens: the maxima are right, and each index is 0. max_unpool2d puts all numbers of a channel on its first pixel.
# Nothing is said.
# Seen, of 8 x 8 random pixels by 2 x 2: 128 maxima, all right, 128 indices, all 0; behind max_unpool2d 120 of 128
# numbers are lost, one for each of the 8 channels stays.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python litert-torch==0.10.0 ai-edge-litert==2.3.0 torch==2.14.1 \
    numpy==2.4.6
environment/bin/python -W ignore - >log 2>&1 <<'END' || { cat log; exit 1; }
import litert_torch
import numpy as np
import torch
from torch.nn.functional import max_pool2d, max_unpool2d


class Maxima(torch.nn.Module):
    def forward(self, x):
        return max_pool2d(x, 2)


class Indices(torch.nn.Module):
    def forward(self, x):
        return max_pool2d(x, 2, return_indices=True)[1]


class Unpool(torch.nn.Module):
    def forward(self, x):
        return max_unpool2d(*max_pool2d(x, 2, return_indices=True), 2)


torch.manual_seed(0)
x = torch.rand(2, 4, 8, 8)
x[:, :, :2, :2] = torch.tensor([[0.1, 0.2], [0.3, 0.9]])
outputs = {}
for network in (Maxima(), Indices(), Unpool()):
    name = type(network).__name__
    outputs[name] = network(x).numpy(), np.asarray(litert_torch.convert(network.eval(), (x,))(x))
    exact, found = outputs[name]
    assert exact.shape == found.shape
    print(f"RESULT {name}: {(exact != found).sum()} of {exact.size} wrong, not 0: torch {(exact != 0).sum()}, "
          f"LiteRT {(found != 0).sum()}")
assert np.array_equal(*outputs["Maxima"])
assert (outputs["Indices"][0] > 0).all() and not outputs["Indices"][1].any()
exact, found = outputs["Unpool"]
assert (exact != 0).sum() == 128 and (found != 0).sum() == 8
END
sed -n 's/^RESULT //p' log
