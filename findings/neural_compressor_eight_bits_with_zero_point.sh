#!/usr/bin/env bash
# neural-compressor 3.10: RTN with 8 bits and use_sym=False gives wrong weights, unless a filter is symmetric about 0.
#
# Expected: with a zero point for each filter, 8 bits have an error of about 0.4 %, and at most that of 4 bits.
# Happens: the packed layer keeps code minus zero point in 8 bits with a sign. A weight of 128 steps or more loses 256
# steps, so the largest weights change their sign. A filter from -1 to 1 has none; the less symmetric the ends are, the
# more are wrong. 4 bits are right, and 8 bits with use_sym=True. Nothing is said.
# Seen, as relative errors of filters from -1 to 1, -0.9 to 1, -0.5 to 1, 0 to 1, 3 to 4: 8 bits 0.005 0.577 1.233 1.247
# 1.151; 4 bits 0.066 0.059 0.055 0.035 0.023; 8 bits with use_sym=True 0.004 0.004 0.004 0.004 0.003.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python neural-compressor==3.10 torch==2.15.0 numpy==2.4.6 \
    accelerate==1.15.0 deprecated==1.3.1 prettytable==3.18.0 psutil==7.2.2 py-cpuinfo==9.0.0 pydantic==2.14.4 \
    pyyaml==6.0.4 schema==0.7.8 transformers==5.24.0
CUDA_VISIBLE_DEVICES= environment/bin/python -W ignore - >log 2>&1 <<'END' || { cat log; exit 1; }
import torch
from neural_compressor.torch.quantization import RTNConfig, convert, prepare

torch.set_num_threads(1)
torch.manual_seed(0)
ends = torch.tensor([[-1, 1], [-0.9, 1], [-0.5, 1], [0, 1], [3, 4]])
weight = ends[:, :1] + torch.rand(len(ends), 64) * (ends[:, 1:] - ends[:, :1])
weight[:, :2] = ends
found = {}
for bits, is_symmetric in ((8, False), (4, False), (8, True)):
    model = torch.nn.Sequential(torch.nn.Linear(64, len(ends), bias=False))
    with torch.no_grad():
        model[0].weight.copy_(weight)
    config = RTNConfig(dtype="int", bits=bits, use_sym=is_symmetric, group_size=-1)
    layer = convert(prepare(model, config))
    found[bits, is_symmetric] = (layer(torch.eye(64)).T - weight).norm(dim=1) / weight.norm(dim=1)
    print(f"RESULT {bits} bits, use_sym={is_symmetric}:", *(f"{error:.3f}" for error in found[bits, is_symmetric]))
assert found[8, False][0] < 0.006
assert (found[8, False][1:] > 0.5).all()
assert (found[4, False] < 0.08).all()
assert (found[8, True] < 0.01).all()
END
sed -n 's/^RESULT //p' log
