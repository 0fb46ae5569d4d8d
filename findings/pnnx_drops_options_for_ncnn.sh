#!/usr/bin/env bash
# pnnx 20261020: ncnn files lose options of torch's layers: circular padding, rounding of divisions, decimals, ceil.
#
# Expected: torch's numbers, as the same converter gives them for // and for pools with count_include_pad=False, or an
# error, as ncnn raises it for a layer that it does not have.
# Happens: padding_mode circular pads zeros. div with rounding_mode floor is a plain division, with trunc rounds down,
# remainder has the sign of its first number, round with decimals rounds to whole numbers: what quantizers are written
# with. The last window of an average pool with ceil_mode is divided by all of its places, also those beyond the edge.
# Softplus loses its threshold. Nothing is said.
# Seen, largest difference of ncnn and torch: circular 50, of sums 45 to 90; div floor 0.96, trunc 1.0, of -3.2 to 3.2
# by 0.7; remainder 0.7; round with 1 decimal 0.5; average of ones 0.44 in place of 1; softplus 0.42. // and a pool with
# count_include_pad=False: below 1e-5.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python pnnx==20261020 ncnn==1.0.20261020 torch==2.15.0 numpy==2.4.6
OMP_NUM_THREADS=1 environment/bin/python -W ignore - >output 2>errors <<'END' || { cat output errors; exit 1; }
import ncnn
import numpy as np
import pnnx
import torch
from torch import nn


class Network(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.convolution, self.function = nn.Conv2d(1, 1, 1, bias=False), function
        nn.init.ones_(self.convolution.weight)

    def forward(self, x):
        return self.function(self.convolution(x))


def off(function, x):
    network = (function if isinstance(function, nn.Conv2d) else Network(function)).eval()
    expected = network(x)[0].detach().numpy()
    try:
        pnnx.export(network, "network.pt", x, fp16=False)
    except SyntaxError:  # of the Python file, which is not read here
        pass
    net = ncnn.Net()
    net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False
    net.opt.num_threads = 1
    assert not net.load_param("network.ncnn.param") and not net.load_model("network.ncnn.bin")
    extractor = net.create_extractor()
    extractor.input("in0", ncnn.Mat(x[0].numpy()).clone())
    code, found = extractor.extract("out0")
    found = np.array(found)
    assert code == 0 and found.shape == expected.shape
    return float(abs(found - expected).max()), found


circular = nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular", bias=False)
nn.init.ones_(circular.weight)
ramp = torch.linspace(-3.2, 3.2, 16).reshape(1, 1, 4, 4)
cases = {
    "circular padding": (circular, torch.arange(16.0).reshape(1, 1, 4, 4), 50, 50),
    "div, floor": (lambda x: torch.div(x, 0.7, rounding_mode="floor"), ramp, 0.7, 1),
    "div, trunc": (lambda x: torch.div(x, 0.7, rounding_mode="trunc"), ramp, 0.7, 1),
    "remainder": (lambda x: torch.remainder(x, 0.7), ramp, 0.69, 0.71),
    "round, 1 decimal": (lambda x: torch.round(x, decimals=1), ramp, 0.4, 0.5),
    "average, ceil_mode": (nn.AvgPool2d(3, 2, ceil_mode=True), torch.ones(1, 1, 6, 6), 0.55, 0.56),
    "softplus, threshold": (nn.Softplus(1, 0.5), ramp, 0.3, 0.5),
    "//": (lambda x: x // 0.7, ramp, 0, 1e-5),
    "round": (torch.round, ramp, 0, 1e-5),
    "average, without padding": (
        nn.AvgPool2d(3, 2, ceil_mode=True, count_include_pad=False),
        torch.ones(1, 1, 6, 6),
        0,
        1e-5,
    ),
}
for name, (function, x, least, most) in cases.items():
    difference, found = off(function, x)
    print(f"found {name}: off by {difference:.3f}")
    assert least <= difference <= most + 1e-5
END
grep found output
