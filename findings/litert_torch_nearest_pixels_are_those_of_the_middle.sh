#!/usr/bin/env bash
# litert-torch 0.10.0: interpolate(mode="nearest") takes other pixels in the file than in PyTorch.
#
# Expected: PyTorch's rule for "nearest": the pixel at floor(i * old / new), which RESIZE_NEAREST_NEIGHBOR has as well,
# without half_pixel_centers. PyTorch's other mode "nearest-exact" is the one that counts from the middle of pixels.
# Happens: the converter writes the operator with half_pixel_centers. Nothing is said. Made larger by a whole number,
# images are right; with other sizes many pixels are others, and made smaller by a half or a third all of them are: the
# image moves by a pixel, as a mask of another size or a skip connection then does.
# Seen, rows of 12 pixels: to 6 torch 0 2 4 6 8 10, LiteRT 1 3 5 7 9 11; to 4 torch 0 3 6 9, LiteRT 1 4 7 10; to 18 6 of
# 18 pixels differ; to 24 none.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python litert-torch==0.10.0 ai-edge-litert==2.3.0 torch==2.14.1 \
    numpy==2.4.6
environment/bin/python -W ignore - >log 2>&1 <<'END' || { cat log; exit 1; }
import litert_torch
import numpy as np
import torch


class Resize(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, x):
        return torch.nn.functional.interpolate(x, size=(self.size, self.size), mode="nearest")


x = torch.arange(12.0).repeat(1, 1, 12, 1)
wrong = {}
for size in (4, 6, 18, 24):
    exact = Resize(size)(x).numpy()
    found = np.asarray(litert_torch.convert(Resize(size).eval(), (x,))(x))
    assert found.shape == exact.shape
    wrong[size] = int((found != exact)[0, 0, 0].sum())
    rows = [" ".join(str(int(pixel)) for pixel in each[0, 0, 0]) for each in (exact, found)]
    print(f"RESULT 12 to {size}: {wrong[size]} of {size} wrong; torch {rows[0]}, LiteRT {rows[1]}")
    if size < 12:
        assert (found == exact + 1).all()
assert wrong == {4: 4, 6: 6, 18: 6, 24: 0}
END
sed -n 's/^RESULT //p' log
