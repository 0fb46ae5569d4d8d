"""Images that the tests draw, and folders of them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def noise(seed: int, height: int = 8, width: int = 8) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def smooth(seed: int, height: int = 40, width: int = 50) -> Image.Image:
    """An image that JPEG changes little."""
    return noise(seed, 5, 5).resize((width, height), Image.Resampling.BICUBIC)


def draw_tree(
    root: Path,
    counts: Mapping[str, int],
    draw: Callable[[int, int], Image.Image] = lambda seed, index: noise(seed),
    names: tuple[str, ...] = ("cat", "dog"),
    suffix: str = "png",
    **options: Any,
) -> Path:
    """Draws as many images for each split and class as ``counts`` says; ``draw`` gets a seed and the number."""
    for split, count in counts.items():
        for label, name in enumerate(names):
            (root / split / name).mkdir(parents=True)
            for index in range(count):
                image = draw(100 * label + 10 * index + (split != "train"), index)
                image.save(root / split / name / f"{index}.{suffix}", **options)
    return root
