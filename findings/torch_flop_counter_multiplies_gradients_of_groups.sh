#!/usr/bin/env bash
# torch 2.15.0, torchvision 0.29.2: FlopCounterMode counts the gradient of a grouped filter once for each group.
#
# Expected: backward costs two times the forward, one for the inputs and one for the filters, as it is counted without
# groups, and for the same groups written as convolutions of their own.
# Happens: the filters' gradient is counted as if each filter saw all channels of its input. A depthwise layer of c
# channels counts c + 1 times its forward instead of 2 times. So does a transposed one. Forward is counted rightly.
# Seen: 64 depthwise filters, backward 65 times the forward. MobileNetV2 with 224 x 224 pixels: a training step 20.5
# times its forward and not 3; ResNeXt-50 4.7; ResNet-50 3.0. MobileNetV2 seems to cost half as much to train as
# ResNet-50, and its multiplications are 7 %.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 torchvision==0.29.2 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import mobilenet_v2, resnet50, resnext50_32x4d


def counted(network, x):
    totals = []
    for backward in (False, True):
        with FlopCounterMode(display=False) as counter:
            y = network(x)
            if backward:
                y.sum().backward()
        totals.append(counter.get_total_flops())
    return totals


class Split(torch.nn.Module):  # the same convolution, a layer for each group
    def __init__(self, kind, channels, groups):
        super().__init__()
        width = channels // groups
        self.layers = torch.nn.ModuleList(kind(width, width, 3, bias=False) for _ in range(groups))

    def forward(self, x):
        return torch.cat([layer(part) for layer, part in zip(self.layers, x.chunk(len(self.layers), 1))], 1)


torch.manual_seed(0)
CHANNELS, SIZE = 64, 16
x = torch.randn(1, CHANNELS, SIZE, SIZE, requires_grad=True)
for kind in (torch.nn.Conv2d, torch.nn.ConvTranspose2d):
    for groups in (1, 4, 64):
        layer = kind(CHANNELS, CHANNELS, 3, groups=groups, bias=False)
        split = Split(kind, CHANNELS, groups)
        with torch.no_grad():
            for index, part in enumerate(split.layers):
                part.weight.copy_(layer.weight.chunk(groups, 0)[index])
        gradients = [torch.autograd.grad(one(x).square().sum(), x)[0] for one in (layer, split)]
        assert torch.allclose(*gradients, rtol=1e-4, atol=1e-4)
        places = (SIZE - 2) ** 2 if kind is torch.nn.Conv2d else SIZE**2
        forward, both = counted(layer, x)
        assert forward == 2 * layer.weight.numel() * places
        apart_forward, apart_both = counted(split, x)
        assert apart_forward == forward and apart_both == 3 * forward
        print(f"{kind.__name__}, {groups} groups: backward {both / forward - 1:g} times forward, apart 2 times")
        assert both - forward == (groups + 1) * forward

x = torch.randn(1, 3, 224, 224, requires_grad=True)
steps = {}
for build, low, high in ((mobilenet_v2, 20, 21), (resnext50_32x4d, 4.6, 4.8), (resnet50, 2.99, 3.01)):
    network = build().eval()
    forward, both = counted(network, x)
    steps[build] = both, 3 * forward
    print(f"{build.__name__}: a step is {both / forward:.2f} times the forward")
    assert low < both / forward < high
ratios = [steps[mobilenet_v2][index] / steps[resnet50][index] for index in (0, 1)]
print(f"MobileNetV2 by ResNet-50: {ratios[0]:.2f} as counted, {ratios[1]:.2f} by three times the forward")
assert ratios[0] > 4 * ratios[1]
END
