#!/usr/bin/env bash
# torchao 0.18.0: weights of 1 bit, torch.int1, are all 0.
#
# Expected: a layer of torch.int1 weights has two values, a step apart, or the type is refused, as it has no symmetric
# codes but 0.
# Happens: a symmetric mapping, the default, takes twice the largest weight for its step, so each weight is at most half
# a step, and halves are rounded to 0. The layer gives 0 for all inputs. Training with fake quantization gives 0, too,
# and a gradient of 0 to the input. The mapping without clipping gives NaN. Nothing is said.
# Seen, as codes and error of the weights: torch.int1 [0] 1.00; torch.int2 [-2, -1, 0, 1] 0.33; largest output of
# torch.int1 0.0, in training 0.0; without clipping nan.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 torchao==0.18.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from torchao.quantization import IntxWeightOnlyConfig, MappingType, quantize_
from torchao.quantization.granularity import PerAxis
from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

FILTERS = PerAxis(0)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 8, bias=False))


x = torch.randn(16, 64)
found = {}
for dtype in (torch.int1, torch.int2):
    model = network()
    weight = model[0].weight.detach().clone()
    quantize_(model, IntxWeightOnlyConfig(weight_dtype=dtype, granularity=FILTERS))
    codes = model[0].weight.qdata.unique().tolist()
    error = ((model[0].weight.dequantize() - weight).norm() / weight.norm()).item()
    trained = network()
    quantize_(trained, QATConfig(weight_config=IntxFakeQuantizeConfig(dtype, granularity=FILTERS), step="prepare"))
    given = x.clone().requires_grad_()
    output = trained(given)
    output.pow(2).sum().backward()
    outputs = model(x).abs().max().item(), output.abs().max().item(), given.grad.abs().max().item()
    found[dtype] = codes, error, *outputs
    print(dtype, codes, f"error {error:.2f}, outputs", *(f"{each:.2f}" for each in outputs))
assert found[torch.int1] == ([0], 1, 0, 0, 0)
assert found[torch.int2][0] == [-2, -1, 0, 1]
assert found[torch.int2][1] < 0.5
assert min(found[torch.int2][2:]) > 0

model = network()
mapping = MappingType.SYMMETRIC_NO_CLIPPING_ERR
quantize_(model, IntxWeightOnlyConfig(weight_dtype=torch.int1, granularity=FILTERS, mapping_type=mapping))
output = model(x)
print("without clipping:", output[0, 0].item())
assert output.isnan().all()
END
