#!/usr/bin/env bash
# paddlepaddle 3.3.1: pools with ceil_mode and padding have windows without pixels, whose averages are NaN.
#
# Expected: ceil_mode as in PyTorch and ONNX 1.16 on: a window counts only if it begins in the image or its first
# padding, so that each output has at least one pixel, or the extra outputs are 0.
# Happens: the size is rounded up only. The last row and column lie beyond the image. avg_pool2d, whose default excludes
# padding, divides 0 by 0: NaN. max_pool2d gives -3.4e38 there. Codes and all averages behind them are lost. Nothing
# is said.
# Seen, for 5 x 5 pixels, kernel 2, stride 2, padding 1: 4 x 4 outputs instead of 3 x 3; 7 are NaN, or -3.4028e38 for
# max_pool2d, or 0 with exclusive=False. The other 9 are right. Without ceil_mode: 3 x 3, all right.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python paddlepaddle==3.3.1 setuptools==84.2.1 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy as np
import paddle
from paddle.nn.functional import avg_pool2d, max_pool2d

image = np.random.default_rng(0).normal(size=(5, 5)).astype(np.float32)
given = paddle.to_tensor(image[None, None])


def pooled(function):
    corners = range(-1, 4, 2)
    clip = [[image[max(i, 0) : i + 2, max(j, 0) : j + 2].astype(np.float64) for j in corners] for i in corners]
    return np.array([[function(window) for window in row] for row in clip])


for name, pool, options, reference, extra in (
    ("average", avg_pool2d, {}, np.mean, np.nan),
    ("average of padding too", avg_pool2d, {"exclusive": False}, lambda window: window.sum() / 4, 0),
    ("largest", max_pool2d, {}, np.max, np.finfo(np.float32).min),
):
    plain, found = (pool(given, 2, 2, 1, ceil_mode=mode, **options).numpy()[0, 0] for mode in (False, True))
    print(f"{name}: {plain.shape}, with ceil_mode {found.shape}, its last column", *found[:, -1])
    assert plain.shape == (3, 3) and found.shape == (4, 4)
    assert np.allclose(plain, pooled(reference), atol=1e-6)
    assert np.allclose(found[:3, :3], pooled(reference), atol=1e-6)
    assert np.array_equal(np.append(found[3], found[:3, 3]), np.full(7, extra, np.float32), equal_nan=True)
END
