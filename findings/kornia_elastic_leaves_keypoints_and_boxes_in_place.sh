#!/usr/bin/env bash
# kornia 0.9.0: RandomElasticTransform moves pictures and masks, but not their keypoints and boxes.
#
# Expected: AugmentationSequential moves all that it is given, as its other geometric augmentations do; or an error, as
# RandomThinPlateSpline and RandomFisheye raise it for keypoints.
# Happens: keypoints and boxes come back as they went in. A comment in the source says that boxes may not be affected
# much; the documentation lists the augmentation among the geometric ones. Nothing is said.
# Seen, for a bright square of 24 x 24 pixels: its mask's center moves by up to 5 pixels, its edges by up to 7, and the
# keypoint in the center and the box by 0; torchvision's ElasticTransform moves all three.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python kornia==0.9.0 torch==2.15.0 torchvision==0.29.2 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from kornia.augmentation import AugmentationSequential, RandomAffine, RandomElasticTransform
from torchvision import tv_tensors
from torchvision.transforms import v2

SIZE = 64
picture = torch.zeros(1, 1, SIZE, SIZE)
picture[..., 20:44, 20:44] = 1
center, box = torch.tensor([[[31.5, 31.5]]]), torch.tensor([[[20.0, 20.0, 43.0, 43.0]]])


def kornia_of(augmentation):
    every = AugmentationSequential(augmentation, data_keys=["input", "mask", "keypoints", "bbox_xyxy"])
    _, mask, point, corners = every(picture.clone(), picture.clone(), center.clone(), box.clone())
    return mask[0, 0], point[0, 0], corners[0, 0]


def torchvision_of():
    square = {"format": "XYXY", "canvas_size": (SIZE, SIZE)}
    mask, point, corners = v2.ElasticTransform(alpha=300.0, sigma=12.0)(
        tv_tensors.Mask(picture[0]),
        tv_tensors.KeyPoints(center[0], canvas_size=(SIZE, SIZE)),
        tv_tensors.BoundingBoxes(box[0], **square),
    )
    return mask[0], point[0], corners[0]


elastic = RandomElasticTransform(kernel_size=(63, 63), sigma=(16.0, 16.0), alpha=(6.0, 6.0), p=1.0)
affine = RandomAffine(0.0, translate=(0.1, 0.1), p=1.0)
for name, draw, is_left in (
    ("kornia elastic", lambda: kornia_of(elastic), True),
    ("kornia affine", lambda: kornia_of(affine), False),
    ("torchvision elastic", torchvision_of, False),
):
    torch.manual_seed(0)
    moved = []
    for _ in range(20):
        mask, point, corners = draw()
        middle = torch.nonzero(mask > 0.5).float().mean(dim=0).flip(0)
        moved.append([(middle - 31.5).norm(), (point - center[0, 0]).norm(), (corners - box[0, 0]).abs().max()])
    mean = torch.tensor(moved).mean(dim=0).tolist()
    print(name, "moved on average by pixels: mask {:.2f}, keypoint {:.2f}, box {:.2f}".format(*mean))
    assert mean[0] > 0.5
    assert (mean[1:] == [0, 0]) == is_left
END
