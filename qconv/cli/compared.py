"""The networks and images that ``qconv bench model`` compares."""

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .source import Source

if TYPE_CHECKING:
    from torch import nn

    from ..bench.forms import ModelComparison

LATENT = "the network with its latent weights, without the quantizers that it was trained with"
OF_FILE = "the network with its quantized weights; the file has no others"
NO_PICTURES = "timed on random numbers: name IMAGE files to count agreement"


@dataclass(frozen=True)
class Compared:
    """The arguments of `qconv.compare_models`, and notes on the result.

    Attributes:
        float_decides: whether the float network is trained, so that its predictions mean something.
        has_pictures: whether the inputs are images.
    """

    arguments: tuple[Any, ...]
    float_note: str = ""
    float_decides: bool = True
    has_pictures: bool = True

    def judged(self, result: "ModelComparison") -> "ModelComparison":
        """Return the result with notes, and without meaningless figures."""
        forms = list(result.forms)
        if not self.has_pictures:
            forms = [replace(form, agreement=None, accuracy=None) for form in forms]
        if not self.float_decides:  # and what is trained is not in the file
            forms[0], forms[-1] = (replace(form, agreement=None, accuracy=None) for form in (forms[0], forms[-1]))
            forms[1] = replace(forms[1], bytes=None)
        notes = [self.float_note, "" if self.has_pictures else NO_PICTURES]
        forms[0] = replace(forms[0], note="; ".join(filter(None, notes)))
        return replace(result, forms=tuple(forms), pictures=result.pictures if self.has_pictures else 0)


def comparison_of(name: str, pictures: Sequence[str], count: int) -> Compared:
    """Return the networks and images to compare: of a run, of a packed file, or of ``module:function``."""
    if count < 1:
        raise ValueError(f"--count (={count}) must be at least 1")
    if not Path(name).exists() and ":" in name:
        if pictures:
            raise ValueError(f"IMAGE is for a packed model: {name} returns its images itself")
        return Compared(_returned(name))
    source = Source(name)
    if source.is_run:
        if pictures:
            raise ValueError(f"IMAGE is for a packed model: the run {name} has its test images")
        return _of_run(source, count)
    return _of_file(source, pictures)


def _of_run(source: Source, count: int) -> Compared:
    run = source.run
    model = run.model() if run.cfg.reestimate_bn else run.trained()
    note = LATENT if _is_quantized(model) else ""
    return Compared((_float_twin(model), model, *run.labelled(count, "test")), note)


def _of_file(source: Source, pictures: Sequence[str]) -> Compared:
    import torch

    model = source.predictor.model
    if pictures:
        images = source.inputs(list(pictures), len(pictures), "val")
    else:
        images = torch.randn(64, *source.predictor.pictures.size, generator=torch.Generator().manual_seed(0))
    return Compared((_float_twin(model), model, images), OF_FILE, float_decides=False, has_pictures=bool(pictures))


def _returned(name: str) -> tuple[Any, ...]:
    module, _, function = name.partition(":")
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        make = getattr(import_module(module), function)
    except AttributeError as error:
        raise ImportError(f"module {module} has no {function!r}: MODULE:FUNCTION names a function of yours") from error
    finally:
        sys.path.pop(0)
    result = make()
    if not isinstance(result, tuple) or len(result) not in (3, 4):
        raise ValueError(f"{name} must return (float model, quantized model, images) or the same with labels")
    return result


def _is_quantized(model: "nn.Module") -> bool:
    from ..layers import QuantizedLayer

    return any(isinstance(module, QuantizedLayer) for module in model.modules())


def _float_twin(model: "nn.Module") -> "nn.Module":
    from ..convert import to_float

    twin = copy.deepcopy(model)
    return to_float(twin) if _is_quantized(twin) else twin
