"""Predictions for the test images, and the most confident mistakes."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from ...ground.files import DamagedFileError, write_file

MISTAKES = 20
SIDE = 160  # pixels of a stored image at most


@dataclass(frozen=True)
class Predictions:
    """The predicted classes, and the most confident mistakes, the most confident first.

    Attributes:
        labels: class of each image (N,).
        predicted: predicted class of each image (N,).
        confidence: predicted probability of this class (N,).
        pixels: uint8 images of the mistakes (M, C, H, W), `SIDE` pixels a side at most.
        mistakes: label and predicted class of each of them (M, 2).
        certain: the probability of the predicted class (M,).
    """

    labels: Tensor
    predicted: Tensor
    confidence: Tensor
    pixels: Tensor
    mistakes: Tensor
    certain: Tensor

    @classmethod
    def of_batch(cls, logits: Tensor, images: Tensor, labels: Tensor, normalize: Any = None) -> "Predictions":
        """Return the predictions of one batch; `normalize` is how its images were normalized (`qconv.images`)."""
        confidence, predicted = logits.float().softmax(1).nan_to_num(0.0).max(1)
        wrong = (predicted != labels).nonzero().flatten()
        chosen = wrong[confidence[wrong].argsort(descending=True, stable=True)[:MISTAKES]]
        pixels = pixels_of(images[chosen], normalize).cpu()
        pairs = torch.stack([labels[chosen], predicted[chosen]], 1)
        parts = (labels, predicted, confidence, pixels, pairs, confidence[chosen])
        return cls(*(part.cpu() for part in parts))

    @classmethod
    def joined(cls, parts: Iterable["Predictions"]) -> "Predictions":
        """Join the predictions of several parts of the images."""
        columns: Any = zip(*(vars(part).values() for part in parts), strict=True)
        whole = cls(*(torch.cat(column) for column in columns))
        order = whole.certain.argsort(descending=True, stable=True)[:MISTAKES]
        first = {name: getattr(whole, name)[order].clone() for name in ("pixels", "mistakes", "certain")}
        return cls(whole.labels, whole.predicted, whole.confidence, **first)

    @property
    def accuracy(self) -> float:
        """The share of correctly predicted images."""
        return float((self.labels == self.predicted).float().mean())

    def save(self, path: Path) -> None:
        """Write the predictions to a file."""
        write_file(path, save({name: tensor.contiguous() for name, tensor in vars(self).items()}))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Predictions":
        """Read the file that `save` has written; a damaged one raises a DamagedFileError."""
        try:
            return cls(**load_file(path))
        except (SafetensorError, TypeError) as error:
            raise DamagedFileError(f"{path} is not a file of predictions: {error}") from error


def pixels_of(images: Tensor, normalize: Any) -> Tensor:
    """Return normalized images as uint8; without knowing how they were normalized, stretched to the whole range."""
    images = images.float()
    if normalize is None:
        flat = images.flatten(1)
        low, high = (each.view(-1, 1, 1, 1) for each in (flat.amin(1), flat.amax(1))) if len(flat) else (0.0, 1.0)
        images = (images - low) / (high - low + 1e-12) * 255
    else:
        mean, std = (
            torch.tensor(tuple(each), device=images.device).view(-1, 1, 1) for each in (normalize.mean, normalize.std)
        )
        images = images * std + mean
    height, width = images.shape[-2:]
    if max(height, width) > SIDE:
        scale = SIDE / max(height, width)
        size = max(1, round(height * scale)), max(1, round(width * scale))
        # interpolate refuses a batch of none
        images = (
            F.interpolate(images, size, mode="bilinear", antialias=True)
            if len(images)
            else images.new_empty(0, images.shape[1], *size)
        )
    return images.round().clamp(0, 255).to(torch.uint8)
