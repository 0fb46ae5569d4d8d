#!/usr/bin/env bash
# torch 2.15.0 (CPU): GroupNorm of channels_last images loses the digits that a large mean takes.
#
# Expected: nearly the same numbers in both memory formats, as of batch norm, instance norm and layer norm. Contiguous
# images are right within 1e-4 whatever their mean is.
# Happens: for channels_last images of few channels the variance is that of a one-pass formula. Where the mean of a
# channel is 100 times its deviation, outputs are off by hundredths; at 1,000 times, by more than 1,000. Nothing is said.
# Seen, 8 groups of one channel of 32 x 32 pixels of deviation 1, largest difference from float64, contiguous and
# channels_last: mean 0 3e-7 and 2e-6, mean 10 2e-6 and 4e-4, mean 100 1e-5 and 0.04, mean 1,000 7e-5 and 1,453.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 numpy==2.4.6
environment/bin/python - 2>errors <<'END' || { cat errors; exit 1; }
import torch
import torch.nn.functional as F

torch.manual_seed(0)
noise = torch.randn(2, 8, 32, 32)


def errors(mean, norm):
    """The largest difference from float64, of contiguous and of channels_last images."""
    images = noise + mean
    exact = norm(images.double())
    formats = torch.contiguous_format, torch.channels_last
    return [float((norm(images.contiguous(memory_format=each)) - exact).abs().max()) for each in formats]


for mean, least in ((0, 0.0), (10, 1e-5), (100, 1e-3), (1000, 1.0)):
    contiguous, last = errors(mean, lambda x: F.group_norm(x, 8))
    print(f"mean {mean}: contiguous {contiguous:.0e}, channels_last {last:.2g}")
    assert contiguous < 1e-3
    assert last > least
for norm in (F.instance_norm, lambda x: F.layer_norm(x, x.shape[1:]), lambda x: F.batch_norm(x, None, None, training=True)):
    assert max(errors(100, norm)) < 1e-3
END
