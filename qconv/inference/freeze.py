"""Freezing: converting a trained model into one that computes on integers."""

from typing import Literal

import torch
from torch import Tensor, nn

from .build import FrozenModel, build
from .verify import verify

_BATCH = 32


@torch.no_grad()
def freeze(
    model: nn.Module,
    *,
    example: Tensor | None = None,
    nan: Literal["pass", "refuse"] = "pass",
) -> FrozenModel:
    """Convert a copy of a trained model to integers, for inference on the CPU.

    The model becomes a `Program`: what it does with a sample, operation by operation. Quantized layers run on integers
    if their codes allow it: signs, and two values around a centre, by exclusive or and counting bits, codes of up to 8
    bits, with or without an offset, as 8-bit integers with 32-bit sums, powers of two on fixed-point inputs with exact
    sums in float64. The others multiply floats by a weight that is quantized once; sums of floats with signs for a
    weight are looked up.
    `FrozenModel.layers` lists the result for each layer, and the reason.

    On the CPU, images go through the program as one plan of kernels in C: the same bits on every processor, for any
    number of threads and images. What C lacks, such as softmax, is a function of torch between parts that C runs.
    `FrozenModel.unplanned` names the first one, or says why torch's operators run all of it.

    The model takes one tensor; all other arguments of its forward keep their defaults. Its forward, with its hooks,
    runs in Python a few times, on a sample (of `example`, or random, or the first input), and again for other sizes of
    images: what it decides by Python, it decides then; what it keeps between calls, in attributes or tensors, is not
    kept. A forward that reads numbers of its input, draws random numbers, computes with a fraction of the number of
    images or treats one image in another way can't be recorded; it stays Python, and its layers are frozen one by one
    (`FrozenModel.untraced` says why).

    Integers have no NaN: a sample with NaN or inf gives an output of NaN. (An ONNX file does not.) A NaN that arises
    inside, as in 0 / 0 between two layers, becomes a code.

    Args:
        model: the trained model.
        example: typical inputs, on which `qconv.verify` compares the frozen model with the trained one.
        nan: "refuse" makes the frozen model raise a ValueError for inputs with NaN or inf. `torch.export` can't keep
            such a check.

    Raises:
        TypeError: `model` is not a module, or can't be copied; `example` is not a tensor.
        ValueError: a quantizer that waits for data or is not in its last stage; NaN or inf in a tensor; a dtype other
            than float32; a module that stays in training mode after ``model.eval()``; a part compiled by
            `torch.compile`; a model that is already frozen, or needs several inputs; another `nan`; an example that the
            model does not accept; a frozen model that differs from the trained one on `example`.
    """
    if nan not in ("pass", "refuse"):
        raise ValueError(f"nan (={nan!r}) must be 'pass' or 'refuse'")
    made = build(model, example)
    made.nan = nan
    if example is not None:
        check(model, made, example)
    return made


def check(model: nn.Module, frozen: FrozenModel, example: Tensor) -> None:
    """Raise a ValueError unless the frozen model computes the same as the trained one."""
    verification = verify(model, frozen, example.detach().cpu().split(_BATCH))
    if not verification.equal:
        raise ValueError(f"the frozen model does not compute what the trained one does:\n{verification}")
