"""Decoding images on the device that trains."""

import warnings
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from ..images import DecodingError, decode, decode_jpegs, opened, orientation, reason

END = b"\xff\xd9"
"""The end of a JPEG file."""


def _is_plain_jpeg(data: bytes) -> bool:
    """Whether it is an upright JPEG file in RGB or gray with its end, as the decoder of a GPU reads them.

    That of NVIDIA fills up the pixels of a file that was cut off.
    """
    if not data.rstrip(b"\0").endswith(END):
        return False
    with suppress(DecodingError), opened(data) as picture:  # `decode` says what is wrong
        return picture.format == "JPEG" and picture.mode in ("RGB", "L") and orientation(picture) == 1
    return False


def decodes(device: torch.device) -> bool:
    """Whether the device decodes JPEG files itself, as GPUs of NVIDIA do."""
    return device.type == "cuda" and torch.version.hip is None


def decode_on(device: torch.device, files: Sequence[bytes]) -> list[Tensor | DecodingError]:
    """Decode images, each `(3, H, W)` uint8, on the device, or say what is wrong with one.

    A device that `decodes` gets the plain JPEG files. Whatever it does not read, and all files of a batch in which it
    finds one damaged, is decoded by the CPU, and moved. A warning says that the device has failed if the files are
    whole. It takes wrong bytes within a file for pixels, of which the CPU finds some.
    """
    found: dict[int, Tensor | DecodingError] = {}
    failure = None
    if decodes(device):
        plain = [number for number, data in enumerate(files) if _is_plain_jpeg(data)]
        try:  # nvjpeg decodes all of them or none, and does not say which is damaged
            found.update(zip(plain, decode_jpegs([files[number] for number in plain], device), strict=True))
        except RuntimeError as error:
            failure = error
    for number, data in enumerate(files):
        if number in found:
            continue
        try:
            found[number] = decode(data).to(device)
        except DecodingError as error:
            found[number] = error
    if failure is not None and not any(isinstance(each, DecodingError) for each in found.values()):
        warnings.warn(
            f"{device} could not decode JPEG files, so the CPU decoded them one by one: {reason(failure)}; "
            "data.decode=cpu decodes in threads",
            stacklevel=2,
        )
    return [found[number] for number in range(len(files))]
