#!/usr/bin/env bash
# bitorch 0.4.1: layers of DoReFa pad numbers from 0 to 1 with -1, and its gradients are 1 where the paper's are not.
#
# Expected: a layer whose inputs are quantized to 0 to 1 pads with 0, one of these numbers; and of DoReFa's formulas,
# rounding alone passes gradients unchanged: clipped inputs have none, and weights have tanh's.
# Happens: QConv2d pads with -1 whatever its input quantization is, as XNOR kernels for signs do. InputDoReFa and
# WeightDoReFa give their input's gradient as 1 everywhere. A weight of zeros is NaN. Nothing is said.
# Seen: with inputs and weights of 1, a 3 x 3 kernel sums to -1 in the corner of an image, where 4 of its pixels are,
# and not to 4; the gradient of inputs -2 and 2 is 1, not 0, and that of weights 0.5 and 2 is 1, not 0.82 and 0.07.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python bitorch==0.4.1 torch==2.15.0 torchvision==0.29.2 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from bitorch.layers import QConv2d
from bitorch.quantizations import InputDoReFa, WeightDoReFa

ones = torch.ones(1, 1, 3, 3)
layer = QConv2d(
    1, 1, 3, padding=1, bias=False, input_quantization=InputDoReFa(2), weight_quantization=WeightDoReFa(2)
)
with torch.no_grad():
    layer.weight.fill_(1)
sums = layer(ones)[0, 0]
padded = torch.nn.functional.conv2d(ones, ones, padding=1)[0, 0]
print("sums at the corner, an edge, the middle:", *sums[0, :2].tolist(), sums[1, 1].item())
print("padded with 0:", *padded[0, :2].tolist(), padded[1, 1].item())
assert sums[0, 0] == 4 - 5 and sums[0, 1] == 6 - 3 and sums[1, 1] == 9
assert torch.equal(sums, torch.nn.functional.conv2d(torch.nn.functional.pad(ones, [1] * 4, value=-1.0), ones)[0, 0])

x = torch.tensor([-2.0, 0.5, 2.0], requires_grad=True)
for quantizer in (InputDoReFa(2), WeightDoReFa(2)):
    gradient = torch.autograd.grad(quantizer(x).sum(), x)[0]
    print(f"{type(quantizer).__name__}: {quantizer(x).tolist()}, gradients {gradient.tolist()}")
    assert gradient.tolist() == [1, 1, 1]
assert InputDoReFa(2)(x)[[0, 2]].tolist() == [0, 1]
scale = torch.tanh(x).abs().max().detach()
exact = torch.autograd.grad((torch.tanh(x) / scale).sum(), x)[0]
print("gradients of the paper's weights:", *exact.tolist())
assert exact[1] > 10 * exact[2]
zeros = WeightDoReFa(2)(torch.zeros(2))
print("weights of zeros:", *zeros.tolist())
assert zeros.isnan().all()
END
