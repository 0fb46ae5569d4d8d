"""Image size, normalization, split and classes of a training, which later commands reuse."""

import hashlib
import inspect
import operator
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from hydra._internal.utils import _locate
from hydra.errors import HydraException

from ..data import ImageFolderDataModule
from ..data.tree import Tree
from ..ground.checks import some
from ..images import Normalize
from .checkpoint_io import CheckpointError

TRAINED_ON = "trained_on"
"""The checkpoint's key for the result of `trained_on`."""
SPLITTING = {"test_size": 0.2, "val_size": 0.1, "split_seed": 0}
"""The arguments that, with ``split_by``, decide which images of a folder train, and their defaults."""
_NAMES: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""Cached results of `names_of`: every checkpoint needs one, and a million files take seconds."""


def describe_pictures(data: Any) -> dict[str, Any]:
    """Return ``pictures`` and ``classes`` of `qconv.save_packed` for a data module, which has been set up.

    Each is None if the data module does not say as `qconv.data` does.
    """
    return {"pictures": _pictures(data), "classes": class_names(data)}


def _pictures(data: Any) -> dict[str, Any] | None:
    try:
        pictures: dict[str, Any] = {
            "size": [operator.index(data.in_channels), *map(int, data.image_size)],
            "resize": data.resize if isinstance(getattr(data, "resize", None), int) else None,
            "mean": [float(value) for value in data.normalize.mean],
            "std": [float(value) for value in data.normalize.std],
        }
        if (pixel_range := getattr(data, "pixel_range", None)) is not None:
            pictures["pixel_range"] = [float(value) for value in pixel_range]
    except (AttributeError, TypeError, ValueError):
        return None
    return pictures


def class_names(data: Any) -> list[str] | None:
    """Return the names of the classes of a data module, in order; None if it has none."""
    names = getattr(data, "classes", None)
    if isinstance(names, str) or not isinstance(names, Iterable):
        return None
    listed = [str(name) for name in names]
    return listed if listed else None


def trained_on(data: Any, loader: Any) -> dict[str, Any]:
    """Return image size, normalization and classes of a data module, and a description of its training images."""
    split_by = data.split_by if isinstance(data, ImageFolderDataModule) else None
    return {**describe_pictures(data), "split_by": split_by, "count": count_of(loader), "names": names_of(data)}


def names_of(data: Any) -> str | None:
    """Return 32 digits that change with the name or class of any image for training and validation.

    None if the data module has no folder of such images, or a separate one for validation.
    """
    tree, root = getattr(data, "tree", None), getattr(data, "root", None)
    if not isinstance(tree, Tree) or root is None or "val" in tree.splits:
        return None
    if data not in _NAMES:
        digest = hashlib.blake2b(digest_size=16)
        for path, label in tree.splits["train"]:
            digest.update(f"{label} {path.relative_to(root).as_posix()}\n".encode(errors="surrogateescape"))
        _NAMES[data] = digest.hexdigest()
    return _NAMES[data]


def are_others(checkpoint: Mapping[str, Any], data: Any) -> bool:
    """Whether images were added, removed or given another class since a checkpoint's run, as far as both name them."""
    before, now = _of(checkpoint).get("names"), names_of(data)
    return before is not None and now is not None and before != now


def count_of(loader: Any) -> int | None:
    """Return the number of images in an epoch of a loader; None if it does not use the order of `qconv.data`."""
    size = getattr(getattr(loader, "sampler", None), "size", None)
    return size if isinstance(size, int) else None


def check_same(checkpoint: Mapping[str, Any], data: Any, loader: Any) -> None:
    """Raise a ValueError if a run that goes on from a checkpoint had other training images, as far as that is known."""
    if difference := other_images(checkpoint, data, loader):
        raise ValueError(
            f"{difference}, so it may have been trained on images that would validate it: resume with the same images; "
            "init_from= starts a run with these"
        )


def other_images(checkpoint: Mapping[str, Any], data: Any, loader: Any) -> str:
    """Say how the training images of a checkpoint's run differ from those of the loader, as far as that is known."""
    before, now = _of(checkpoint).get("count"), count_of(loader)
    if before is not None and now is not None and before != now:
        return f"the run was trained on {before} images and there are {now} now"
    return "some of the run's images have another name or class now" if are_others(checkpoint, data) else ""


def arguments_as_trained(
    node: Mapping[str, Any], checkpoint: Mapping[str, Any] | None, others: Iterable[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return arguments of an `ImageFolderDataModule` that its config leaves open, as in the training of a checkpoint.

    These are the image size, the pixel values of black and white for images of more than 8 bits, and the split of a
    folder without splits. What the networks of `others` were tested with in the same folder remains for the test.
    """
    kind = class_of(node)
    more: dict[str, Any] = {}
    pictures = _of(checkpoint).get("pictures")
    if kind is None or not issubclass(kind, ImageFolderDataModule):
        return more
    if pictures is not None:
        as_trained = {"image_size": list(pictures["size"][1:]), "pixel_range": pictures.get("pixel_range")}
        for name, value in as_trained.items():
            if value is not None and node.get(name) is None and _takes(kind, name):
                more[name] = value
    if "split_by" not in node and _takes(kind, "split_by"):
        if checkpoint is not None:
            more["split_by"] = _split_by(checkpoint)
        elif splits := [_split_by(each) for each in others if _has_folder(each, node)]:  # which reads their files
            more["split_by"] = splits[0]
    return more


def _split_by(checkpoint: Mapping[str, Any]) -> str:
    return _of(checkpoint).get("split_by") or "name"


def split_otherwise(checkpoint: Mapping[str, Any], node: Mapping[str, Any], data: Any) -> str:
    """Say why a checkpoint's run had other images of the same folder for training than a run with this data module.

    Empty if it had the same images, or images of another folder.
    """
    if not _has_folder(checkpoint, node):
        return ""
    nodes = _data_of(checkpoint), node
    before, now = ({key: each.get(key, default) for key, default in SPLITTING.items()} for each in nodes)
    before["split_by"], now["split_by"] = _split_by(checkpoint), data.split_by
    differing = [f"data.{key}: {before[key]} → {now[key]}" for key in before if before[key] != now[key]]
    if not differing and are_others(checkpoint, data):  # whose names are those of the images that are not tested
        return "some have another name or class now"
    return ", ".join(differing)


def _data_of(checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    return (checkpoint.get("config") or {}).get("data") or {}


def _has_folder(checkpoint: Mapping[str, Any], node: Mapping[str, Any]) -> bool:
    """Whether a checkpoint's run had the images in the folder of the node."""
    roots = _data_of(checkpoint).get("root"), node.get("root")
    return None not in roots and len({Path(str(root)).expanduser().resolve() for root in roots}) == 1


def class_of(node: Mapping[str, Any]) -> type | None:
    """Return the class that a config node names, if it exists."""
    try:
        kind = _locate(str(node.get("_target_")))  # `hydra.utils` would log what is said again where it is made
    except (HydraException, ValueError, ImportError):
        return None
    return kind if isinstance(kind, type) else None


def _takes(kind: type, name: str) -> bool:
    parameters = inspect.signature(kind).parameters
    return name in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def prepare_as_trained(data: Any, checkpoint: Mapping[str, Any] | None, called: str) -> None:
    """Give a data module, before its `setup`, the mean and deviation of the images of a checkpoint's training.

    Raises:
        CheckpointError: the network was trained on other classes, so its outputs would mean something else.
    """
    if difference := other_classes(data, checkpoint):
        raise CheckpointError(
            f"{called} {difference}: give the classes their earlier names; init_from= starts a run with other classes"
        )
    normalize_as_trained(data, checkpoint)


def normalize_as_trained(data: Any, checkpoint: Mapping[str, Any] | None) -> None:
    """Give a data module, before its `setup`, the mean and deviation of the images of a checkpoint's training."""
    pictures = _of(checkpoint).get("pictures")
    if pictures is not None and isinstance(getattr(data, "normalize", False), Normalize | None):
        data.normalize = Normalize(pictures["mean"], pictures["std"])


def other_classes(data: Any, checkpoint: Mapping[str, Any] | None) -> str:
    """Say how the classes of a checkpoint's training differ from the data module's, as far as both name them.

    Empty if they agree.
    """
    before, now = _of(checkpoint).get("classes"), class_names(data)
    if before is None or now is None or before == now:
        return ""
    if len(before) == len(now) and list(map(str, range(len(now)))) in (before, now):  # numbers in place of names
        return ""
    if len(before) != len(now):
        return (
            f"was trained on {len(before)} classes ({some(before, 3)}), but the data have {len(now)} ({some(now, 3)})"
        )
    number = next(number for number, pair in enumerate(zip(before, now, strict=True)) if pair[0] != pair[1])
    return f"was trained with {before[number]!r} as class {number}, which is {now[number]!r} in the data"


def _of(checkpoint: Mapping[str, Any] | None) -> Mapping[str, Any]:
    known = None if checkpoint is None else checkpoint.get(TRAINED_ON)
    return {} if known is None else known
