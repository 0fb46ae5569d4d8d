#!/usr/bin/env bash
# timm 1.0.31: create_loader makes 0 of pictures that a data set gives as floats from 0 to 1.
#
# Expected: a loader passes on what the data set gives, or refuses it. A data set of one's own, with ToTensor in it,
# gives floats.
# Happens: with use_prefetcher=True, which is the default, pictures are collected by fast_collate, which writes tensors
# into bytes: numbers from 0 to 1 lose their decimals, and negative ones wrap around. After that they are normalized as
# if they went to 255. Arrays of floats raise an error, tensors do not; nothing is said. create_loader puts its own
# transform into a data set's `transform`, which one that makes tensors by itself never reads.
# Seen: pictures of 0.7, 0.25 and 0 all become -2.12, the darkest number there is, and one of 1 becomes -2.10. With
# use_prefetcher=False they stay as they are.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python timm==1.0.31 torch==2.15.0 torchvision==0.29.2 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_loader
from timm.data.loader import fast_collate

VALUES = (0.7, 0.25, 0.0, 1.0)


class Pictures(torch.utils.data.Dataset):
    def __len__(self):
        return len(VALUES)

    def __getitem__(self, index):
        return torch.full((3, 8, 8), VALUES[index]), index


def load(use_prefetcher):
    loader = create_loader(
        Pictures(),
        (3, 8, 8),
        batch_size=4,
        use_prefetcher=use_prefetcher,
        num_workers=0,
        device=torch.device("cpu"),
        persistent_workers=False,
    )
    ((pictures, labels),) = loader
    assert labels.tolist() == [0, 1, 2, 3]
    return pictures


for use_prefetcher in (True, False):
    pictures = load(use_prefetcher)
    reds = pictures[:, 0].mean((1, 2))
    print(f"use_prefetcher={use_prefetcher}: {pictures.dtype}, reds", *[round(red, 4) for red in reds.tolist()])
    if not use_prefetcher:
        assert torch.allclose(reds, torch.tensor(VALUES))
        continue
    codes = torch.tensor([0.0, 0.0, 0.0, 1.0])
    assert torch.allclose(reds, (codes / 255 - IMAGENET_DEFAULT_MEAN[0]) / IMAGENET_DEFAULT_STD[0], atol=1e-5)
collated, _ = fast_collate([(torch.tensor([[[-1.5, -1.0, 0.9]]]), 0)])
print("fast_collate of -1.5, -1, 0.9:", collated.dtype, *collated.ravel().tolist())
assert collated.dtype == torch.uint8 and collated.ravel()[2] == 0
END
