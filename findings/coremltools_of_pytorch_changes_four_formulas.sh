#!/usr/bin/env bash
# coremltools 9.0: RMSNorm, var, std and softplus of PyTorch get other formulas, and antialias is dropped.
#
# Expected: the converter takes over eps, correction, threshold and antialias, or refuses, as it does for alpha of add.
# Happens: rms_norm divides by the largest number first, and adds eps to what is left, so eps grows with the square of
# the input, and a row of zeros, as after ReLU, is 0 / 0: nan. var and std of a whole tensor divide by n, not n - 1, and
# correction=2 counts as 1. softplus drops its threshold. scatter_add of constants replaces in place of adding.
# interpolate with antialias=True becomes one without. Nothing is said.
# Seen, by the converter's own folding of constants, torch and coremltools: rms_norm of 1, 2, 3, 4 with eps 1: 0.343 and
# 0.206 as first number; of zeros 0 and nan; var of 1, 2, 3, 4: 1.667, 1.25; over an axis with correction=2: 2.5, 1.667;
# softplus of 0.5 with threshold 0.2: 0.5, 0.974; 1 added to 2: 3, 1. The graph of an image has the same operators.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python coremltools==9.0 torch==2.15.0 torchvision==0.29.2 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import coremltools
import numpy
import torch
from torch.nn import functional


class Network(torch.nn.Module):
    def __init__(self, formula, numbers):
        super().__init__()
        self.formula = formula
        self.register_buffer("numbers", numbers)

    def forward(self, x):
        return x.sum() * 0 + self.formula(self.numbers) if self.numbers is not None else self.formula(x)


def graph(formula, x, numbers=None):
    return coremltools.convert(
        torch.jit.trace(Network(formula, numbers).eval(), x),
        inputs=[coremltools.TensorType(shape=x.shape, name="x")],
        convert_to="milinternal",
        compute_precision=coremltools.precision.FLOAT32,
    ).functions["main"]


row = torch.tensor([[1.0, 2, 3, 4]])
for name, formula, numbers, wanted in (
    ("softmax", lambda x: x.softmax(1), row, (0.032, 0.032)),
    ("rms_norm, eps 1", lambda x: functional.rms_norm(x, (4,), eps=1.0), row, (0.343, 0.206)),
    ("rms_norm of zeros", lambda x: functional.rms_norm(x, (4,), eps=1.0), 0 * row, (0, numpy.nan)),
    ("var", lambda x: x.var(), row, (1.667, 1.25)),
    ("std", lambda x: x.std(), row, (1.291, 1.118)),
    ("var, correction 2", lambda x: x.var(1, correction=2), row, (2.5, 1.667)),
    ("softplus", lambda x: functional.softplus(x, 1, 0.2), row / 2, (0.5, 0.974)),
    ("scatter_add", lambda x: x.scatter_add(1, torch.tensor([[0]]), row[:, :1]), row + 1, (3, 1)),
):
    exact = formula(numbers).numpy()
    (last,) = (step for step in graph(formula, torch.zeros(2), numbers).operations if step.op_type == "add")
    found = next(value.val for value in last.inputs.values() if value.val is not None)
    pair = float(numpy.ravel(exact)[0]), float(numpy.ravel(found)[0])
    print(f"{name}: torch {pair[0]:.3f}, coremltools {pair[1]:.3f}")
    numpy.testing.assert_allclose(pair, wanted, atol=0.001)
for antialias in (False, True):
    shrink = lambda x: functional.interpolate(x, (3, 3), mode="bilinear", antialias=antialias)  # noqa: B023, E731
    steps = [step for step in graph(shrink, torch.zeros(1, 1, 6, 6)).operations if step.op_type != "const"]
    print("antialias", antialias, *(step.op_type for step in steps))
    assert [step.op_type for step in steps] == ["upsample_bilinear"]
END
