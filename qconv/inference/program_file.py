"""Program files: frozen networks for `qconv_run` and the C API, without Python."""

import os

import torch
from torch import Tensor, nn

from ..ground.files import write_file
from ..program.operations import Program
from .build import build
from .freeze import check


@torch.no_grad()
def save_program(model: nn.Module, path: str | os.PathLike[str], example: Tensor) -> Program:
    """Write a trained model as a program, which ``qconv_run`` runs without Python (docs: Without Python).

    The file holds a list of kernels and the weights in their bits; it knows neither the processor nor, unless a linear
    layer takes flattened images, the size of images. What the C code prints equals ``freeze(model)``, bit for bit.

    Args:
        model: the trained model.
        path: of the file.
        example: typical images (N, C, H, W), on which `verify` compares the frozen model with the trained one; signals
            (N, C, L) are images of one row for ``qconv_run``, rows (N, C) images of one pixel.

    Returns:
        The program; its first operation has the channels of the images, and `size` is the only size that it takes.

    Raises:
        TypeError, ValueError: as `freeze`.
        ValueError: a program has no operation for a part of the model, which the message names.
    """
    if not isinstance(example, Tensor):
        raise TypeError(f"example ({type(example).__name__}) must be a tensor of images")
    example = example.detach().cpu()
    frozen = build(model, example)
    content = frozen.program_bytes(example)
    check(model, frozen, example)
    write_file(path, content)
    return frozen.program(example)
