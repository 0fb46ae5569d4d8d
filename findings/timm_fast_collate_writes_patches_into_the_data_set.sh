#!/usr/bin/env bash
# timm 1.0.31: FastCollateMixup writes CutMix patches into the pictures of the data set.
#
# Expected: collating makes a batch, and leaves the pictures as they are; mode "elem" copies them first.
# Happens: modes "pair" and "half" write the patch into the array or tensor that the data set gave. One that keeps its
# pictures in memory, as a table of uint8, gives pictures with patches from then on, with its own label alone; epoch by
# epoch more, and to a validation of the same arrays. Workers that persist keep them too. Nothing is said.
# Mixup, for tensors, makes uint8 labels of uint8 pictures: in "pair" and "elem" each is the partner's alone.
# Seen, 64 pictures that have their own number in all pixels, 20 epochs, wrong pixels: "batch", "elem" 0 %, "half" and
# "pair" more than 30 %; of labels of uint8 from Mixup, all are the partner's.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python timm==1.0.31 torch==2.15.0 torchvision==0.29.2 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import numpy
import torch
from timm.data import FastCollateMixup, Mixup

numpy.random.seed(0)
torch.manual_seed(0)
labels = numpy.arange(64)
clean = numpy.broadcast_to(labels[:, None, None, None].astype(numpy.uint8), (64, 3, 32, 32))
for mode in ("batch", "elem", "half", "pair"):
    pictures = clean.copy()
    data = list(zip(pictures, labels.tolist(), strict=True))
    collate = FastCollateMixup(0, 1, prob=0.5, mode=mode, label_smoothing=0, num_classes=64)
    for _ in torch.utils.data.DataLoader(data * 20, 16, shuffle=False, collate_fn=collate):
        pass
    share = 100 * (pictures != clean).mean()
    print(f"{mode}: {share:.0f} % of the data set's pixels are another picture's")
    assert share == 0 if mode in ("batch", "elem") else share > 30
for mode in ("elem", "pair"):
    _, soft = Mixup(1, 0, mode=mode, label_smoothing=0, num_classes=64)(torch.tensor(clean), torch.tensor(labels))
    print(f"Mixup {mode}, labels of uint8:", *soft.argmax(1).tolist()[:3], "... with shares", *soft.unique().tolist())
    assert soft.argmax(1).tolist() == labels[::-1].tolist()
    assert soft.unique().tolist() == [0, 1]
END
