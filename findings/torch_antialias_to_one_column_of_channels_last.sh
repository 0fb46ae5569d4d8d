#!/usr/bin/env bash
# torch 2.15.0 (CPU): antialiased resizing of channels_last images to one column gives wrong numbers.
#
# Expected: the same numbers in both memory formats, as for every other size and for every other way of resizing.
# Happens: F.interpolate(antialias=True), bilinear or bicubic, to a width of 1 gives other numbers for channels_last
# images, far from the right ones. Nothing is said.
# Seen, for 5 channels of 64 x 64 to 16 x 1, largest difference from float64: channels_last 0.2 and more, contiguous
# 1e-7; both 1e-7 for 16 x 2, 1 x 16 and 1 x 1, without antialias, and by adaptive pooling.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 numpy==2.4.6
environment/bin/python - 2>errors <<'END' || { cat errors; exit 1; }
import torch
import torch.nn.functional as F

torch.manual_seed(0)
images = torch.randn(2, 5, 64, 64)
last = images.contiguous(memory_format=torch.channels_last)


def errors(size, **how):
    """The largest difference from float64, of contiguous and of channels_last images."""
    exact = F.interpolate(images.double(), size=size, **how)
    return [float((F.interpolate(each, size=size, **how) - exact).abs().max()) for each in (images, last)]


for mode in ("bilinear", "bicubic"):
    contiguous, channels_last = errors((16, 1), mode=mode, antialias=True)
    others = [errors(size, mode=mode, antialias=True) for size in ((16, 2), (1, 16), (1, 1))]
    others.append(errors((16, 1), mode=mode))
    print(f"found {mode}: channels_last {channels_last:.2f}, contiguous {contiguous:.0e}, others {max(map(max, others)):.0e}")
    assert channels_last > 0.1
    assert max(contiguous, *map(max, others)) < 1e-5
pooled = F.adaptive_avg_pool2d(last, (16, 1)) - F.adaptive_avg_pool2d(images.double(), (16, 1))
assert pooled.abs().max() < 1e-5
END
