"""The targets: what writes a trained model as the file of another runtime, and what runs it there."""

import copy
import inspect
import os
import warnings
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ground.files import atomic_file, write_file
from ..inference import FrozenModel, freeze
from ..inference.verify import leaves
from ..onnx import OnnxModel, export_onnx
from ..onnx.runtime import PRECISE
from ..packed.tensors import inner_model
from ..program.operations import Program, as_images
from ..program.plan import Plan
from ..zoo import load


class Target(NamedTuple):
    """A kind of file.

    Attributes:
        file: the usual name of its files.
        mark: bytes that a file has, where others have its suffix.
        has_codes: whether a module of its name in this folder writes it from a program, and shows the codes inside.
        interpreters: what runs it, if there are several; the first as it ships.
    """

    file: str
    mark: bytes = b""
    has_codes: bool = True
    interpreters: tuple[str, ...] = ()

    @property
    def suffix(self) -> str:
        """The end of the name of each of its files."""
        return Path(self.file).suffix

    def holds(self, path: Path) -> bool:
        """Whether a file is of this kind."""
        return path.suffix == self.suffix and self.mark in (path.read_bytes() if self.mark else b"")


TARGETS = {
    "program": Target("model.qcp", has_codes=False),
    "litert": Target("model.tflite", interpreters=("xnnpack", "builtin", "micro")),
    "openvino": Target("model.xml"),
    "executorch": Target("model.pte"),
    "qonnx": Target("model_qonnx.onnx", mark=b"qonnx.custom_op"),
    "onnx": Target("model.onnx", has_codes=False),
    "pt2": Target("model.pt2", has_codes=False),
}


def export(
    model: nn.Module | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    to: str,
    images: Tensor,
    **options: Any,
) -> Program | None:
    """Write a trained model as a file for another runtime (docs: Which runtime?).

    The model is frozen and compared with the trained one on the images. Its program is written operation by operation,
    so the codes of all quantizers are the program's for the same floats; `qconv.verify_export` counts them in the
    runtime.

    Args:
        model: the trained model, a frozen one (not for "onnx"), or what `qconv.load` takes: a packed file, a run, a
            name of the zoo.
        path: of the file, with the usual suffix: OpenVINO asks for .xml.
        to: "litert", "openvino", "executorch", "qonnx", "onnx" (`qconv.export_onnx`), "program" (`qconv.save_program`)
            or "pt2" (`torch.export`).
        images: typical images (N, C, H, W), signals (N, C, L) or rows (N, C). Files but those of "onnx" and "pt2" take
            signals as images of one row, and rows as images of one pixel. The file takes images of their size; "onnx",
            "program" and "pt2" take others, too, if the network does.
        options: of the target: for "litert" `four_bits` and `round_outputs`, for "executorch" `round_outputs`, for
            "onnx" those of `qconv.export_onnx`.

    Returns:
        The program; None for "onnx".

    Raises:
        ImportError: a package is missing; it names the extra that installs it.
        TypeError: `model` or `images` is of another type; an option that the target does not have.
        ValueError: another target; the model can't be frozen; an operation that the target can't express: it names
            the layer, and the reason.
    """
    return exported(model, path, to, images, **options)[0]


def exported(
    model: nn.Module | str | os.PathLike[str], path: str | os.PathLike[str], to: str, images: Tensor, **options: Any
) -> tuple[Program | None, list[str]]:
    """Do what `export` does; return the layers of codes that multiply floats in the file, too, if its target tells."""
    if to not in TARGETS:
        named = f"to (={to!r}) must be one of {', '.join(map(repr, TARGETS))}"
        raise ValueError(f"{named}; qconv.save_packed writes packed files" if to == "packed" else named)
    _check_options(to, options)
    path, model = Path(path), loaded(model)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path (={path}): there is no folder {path.parent}")
    if to == "onnx":
        if isinstance(model, FrozenModel):
            raise ValueError("model is frozen: pass the trained one, with which the ONNX file is compared")
        export_onnx(model, path, images, **options)
        return None, []
    (frozen, program), left = program_of(model, images), None
    if to == "program":
        write_file(path, frozen.program_bytes(images.cpu()))
    elif to == "pt2":
        two = torch.cat([images[:1].cpu()] * 2)  # a copy: of a view, the file would have all images
        module = frozen.traced(two)
        sizes = {0: torch.export.Dim("batch")}
        if module is not frozen and program.size is None:
            sizes |= dict.fromkeys(range(2, two.ndim), torch.export.Dim.DYNAMIC)
        else:
            program = copy.copy(program)
            program.size = tuple(two.shape[2:])
        exported = torch.export.export(module, (two,), dynamic_shapes=(sizes,))
        with atomic_file(path) as file, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "No complete tensor")  # of weights in channels_last, which are whole
            torch.export.save(exported, file)
    else:
        images = as_images(images.detach().float().cpu())
        left = import_module(f".{to}", __package__).write(program, path, images, **options)
    return program, left or []


def _check_options(to: str, options: Mapping[str, Any]) -> None:
    """Raise a TypeError for an option that a target does not have."""
    known: list[str] = []
    if to == "onnx" or TARGETS[to].has_codes:
        writer: Any = export_onnx if to == "onnx" else import_module(f".{to}", __package__).write
        parameters = inspect.signature(writer).parameters.values()
        known = [each.name for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY]
    for name in options.keys() - known:
        has = f"only {', '.join(known)}" if known else "no options"
        raise TypeError(f"{name} (={options[name]!r}) is no option of to={to!r}, which has {has}")


def loaded(model: nn.Module | str | os.PathLike[str]) -> nn.Module:
    """Return a model, or what `qconv.load` reads."""
    return load(model) if isinstance(model, str | os.PathLike) else model


def check_images(images: Tensor) -> None:
    """Raise a TypeError or a ValueError unless these are images, signals or rows."""
    if not isinstance(images, Tensor) or images.ndim not in (2, 3, 4) or not images.is_floating_point():
        kind = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise TypeError(f"images ({kind}) must be a float tensor (N, C, H, W), (N, C, L) of signals, or (N, C)")
    if not images.numel():
        raise ValueError(f"images (of shape {tuple(images.shape)}) must hold at least one sample")


def program_of(model: nn.Module, images: Tensor) -> tuple[FrozenModel, Program]:
    """Return the frozen form of a model, which equals it on the images, and its program.

    Raises:
        TypeError, ValueError: as `qconv.export`.
    """
    check_images(images)
    images = images.detach().float().cpu()
    frozen = model if isinstance(model, FrozenModel) else freeze(inner_model(model), example=images)
    return frozen, frozen.program(images)


def target_of(path: Path) -> str:
    """Return the name of a file's target.

    Raises:
        ValueError: there is no such file, or it is of no target.
    """
    if not path.is_file():
        raise ValueError(f"exported file {path}: there is no such file")
    for name, target in TARGETS.items():
        if target.holds(path):
            return name
    suffixes = ", ".join(sorted({target.suffix for target in TARGETS.values()}))
    raise ValueError(f"exported file {path}: it must end in {suffixes}")


def run(path: Path, images: Tensor, interpreter: str | None = None) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Run a file in its own runtime, by one of its target's interpreters; None takes the first.

    Returns:
        The outputs; and under ``"NUMBER.input"`` and ``"NUMBER.codes"``, where the runtime shows them, the floats that
        the operation of that number in the program encodes, and its codes less the code of 0.

    Raises:
        ValueError: the runtime refuses the file, or the images.
    """
    name, images = target_of(path), images.detach().float().cpu().contiguous()
    if name == "onnx":
        return leaves(OnnxModel(path)(images)), {}
    if name == "program":
        content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        images = as_images(images)
        return Plan(content, (images.shape[2], images.shape[3]))(images, threads=torch.get_num_threads()), {}
    try:
        if name == "pt2":
            return leaves(torch.export.load(path).module()(images)), {}
        pixels = as_images(images).numpy()
        outputs, found = import_module(f".{name}", __package__).run(path, pixels, *filter(None, [interpreter]))
    except ImportError:
        raise
    except Exception as error:  # of another library, which may raise anything
        refused = f"exported file {path}: {name} can't run it on images {tuple(images.shape)}"
        raise ValueError(f"{refused}: {str(error).strip()}") from error
    return [*map(torch.from_numpy, outputs)], {key: torch.from_numpy(value) for key, value in found.items()}


def settings(path: Path) -> dict[str, str]:
    """Return what a user of a file must set in its runtime."""
    name = target_of(path)
    if name == "onnx":
        return dict([PRECISE]) if OnnxModel(path).saturating else {}
    return getattr(import_module(f".{name}", __package__), "SETTINGS", {}) if TARGETS[name].has_codes else {}
