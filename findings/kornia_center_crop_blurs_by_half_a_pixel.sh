#!/usr/bin/env bash
# kornia 0.9.0: center_crop of even pictures to an odd size (or the other way) gives means of pixels, not pixels.
#
# Expected: cropping cuts pixels out; torchvision, and kornia's own layer CenterCrop, start at a whole pixel.
# Happens: kornia.geometry.center_crop warps the picture to a box that starts at half a pixel, linearly, so each number
# is the mean of 2 x 2 pixels, or of 2 along one axis. Nothing is said. Where both sizes are even, or both odd, it cuts.
# Seen, 32 x 32 to 21 x 21 pixels of 256 grey values: all equal to the means of 2 x 2, the standard deviation is 0.14
# where it was 0.29, and 256 grey values became over 600. A mask of labels 0 and 8 has labels 2, 4 and 6.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python kornia==0.9.0 torch==2.15.0 torchvision==0.29.2 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from kornia.augmentation import CenterCrop
from kornia.geometry.transform import center_crop
from torchvision.transforms.v2 import functional

torch.manual_seed(0)
pictures = torch.randint(0, 256, (4, 1, 32, 32)) / 255
means = torch.nn.functional.avg_pool2d(pictures, 2, 1)[:, :, 5:26, 5:26]
for size in (20, 21):
    found, cut, layer = center_crop(pictures, (size, size)), functional.center_crop(pictures, size), CenterCrop(size)
    values = len((found * 1e5).round().unique())
    print(f"to {size} x {size}: deviation {found.std():.3f}, torchvision {cut.std():.3f}; {values} values")
    assert set(layer(pictures).unique().tolist()) <= set(pictures.unique().tolist())
    if size == 20:
        assert torch.allclose(found, cut, atol=1e-5)
    else:
        assert torch.allclose(found, means, atol=1e-5) and found.std() < 0.16 < 0.28 < cut.std() and values > 600

labels = center_crop((pictures > 0.5) * 8.0, (21, 21)).round().unique().tolist()
print("labels 0 and 8 became", *labels)
assert labels == [0, 2, 4, 6, 8]
END
