"""Freezing: converting a trained model into one that computes on integers."""

import warnings
from typing import Literal

import torch
from torch import Tensor, nn

from ..layers.copies import copied
from .build import FrozenModel, build
from .verify import verify

_BATCH = 32


@torch.no_grad()
def freeze(
    model: nn.Module,
    *,
    tolerance: float = 0.0,
    example: Tensor | None = None,
    nan: Literal["pass", "refuse"] = "pass",
) -> FrozenModel:
    """Convert a trained model, which stays as it is, to integers and folded batch norms, for inference on the CPU.

    Quantized layers run on integer operators if their codes allow it: signs, and two values around a centre, by
    exclusive or and counting bits, codes of up to 8 bits as 8-bit integers with 32-bit sums, powers of two on
    fixed-point inputs in 8-bit parts, which are shifted. The others multiply floats by a weight that is quantized once;
    sums of floats with signs for a weight are looked up. Batch norm after an integer layer becomes its scale and bias.
    If only batch norm, monotone activations and maximum pooling lie between two quantized layers, as modules or as
    functions (``F.relu(x)``, ``x.clamp(0, 6)``), they become integers, too: a threshold per channel for signs, else a
    rounding that is proved to give the trained codes for every possible sum. `FrozenModel.layers` lists the result for
    each layer, and the reason.

    The model takes one tensor; all other arguments of its forward keep their defaults. Modules that `torch.fx` can't
    trace faithfully stay Python, and their parts are frozen separately: a forward that branches on shapes, changes the
    module, draws random numbers or enters autocast; and one whose trace gives other outputs than the module, or calls
    other layers, on samples of `example` (without one: on random inputs, if a usual shape suits the model). A layer
    whose weight the model reads outside its call stays as trained. `FrozenModel.untraced` lists the modules that stay
    Python, and why. If such a module reaches into a part that is frozen as a whole, and no input has shown it before, a
    `ReadBeside` that names the part is raised when it happens.

    On the CPU, images go through the frozen network as one plan of kernels in C, if a `Program` can hold it: the same
    bits on every processor, for any number of threads and images. `FrozenModel.unplanned` says why not, and then its
    modules run one by one. A plan is made with the first images: change a frozen model before that, or a copy.

    Integers have no NaN: a sample with NaN or inf gives an output of NaN. (An ONNX file does not.) A NaN that arises
    inside, as in 0 / 0 between two layers, becomes a code.

    Args:
        model: the trained model.
        tolerance: how far a rounding may deviate from the trained quantizer, in steps. With 0 it is proved equal;
            float32 does not allow that for 8-bit codes, so those go through floats. With 0.01 they are passed on as
            codes, and may be off by one.
        example: typical inputs, on which `qconv.verify` compares the frozen model with the trained one, if that
            returns a tensor (a UserWarning says if not).
        nan: "refuse" makes the frozen model raise a ValueError for inputs with NaN or inf. `torch.export` can't keep
            such a check.

    Raises:
        TypeError: `model` is not a module, or can't be copied; `example` is not a tensor.
        ValueError: a quantizer that waits for data or is not in its last stage; NaN or inf in a tensor; a dtype other
            than float32; hooks, which would be lost; a module that stays in training mode after ``model.eval()``; a
            part compiled by `torch.compile`; a model that is already frozen, or needs several inputs; a
            tolerance outside 0 to 1; another `nan`; an example that the model does not accept; a frozen model that
            differs from the trained one on `example`.
    """
    if not 0 <= tolerance <= 1:
        raise ValueError(f"tolerance (={tolerance}) must be at least 0 and at most 1")
    if nan not in ("pass", "refuse"):
        raise ValueError(f"nan (={nan!r}) must be 'pass' or 'refuse'")
    made = build(model, tolerance, example)
    made.nan = nan
    if example is not None:
        check(model, made, example)
    return made


def check(model: nn.Module, frozen: FrozenModel, example: Tensor) -> None:
    """Raise a ValueError unless the frozen model computes the same as the trained one."""
    model = copied(model).eval().cpu()
    output = model(example[:1].cpu())
    if not isinstance(output, Tensor):
        warnings.warn(
            f"freeze compares models that return a tensor with `example`; this one returns {type(output).__name__}: "
            "compare the outputs yourself",
            stacklevel=4,  # torch.no_grad calls freeze
        )
        return
    verification = verify(model, frozen, example.detach().cpu().split(_BATCH))
    if not verification.equal:
        raise ValueError(f"the frozen model does not compute what the trained one does:\n{verification}")
