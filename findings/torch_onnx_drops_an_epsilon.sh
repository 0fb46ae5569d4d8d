#!/usr/bin/env bash
# torch 2.15.0, onnxscript 0.7.2: the ONNX exporter leaves out `+ 1e-8`, so that a division by 0 is back, with its NaN.
#
# Expected: x / (x.abs().amax() + 1e-8) and (x - mean) * rsqrt(variance + 1e-8) are 0 for a picture of one colour, in a
# program as in its file.
# Happens: the exporter calls onnxscript's optimizer, which takes a number away that is added if it is 0 to within 1e-8,
# and a factor or divisor that is 1 to within 1e-5. Nothing is said. It also joins two clamps that do not overlap to one
# whose bounds are crossed: x.clamp(-1, 0).clamp(1, 2) is 0, not 1. optimize=False keeps everything.
# Seen: with 1e-8 and 1e-12 the black picture is NaN from both programs, and with 1e-7 it is 0. x * 1.000009 is x.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 onnx==1.23.2 onnxscript==0.7.2 \
    onnxruntime==1.32.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import onnxruntime
import torch


class Program(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def of_file(function, x, optimize=True):
    """The numbers that ONNX Runtime computes from the file of a program."""
    program = torch.onnx.export(Program(function), (x,), dynamo=True, optimize=optimize, verbose=False)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), options)
    return session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]


def divided(epsilon):
    return lambda x: x / (x.abs().amax((1, 2, 3), keepdim=True) + epsilon)


def normalized(epsilon):
    def function(x):
        centred = x - x.mean((1, 2, 3), keepdim=True)
        return centred * torch.rsqrt(centred.square().mean((1, 2, 3), keepdim=True) + epsilon)

    return function


torch.manual_seed(0)
x = torch.randn(2, 3, 8, 8)
x[1] = 0
for epsilon in (1e-7, 1e-8, 1e-12):
    for function in (divided(epsilon), normalized(epsilon)):
        found, kept, exact = of_file(function, x), of_file(function, x, optimize=False), function(x).numpy()
        print(f"+ {epsilon}: {np.isnan(found[1]).mean():.0%} of the black picture are NaN")
        assert np.allclose(kept, exact, atol=1e-4) and np.allclose(found[0], exact[0], atol=1e-4)
        assert np.isnan(found[1]).all() if epsilon < 1e-7 else (found == kept).all()

ones = torch.ones(1, 1, 2, 2)
assert (ones * 1.000009).min() > 1.000008
scaled, clamped = of_file(lambda x: x * 1.000009, ones), of_file(lambda x: x.clamp(-1, 0).clamp(1, 2), ones)
print("1 * 1.000009 is", scaled[0, 0, 0, 0], "and 1 clamped to [-1, 0], then to [1, 2], is", clamped[0, 0, 0, 0])
assert (scaled == 1).all() and (clamped == 0).all()
END
