#!/usr/bin/env bash
# MindSpore 2.10.0: rows and columns that output_padding adds to a transposed convolution are 0, without its bias.
#
# Expected: output_padding makes the output larger by rows and columns that are computed as all others, so that a
# transposed convolution with stride 2 inverts the sizes of a convolution, and gets PyTorch's weights and numbers.
# Happens: Conv2dTranspose computes the smaller output, adds the bias, and fills the rest with zeros, on the CPU.
# Weights of PyTorch, whose decoders have kernel 3, stride 2, padding 1 and output_padding 1, load without a word, and
# the last row and column of each output are 0.
# Seen, for ones, a bias of 7 and kernels of ones: the last row is 0; by PyTorch it has 8 and more, or, if no kernel
# reaches it, 7. With output_padding 0 all numbers are equal.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python mindspore==2.10.0 torch==2.15.0 numpy==1.26.4
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import mindspore
import numpy as np
import torch

mindspore.set_context(device_target="CPU")


def both(kernel, stride, padding, output_padding):
    options = {"stride": stride, "padding": padding, "output_padding": output_padding}
    exact = torch.nn.ConvTranspose2d(1, 1, kernel, **options)
    torch.nn.init.ones_(exact.weight)
    torch.nn.init.constant_(exact.bias, 7)
    layer = mindspore.nn.Conv2dTranspose(
        1, 1, kernel, pad_mode="pad", has_bias=True, weight_init="ones", bias_init=mindspore.Tensor([7.0]), **options
    )
    ones = np.ones((1, 1, 4, 4), np.float32)
    found = layer(mindspore.Tensor(ones)).asnumpy()[0, 0]
    return found, exact(torch.from_numpy(ones)).detach().numpy()[0, 0]


for kernel, stride, padding, output_padding in ((3, 2, 1, 0), (3, 2, 1, 1), (2, 2, 0, 1), (3, 3, 1, 2), (5, 2, 2, 1)):
    found, exact = both(kernel, stride, padding, output_padding)
    inner = found.shape[0] - output_padding
    print(f"kernel {kernel}, stride {stride}, padding {padding}, output_padding {output_padding}: {found.shape}")
    print("  last row", *found[-1].tolist(), "and by PyTorch", *exact[-1].tolist())
    assert found.shape == exact.shape
    assert (found[:inner, :inner] == exact[:inner, :inner]).all()
    assert (found[inner:] == 0).all() and (found[:, inner:] == 0).all()
    assert (exact >= 7).all()
END
