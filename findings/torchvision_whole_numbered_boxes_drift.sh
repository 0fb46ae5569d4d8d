#!/usr/bin/env bash
# torchvision 0.29.2: boxes of whole numbers move and shrink by a pixel each time their format is converted.
#
# Annotations come as whole numbers: torch.tensor of a list of pixels is int64.
# Expected: from CXCYWH to XYXY and back a box is as before, or floats come out where halves are needed.
# Happens: halves are cut off in the type of the box: one of odd width moves left and up by 1, until it stands at
# the border, where it shrinks. elastic converts by itself, so that a displacement of 0 moves a box. resize cuts
# corners down, not to the nearest pixel: by half a pixel on average, and thin boxes become empty. Nothing is said.
# Seen: 5 5 3 3 becomes 4 4 3 3 after one turn, and 1 1 2 2 after six. Resized from 660 to 224, the corners of 2000
# boxes are 0.5 too small on average, and 3.4 % of the boxes have no width or height; as floats all is right.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torch==2.15.0 torchvision==0.29.2 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from torchvision.transforms.v2 import functional
from torchvision.tv_tensors import BoundingBoxes


def boxes(values, form="XYXY", size=16):
    return BoundingBoxes(values, format=form, canvas_size=(size, size))


def turn(box):
    corners = functional.convert_bounding_box_format(box, new_format="XYXY")
    return functional.convert_bounding_box_format(corners, new_format="CXCYWH")


whole = boxes(torch.tensor([[5, 5, 3, 3]]), "CXCYWH")
floats = boxes(torch.tensor([[5.0, 5, 3, 3]]), "CXCYWH")
for number in range(1, 7):
    whole, floats = turn(whole), turn(floats)
    print("turn", number, *whole.flatten().tolist(), "floats", *floats.flatten().tolist())
    assert number > 1 or whole.tolist() == [[4, 4, 3, 3]]
assert whole.tolist() == [[1, 1, 2, 2]] and floats.tolist() == [[5, 5, 3, 3]]
still = functional.elastic(boxes(torch.tensor([[5, 5, 3, 3]]), "CXCYWH"), torch.zeros(1, 16, 16, 2))
print("elastic by 0:", *still.flatten().tolist())
assert still.tolist() == [[4, 4, 3, 3]]

torch.manual_seed(0)
corners = torch.randint(0, 600, (2000, 2))
many = torch.cat([corners, corners + torch.randint(1, 60, (2000, 2))], 1)
resized = functional.resize(boxes(many, size=660), [224, 224])
right = functional.resize(boxes(many.float(), size=660), [224, 224])
bias = float((resized - right).mean())
empty = float((resized[:, 2:] == resized[:, :2]).any(1).float().mean())
print(f"resize: bias {bias:.3f}, empty {empty:.3f}")
assert -0.52 < bias < -0.47 and empty > 0.02 and not (right[:, 2:] == right[:, :2]).any()
END
