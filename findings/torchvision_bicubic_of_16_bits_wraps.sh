#!/usr/bin/env bash
# torchvision 0.29.2: bicubic resizing of uint16, int16 and int8 pictures wraps around at edges.
#
# Expected: what lies above the largest or below the smallest number becomes that number, as for uint8.
# Happens: bicubic weights overshoot beside an edge. The float result is cast back without a limit: black pixels beside
# white become nearly white, white ones nearly black, a line of the wrong sign in int16. resize, Resize and
# RandomResizedCrop do it, with antialias and without. Nothing is said. Bilinear is right, and so is a picture that
# leaves enough room at both ends.
# Seen, a step from 0 to the largest number, 8 to 16 pixels, those beside the edge: uint8 0 0 0 52 203 255 255 255;
# uint16 0 64001 60929 13311 52223 4606 1534 65535, 4 of 16 wrong by up to 64001; int16 26111 -30465 -32001 32767 and
# int8 101 -120 -126 127, 2 of 16 wrong.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python torchvision==0.29.2 torch==2.15.0 numpy==2.4.6
environment/bin/python -W ignore - 2>errors <<'END' || { cat errors; exit 1; }
import torch
from torchvision import tv_tensors
from torchvision.transforms import v2

bicubic = v2.InterpolationMode.BICUBIC
step = torch.zeros(1, 8, 8, dtype=torch.float64)
step[..., 4:] = 1
for kind in (torch.uint8, torch.int8, torch.uint16, torch.int16):
    white = torch.iinfo(kind).max
    picture = (step * white).to(kind)
    for antialias in (True, False):
        exact = v2.functional.resize(step * white, [16, 16], interpolation=bicubic, antialias=antialias)
        limited = exact.clamp(torch.iinfo(kind).min, white)
        found = v2.functional.resize(picture, [16, 16], interpolation=bicubic, antialias=antialias)
        off = (found.double() - limited).abs()[0, 0]
        wrong = int((off > white / 2).sum())
        print(f"found {kind}, antialias {antialias}: row", *found[0, 0, 4:12].tolist(), f"{wrong} of 16 wrong")
        assert wrong == {torch.uint8: 0, torch.uint16: 4}.get(kind, 2)
        if kind == torch.uint8:
            assert found[0, 0, 4] == 0 and found[0, 0, 10] == 255
        if kind == torch.uint16 and antialias:
            assert found[0, 0, 4:12].tolist() == [0, 64001, 60929, 13311, 52223, 4606, 1534, 65535]
    straight = v2.functional.resize(picture, [16, 16])
    assert (straight.double() - v2.functional.resize(step * white, [16, 16])).abs().max() <= 1
    image = tv_tensors.Image(picture)
    for transform in (v2.Resize(16, interpolation=bicubic), v2.RandomResizedCrop(16, (1, 1), (1, 1), bicubic)):
        levels = transform(image).double() / white
        middle = bool(((levels > 0.9) & (levels < 0.99)).any())
        assert middle == (kind == torch.uint16)
room = ((step * 0.8 + 0.1) * 65535).to(torch.uint16)
exact = v2.functional.resize(room.double(), [16, 16], interpolation=bicubic)
assert (v2.functional.resize(room, [16, 16], interpolation=bicubic).double() - exact).abs().max() <= 1
END
