#!/usr/bin/env bash
# model-compression-toolkit 2.6.1: batch norms join three kinds of convolutions with wrong numbers.
#
# Expected: pytorch_post_training_quantization folds a batch norm only where the network of floats stays the same, so 8
# bits are left with an error of 1 to 2 %, as for plain, grouped and depthwise convolutions.
# Happens: behind a transposed convolution with groups, the filters get factors of other channels, unless a group has
# one input. In front of a layer of 1 x 1 pixels, the shift goes into the bias, though padding, and the places that the
# stride of a transposed layer leaves empty, never saw the batch norm. 3 x 3 pixels are left apart. Nothing is said.
# (weights_bias_correction, on unless told otherwise, raises an error for transposed convolutions with such groups.)
# Seen, as errors by the standard deviation: groups 0.2, padding 0.3, stride 1; others at most 0.03. So is each with an
# affine layer of torch's own operators in place of the batch norm.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python model-compression-toolkit==2.6.1 torch==2.15.0 \
    torchvision==0.29.2 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import copy

import model_compression_toolkit as mct
import torch
from torch.nn import BatchNorm2d, Conv2d, ConvTranspose2d


CONFIG = mct.core.CoreConfig(mct.core.QuantizationConfig(weights_bias_correction=False))


class Affine(torch.nn.Module):  # what a batch norm does in eval mode
    def __init__(self, norm):
        super().__init__()
        factor = norm.weight / (norm.running_var + norm.eps).sqrt()
        self.factor = torch.nn.Parameter(factor.detach().view(-1, 1, 1))
        self.shift = torch.nn.Parameter((norm.bias - norm.running_mean * factor).detach().view(-1, 1, 1))

    def forward(self, x):
        return x * self.factor + self.shift


def norm(channels):
    layer = BatchNorm2d(channels)
    with torch.no_grad():
        for values in (layer.weight, layer.running_var):
            values.uniform_(0.2, 4)
        for values in (layer.bias, layer.running_mean):
            values.normal_()
    return layer


def quantized(network, x):
    with torch.no_grad():
        result, _ = mct.ptq.pytorch_post_training_quantization(
            copy.deepcopy(network), lambda: iter([[x]]), core_config=CONFIG
        )
        return result.eval().cpu()(x)


torch.manual_seed(0)
x = torch.randn(16, 4, 10, 10)
layers = {
    "behind a convolution": [Conv2d(4, 8, 3), norm(8)],
    "behind a convolution in 2 groups": [Conv2d(4, 8, 3, groups=2), norm(8)],
    "behind a transposed one": [ConvTranspose2d(4, 8, 3), norm(8)],
    "behind a transposed one in 4 groups of one input": [ConvTranspose2d(4, 8, 3, groups=4), norm(8)],
    "behind a transposed one in 2 groups": [ConvTranspose2d(4, 4, 3, groups=2), norm(4)],
    "before 3 x 3 with padding": [norm(4), Conv2d(4, 8, 3, padding=1)],
    "before 1 x 1": [norm(4), Conv2d(4, 8, 1)],
    "before 1 x 1 with padding": [norm(4), Conv2d(4, 8, 1, padding=1)],
    "before transposed 1 x 1": [norm(4), ConvTranspose2d(4, 8, 1)],
    "before transposed 1 x 1 with stride": [norm(4), ConvTranspose2d(4, 8, 1, stride=2)],
}
wrong = list(layers)[4], list(layers)[7], list(layers)[9]
for name, pair in layers.items():
    network = torch.nn.Sequential(*pair).eval()
    apart = torch.nn.Sequential(*(Affine(one) if isinstance(one, BatchNorm2d) else one for one in pair)).eval()
    with torch.no_grad():
        exact = copy.deepcopy(network).double()(x.double())
        assert torch.allclose(apart(x).double(), exact, atol=1e-4)
    errors = [float((quantized(one, x) - exact).square().mean().sqrt() / exact.std()) for one in (network, apart)]
    print(f"{name}: error {errors[0]:.2g}, with an affine layer {errors[1]:.2g}", flush=True)
    assert errors[1] < 0.04
    assert errors[0] > 0.1 if name in wrong else errors[0] < 0.04
END
