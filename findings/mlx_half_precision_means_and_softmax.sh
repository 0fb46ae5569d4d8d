#!/usr/bin/env bash
# MLX 0.32.4, CPU: means of float16 pictures are infinite, and a softmax over 1000 classes in bfloat16 sums up to 3.9.
#
# Expected: sums kept in float32 and rounded once, as NumPy and torch keep them: the mean of twos is 2, the shares of a
# softmax sum up to 1, to within a few roundings.
# Happens: mean divides a sum that is rounded to float16 first, where 65520 is infinite: global average pooling of 224 x
# 224 pixels is inf, BatchNorm, whose running mean stays so, gives NaN, and mse_loss inf. softmax adds its exponentials
# in the type of the input: in bfloat16 the sum stays at 256, in float16 at 2048. Nothing is said. softmax with
# precise=True, and float32, are right.
# Seen, 224 x 224 twos: mean inf in float16, 2 in bfloat16; BatchNorm all NaN, running mean inf; squares of 30 in a loss
# inf. Sum of softmax over equal scores: bfloat16 1000 classes 3.91, 4096 16; float16 4096 2; with precise=True 1.00,
# 1.00, 1.00. NumPy and torch: 2 and 1.00.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python "mlx[cpu]==0.32.4" torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import mlx.core as mx
import numpy as np
import torch
from mlx import nn

mx.set_default_device(mx.cpu)


def numbers(array):
    return np.asarray(array.astype(mx.float32))


for kind, wanted in ((mx.float16, np.inf), (mx.bfloat16, 2), (mx.float32, 2)):
    mean = numbers(mx.mean(mx.full((1, 224, 224, 3), 2, dtype=kind), axis=(1, 2)))
    print(f"found mean in {kind}:", *mean[0])
    assert (mean == wanted).all()
assert np.full(224 * 224, 2, np.float16).mean() == 2 == torch.full((224 * 224,), 2, dtype=torch.float16).mean()
norm = nn.BatchNorm(3)
norm.set_dtype(mx.float16)
picture = mx.random.normal((1, 224, 224, 3), key=mx.random.key(0)) + 2
normed, running = numbers(norm(picture.astype(mx.float16))), numbers(norm.running_mean)
print(f"found BatchNorm in float16: {np.isnan(normed).mean():.0%} NaN, running mean", *running)
assert np.isnan(normed).all() and np.isinf(running).all()
assert not np.isnan(numbers(nn.BatchNorm(3)(picture))).any()
loss = nn.losses.mse_loss(mx.full((1000,), 30, dtype=mx.float16), mx.zeros((1000,), dtype=mx.float16))
print("found mse_loss of 30:", loss.item())
assert np.isinf(loss.item())
for kind, classes, wanted in ((mx.bfloat16, 1000, 3.91), (mx.bfloat16, 4096, 16), (mx.float16, 4096, 2)):
    scores = mx.zeros((classes,), dtype=kind)
    plain, precise = (numbers(mx.softmax(scores, precise=flag)).sum() for flag in (False, True))
    other = torch.softmax(torch.zeros(classes, dtype=getattr(torch, str(kind).split(".")[-1])), 0).float().sum()
    print(f"found softmax in {kind}, {classes} classes: {plain:.2f}, precise {precise:.2f}, torch {other:.2f}")
    assert abs(plain - wanted) < 0.01 and abs(precise - 1) < 0.01 and abs(other - 1) < 0.01
END
