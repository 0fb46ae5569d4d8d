"""What ``qconv bench model`` compares."""

import copy
import sys
from collections.abc import Sequence
from dataclasses import replace
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


def compared(name: str, pictures: Sequence[str], count: int, **timing: Any) -> "ModelComparison":
    """Compare the networks of a run, of a packed file, or of ``module:function``; `timing` as in `compare_models`."""
    from ..bench.forms import compare_models

    if count < 1:
        raise ValueError(f"--count (={count}) must be at least 1")
    if not Path(name).exists() and ":" in name:
        if pictures:
            raise ValueError(f"IMAGE is for a packed model: {name} returns its images itself")
        return compare_models(*_returned(name), **timing)
    source = Source(name)
    if not source.is_run:
        return _of_file(source, list(pictures), timing)
    if pictures:
        raise ValueError(f"IMAGE is for a packed model: the run {name} has its test images")
    run = source.run
    model = run.model() if run.cfg.reestimate_bn else run.trained()
    result = compare_models(_float_twin(model), model, *run.labelled(count, "test"), **timing)
    note = LATENT if _is_quantized(model) else ""
    return replace(result, forms=(replace(result.forms[0], note=note), *result.forms[1:]))


def _of_file(source: Source, pictures: list[str], timing: dict[str, Any]) -> "ModelComparison":
    """Compare the forms of a packed file, without the figures that a float network which is not in it can't have."""
    import torch

    from ..bench.forms import compare_models

    model = source.predictor.model
    if pictures:
        images = source.inputs(pictures, len(pictures), "val")
    else:
        images = torch.randn(64, *source.predictor.pictures.size, generator=torch.Generator().manual_seed(0))
    result = compare_models(_float_twin(model), model, images, **timing)
    forms = list(result.forms) if pictures else [replace(form, agreement=None) for form in result.forms]
    forms[0], forms[-1] = (replace(form, agreement=None) for form in (forms[0], forms[-1]))
    forms[0] = replace(forms[0], note=OF_FILE if pictures else f"{OF_FILE}; {NO_PICTURES}")
    forms[1] = replace(forms[1], bytes=None)
    return replace(result, forms=tuple(forms), pictures=result.pictures if pictures else 0)


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
