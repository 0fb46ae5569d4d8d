#!/usr/bin/env bash
# torch 2.15.0, CPU: grid_sample of float16 or bfloat16 takes pixels beyond the 32768th from the image before.
#
# Expected: float32's numbers, but for rounding. In bfloat16, places are coarse, yet they are places of the same image.
# Happens: the place of a pixel in memory, row times width plus column, is counted in 16 bits, as wide as the numbers.
# From 182 x 182 pixels on it becomes negative, and the lower part comes from the channel or image before; for the first
# one, from whatever lies there. Nothing is said. torchvision's rotate, affine and perspective of such tensors do so.
# Seen, for images that have their own number in all pixels, sampled where they are: 181 x 181 pixels all right; of 182
# x 182 1 % are wrong, of 224 x 224 35 %, of 256 x 256 50 %, all equal to the number of the image before. Here all
# images lie in one tensor, so that none reads beyond it.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 torchvision==0.29.2 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from torch.nn.functional import affine_grid, grid_sample
from torchvision.transforms.v2 import functional

for kind in (torch.float16, torch.bfloat16):
    for size, wrong in ((128, 0), (181, 0), (182, 1), (224, 35), (256, 50)):
        numbers = torch.arange(8).reshape(8, 1, 1, 1)
        images = numbers.expand(8, 1, size, size).to(kind, memory_format=torch.contiguous_format)
        here = affine_grid(torch.eye(2, 3).expand(4, 2, 3), (4, 1, size, size), align_corners=False)
        for name, sampled in (
            ("grid_sample", grid_sample(images[4:], here.to(kind), "nearest", "border", align_corners=False)),
            ("float32", grid_sample(images[4:].float(), here, "nearest", "border", align_corners=False)),
            ("affine", functional.affine(images[4:], 0, [0, 0], 1, [0, 0])),
        ):
            off = sampled.float() - numbers[4:]
            share = 100 * (off != 0).float().mean().item()
            print(f"{kind} {size} x {size} {name}: {share:.0f} % from elsewhere, {off.unique().tolist()}")
            if name == "affine":
                assert wrong == 0 or (off == -1).any()
            else:
                assert round(share) == (wrong if name == "grid_sample" else 0)
                assert set(off.unique().tolist()) <= {0, -1}
END
