#!/usr/bin/env bash
# albumentations 2.0.8: all workers of a DataLoader augment alike, and alike in each epoch, also without a seed.
#
# Expected: each worker draws other numbers, and other ones in each epoch, as with random, torch and torchvision: a
# DataLoader seeds them in each worker. Without a seed, runs differ.
# Happens: since 2.0 Compose has a generator of its own, made with the data set. Each worker gets a copy of its state,
# and new workers of the next epoch get it again. With 8 workers 8 pictures in a row are augmented alike, and each epoch
# repeats the first. persistent_workers=True helps with the epochs alone. Nothing is said.
# Seen, of 2 epochs of 8 pictures: without workers 16 different draws, with 2 workers 4, with 4 workers 2; with 4
# persistent workers 4.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python \
  albumentations==2.0.8 opencv-python-headless==4.12.0.88 torch==2.15.0 numpy==2.2.6
export NO_ALBUMENTATIONS_UPDATE=1
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import albumentations
import numpy as np
import torch

PICTURE = np.full((8, 8, 3), 128, np.uint8)


class Pictures(torch.utils.data.Dataset):
    def __init__(self):
        self.augment = albumentations.Compose([albumentations.GaussNoise(std_range=(0.2, 0.4), p=1.0)])

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.augment(image=PICTURE)["image"]


for workers, persistent, wanted in ((0, False, 16), (2, False, 4), (4, False, 2), (4, True, 4)):
    loader = torch.utils.data.DataLoader(Pictures(), None, num_workers=workers, persistent_workers=persistent)
    drawn = {each.numpy().tobytes() for _ in range(2) for each in loader}
    print(f"{workers} workers, persistent {persistent}: {len(drawn)} different of 16 pictures")
    assert len(drawn) == wanted
END
