#!/usr/bin/env bash
# aimet-torch 2.42.0: weights of Conv3d, ConvTranspose1d and ConvTranspose3d have one step for all filters.
#
# Expected: filters have steps of their own, as those of Conv1d, Conv2d, ConvTranspose2d and Linear have with the same
# defaults of QuantizationSimModel; QuantizedConv3d and the two others exist.
# Happens: three kinds get one step from the largest filter. Filters far below it become 0. Nothing is said.
# Seen, for 8 filters whose sizes grow from 1e-4 to 1, as shape of the steps and error of the smallest filter: Conv1d
# (8, 1, 1), Conv2d (8, 1, 1, 1), ConvTranspose2d (1, 8, 1, 1) under 1 %; Conv3d, ConvTranspose1d and ConvTranspose3d
# () 100 %, and 60 % or more for the 4 smallest filters.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python aimet-torch==2.42.0 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import torch
from aimet_torch.quantsim import QuantizationSimModel
from torch import nn

torch.manual_seed(0)
for kind in (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose3d):
    layer = kind(4, 8, 3, bias=False)
    axis = int("Transpose" in kind.__name__)
    shape = [1] * layer.weight.ndim
    shape[axis] = 8
    layer.weight.data *= torch.logspace(-4, 0, 8).view(shape)
    image = torch.randn(2, 4, *[6] * (layer.weight.ndim - 2))
    model = QuantizationSimModel(nn.Sequential(layer).eval(), image, default_param_bw=8)
    model.compute_encodings(lambda network, image=image: network(image))
    quantizer = model.model[0].param_quantizers["weight"]
    dense = layer.weight.detach()
    both = (each.detach().numpy().astype(np.float64) for each in (dense, quantizer(dense)))
    weight, found = (np.moveaxis(each, axis, 0).reshape(8, -1) for each in both)
    errors = np.linalg.norm(found - weight, axis=1) / np.linalg.norm(weight, axis=1)
    print(f"found {kind.__name__}: steps {tuple(quantizer.shape)}, errors of filters", *errors.round(3))
    if kind in (nn.Conv1d, nn.Conv2d, nn.ConvTranspose2d):
        assert max(quantizer.shape) == 8
        assert max(errors) < 0.01
    else:
        assert quantizer.shape == ()
        assert errors[0] == 1
        assert errors[:4].min() > 0.6
END
