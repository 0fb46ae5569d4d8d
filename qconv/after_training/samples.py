"""Samples for the analysis of a trained model: batches of images, perhaps with labels."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

from ..ground.checks import check_at_least_one
from ..layers.placement import on_device_of

Batches = Sequence[tuple[Tensor, Tensor | None]]
"""Images, and their labels if they are known."""
Output = int | str | Callable[[Any], Tensor]
"""One of several outputs of a model: its index, its key, or a function of what the model returns that gives it."""
Loss = Callable[[Any, Tensor | None], Tensor]
"""The mean loss of a batch, from what the model returns and the labels."""


def images_of(model: nn.Module, images: Tensor | Iterable[Any], batch_size: int, max_samples: int) -> list[Tensor]:
    """Return the images in batches on the device of the model, ``max_samples`` of them at most.

    ``batch_size`` divides a tensor.
    """
    return [batch[:count] for batch, _, count in _read(model, images, None, batch_size, max_samples)]


def batches_of(
    model: nn.Module, images: Tensor | Iterable[Any], labels: Tensor | None, batch_size: int, max_samples: int
) -> list[tuple[Tensor, Tensor | None]]:
    """Return images as `images_of` does, with their labels if there are any: integers of any type as int64."""
    if labels is not None:
        if not isinstance(images, Tensor):
            raise TypeError("labels go with a tensor of images: pass batches of (images, labels) instead")
        _check_labels(labels, images)
    found: list[tuple[Tensor, Tensor | None]] = []
    for batch, other, count in _read(model, images, labels, batch_size, max_samples):
        if not isinstance(other, Tensor) and not hasattr(other, "__array__"):  # nothing, or names of files
            found.append((batch[:count], None))
            continue
        _check_labels(other, batch)
        found.append((batch[:count], other[:count] if other.is_floating_point() else other[:count].long()))
    return found


def outputs_of(model: Callable[..., Any], given: Any, output: Output | None = None) -> tuple[Tensor, ...]:
    """Return all floating outputs in what a model has given, also within tuples, dictionaries and dataclasses.

    With ``output``, only the one that it chooses.
    """
    if output is not None or isinstance(given, Tensor):
        return (chosen_output(model, given, output),)
    found = tuple(leaf for leaf in _leaves(given) if leaf.is_floating_point())
    if not found or not all(leaf.ndim for leaf in found):
        raise TypeError(
            f"model ({type(model).__name__}) must return tensors of outputs for each sample, not {_told(given)}: "
            "choose one by output=, an index, a key, or a function that returns the tensor"
        )
    return found


def _leaves(given: Any) -> Iterator[Tensor]:
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, Mapping):
        for value in given.values():
            yield from _leaves(value)
    elif isinstance(given, tuple | list):
        for value in given:
            yield from _leaves(value)
    elif is_dataclass(given):
        for field in fields(given):
            yield from _leaves(getattr(given, field.name))


def chosen_output(model: Callable[..., Any], given: Any, output: Output | None = None) -> Tensor:
    """Return the one output in what a model has given; of several outputs, the one chosen by ``output``."""
    chosen, name = given, f"model ({type(model).__name__})"
    if callable(output):
        chosen = output(given)
    elif output is not None:
        keys = _keys(given)
        if output not in keys:
            has = "one tensor, which needs none" if isinstance(given, Tensor) else _told(given)
            raise ValueError(f"output (={output!r}) must be an output of {name}, which returns {has}")
        is_attribute = isinstance(output, str) and not isinstance(given, Mapping)
        chosen = getattr(given, str(output)) if is_attribute else given[output]
    if not isinstance(chosen, Tensor) or not chosen.ndim:
        if output is not None:
            raise TypeError(
                f"output (={output!r}) must choose a tensor of outputs for each sample, not {_told(chosen)}"
            )
        raise TypeError(
            f"{name} must return one tensor of outputs for each sample, not {_told(given)}: choose one by output=, "
            "an index, a key, or a function that returns the tensor"
        )
    return chosen


def loss_of(model: nn.Module, given: Any, labels: Tensor | None, loss: Loss) -> Tensor:
    """Return the mean loss of a batch as ``loss`` computes it from what the model has given and the labels."""
    value = loss(given, labels)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise TypeError(f"loss must return a tensor of one number for {type(model).__name__}, not {_told(value)}")
    return value.reshape(())


def _keys(given: Any) -> list[Any]:
    """Return the keys of several outputs."""
    if isinstance(given, Mapping):
        return list(given)
    if is_dataclass(given):
        return [field.name for field in fields(given)]
    if not isinstance(given, tuple | list):
        return []
    return [*getattr(given, "_fields", ()), *range(-len(given), len(given))]


def _told(given: Any) -> str:
    """Describe a model's return value in words."""
    if isinstance(given, Tensor):
        return f"a tensor of shape {tuple(given.shape)}"
    names = [key for key in _keys(given) if not isinstance(given, tuple | list) or isinstance(key, str)]
    if names:
        return f"{type(given).__name__} of {', '.join(map(repr, names))}"
    return type(given).__name__ + (f" of {len(given)}" if isinstance(given, tuple | list) else "")


def _read(
    model: nn.Module, images: Tensor | Iterable[Any], labels: Tensor | None, batch_size: int, max_samples: int
) -> Iterator[tuple[Tensor, Any, int]]:
    """Yield the images of each batch, the rest of the batch, and how many images count."""
    check_at_least_one(max_samples=max_samples, batch_size=batch_size)
    if isinstance(images, Tensor):
        starts = range(0, len(images), batch_size) if images.ndim else ()
        parts = (slice(start, start + batch_size) for start in starts)
        images = [(images[part], None if labels is None else labels[part]) for part in parts] or [images]
    elif isinstance(images, Mapping) or not isinstance(images, Iterable):
        raise TypeError(
            f"images ({type(images).__name__}) must be a tensor of samples, or batches one after another, such as "
            "[images] or a DataLoader"
        )
    left = max_samples
    for batch in images:
        first, *others = batch if isinstance(batch, tuple | list) and batch else (batch,)
        if not isinstance(first, Tensor) or not first.ndim:
            kind = "a tensor of shape ()" if isinstance(first, Tensor) else type(first).__name__
            raise TypeError(f"images: a batch must be a tensor of samples, or a tuple that begins with one, not {kind}")
        if len(first):
            yield *on_device_of(model, (first, others[0] if others else None)), min(len(first), left)
        left -= len(first)
        if left <= 0:
            return
    if left == max_samples:
        raise ValueError("images must hold at least one sample")


def _check_labels(labels: Any, images: Tensor) -> None:
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels ({type(labels).__name__}) must be a tensor")
    if labels.shape[:1] != images.shape[:1]:
        raise ValueError(
            f"labels (of shape {tuple(labels.shape)}) must be one for each of the images (of shape "
            f"{tuple(images.shape)}); to measure without labels, pass batches of images only"
        )
