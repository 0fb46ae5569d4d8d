#!/usr/bin/env bash
# litert-torch 0.10.0: a product with a matrix that is repeated for a batch and transposed takes it reshaped instead.
#
# Expected: a @ b.repeat(2, 1, 1).transpose(1, 2) as in PyTorch. affine_grid of one transformation that is repeated for
# each image of a batch is such a product.
# Happens: of the 2 x 3 matrix b the product takes its six numbers in order as 3 x 2, not its transpose, so all numbers
# are others, of the right shape. Nothing is said. With a batch of 1, and for a matrix for each image, it is right, and
# so is the repeated matrix by itself.
# Seen, wrong numbers: batch of 1 none; batch of 2 all; the places of affine_grid for 2 images nearly all.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python litert-torch==0.10.0 ai-edge-litert==2.3.0 torch==2.14.1 \
    numpy==2.4.6
environment/bin/python -W ignore - >log 2>&1 <<'END' || { cat log; exit 1; }
import litert_torch
import numpy as np
import torch


class Product(torch.nn.Module):
    def __init__(self, count):
        super().__init__()
        self.count = count

    def forward(self, b):
        return torch.ones(self.count, 5, 3) @ b.repeat(self.count, 1, 1).transpose(1, 2)


class Places(Product):
    def forward(self, b):
        b = b.repeat(self.count, 1, 1)
        return torch.nn.functional.affine_grid(b, [self.count, 4, 3, 3], align_corners=False)


b = torch.tensor([[[0.8, 0.1, 0.2], [-0.1, 0.9, 0.0]]])
found = {}
for kind in (Product, Places):
    for count in (1, 2):
        network = kind(count).eval()
        exact, numbers = network(b).numpy(), np.asarray(litert_torch.convert(network, (b,))(b))
        assert exact.shape == numbers.shape
        wrong = (np.abs(exact - numbers) > 1e-4).mean()
        print(f"RESULT {kind.__name__}, batch of {count}: {wrong:.0%} of the numbers wrong")
        assert wrong == 0 if count == 1 else wrong > 0.9
        found[kind, count] = numbers
reshaped = torch.ones(5, 3) @ b.reshape(3, 2)
assert np.allclose(found[Product, 2], reshaped, atol=1e-5)
END
sed -n 's/^RESULT //p' log
