#!/usr/bin/env bash
# torch 2.15.0: AveragedModel with `use_buffers=True`, as Lightning has it, leaves zero points where they began.
#
# A FakeQuantize of torch has its scale and its int32 zero point as buffers.
# Expected: an exponential moving average of the model, behind by some hundred steps, quantizes about as the model does;
# integers are copied, or rounded to the nearest.
# Happens: the average of an integer is cut off to an integer at each step. With decay 0.999 a zero point moves up only
# if the model's is 1000 codes ahead, so never for 8 bits, while the scale is averaged. Downwards, each step moves it by
# one. Batch normalization's `num_batches_tracked` stays behind, too. Nothing is said.
# Seen, for inputs from 0..4 that move to -3..1 in 1500 of 3000 steps: model: scale 0.015, zero point 193, -3 becomes
# -2.93; average: scale 0.015, zero point 0, -3 becomes 0. Batches: 3000 and 2001. From -3..1 to 0..4: zero points 0, 0.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - <<'END'
import torch
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.set_num_threads(1)


def trained(begin, end):
    """A model and its average after inputs of width 4, whose smallest moves from one number to another."""
    torch.manual_seed(0)
    quantizer = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8)
    model = torch.nn.Sequential(quantizer, torch.nn.BatchNorm1d(1))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True)
    for step in range(3000):
        low = begin + (end - begin) * min(step / 1500, 1)
        model(torch.rand(64, 1) * 4 + low)
        average.update_parameters(model)
    return model, average.module


def state(model):
    quantizer = model[0]
    quantizer.disable_observer()
    outputs = quantizer(torch.tensor([-3.0, 1.0])).tolist()
    return quantizer.scale.item(), quantizer.zero_point.item(), outputs, model[1].num_batches_tracked.item()


down, average = (state(model) for model in trained(0, -3))
for name, (scale, zero, (low, high), count) in (("model", down), ("average", average)):
    print(f"{name}: scale {scale:.3f}, zero point {zero}, -3 becomes {low:.2f}, 1 becomes {high:.2f}, {count} batches")
assert abs(average[0] - down[0]) < 1e-3
assert down[1] > 185 and average[1] == 0
assert down[2][0] < -2.8 and average[2][0] == 0
assert down[3] == 3000 and average[3] <= 3000 - 999

up, average = (state(model) for model in trained(-3, 0))
print("the other way: zero point of the model", up[1], "and of the average", average[1])
assert up[1] == average[1] == 0
END
