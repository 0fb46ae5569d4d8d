"""The test vector of a packed file: the outputs of its model for two inputs, which also depend on its functions."""

import base64
import inspect
import struct

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..layers.copies import check_copies, copied
from ..layers.observed_run import trial
from .header import Trial
from .shapes import usual_shapes

NUMBERS = 32  # of each output, evenly spaced
CANDIDATES = 16  # inputs; those two are kept that rounding changes least, since it must not turn a sign
ROUNDING = 2.0**-20  # of the inputs, as for sums in another order
TOLERANCE, LARGEST = 1e-3, 0.25  # of the largest output
FAILURES = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, NotImplementedError)


def make_trial(model: nn.Module, shape: tuple[int, ...]) -> Trial | None:
    """Return the test vector of a float32 model that takes inputs of this shape, without the batch.

    The model is not changed. The tolerance is the change of its outputs when the inputs change by rounding errors,
    and in float64. None if that is too much, or if the model can't be copied or does not take such inputs.
    """
    if not _is_float32(model):
        return None
    inputs = inputs_of(shape)
    try:
        outputs = _outputs(model, inputs)
        if outputs is None or not outputs.isfinite().all() or not outputs.abs().amax(1).all():
            return None
        kept = _moved_by_rounding(model, inputs, outputs).argsort()[:2].sort().values
        inputs = inputs[kept]
        outputs = _outputs(model, inputs)  # again: a scale may depend on the whole batch, as for FP8
        if outputs is None:
            return None
        moved = _moved_by_rounding(model, inputs, outputs)
    except FAILURES:
        return None
    tolerance = max(TOLERANCE, 8 * moved.max().item())
    if tolerance > LARGEST:
        return None
    return _trial(shape, kept, outputs, tolerance)


def longest_trial(model: nn.Module, shape: tuple[int, ...]) -> Trial | None:
    """Return a test vector of the length that `make_trial` gives a trained model at most, after one run."""
    outputs = _outputs(model, inputs_of(shape)[:2])
    return None if outputs is None else _trial(shape, torch.tensor([CANDIDATES - 1] * 2), outputs, 1.2 * TOLERANCE)


def _trial(shape: tuple[int, ...], kept: Tensor, outputs: Tensor, tolerance: float) -> Trial:
    numbers = outputs.flatten().tolist()
    text = base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()
    return Trial(shape=list(shape), inputs=kept.tolist(), outputs=text, tolerance=float(f"{tolerance:.2g}"))


def why_refused(model: nn.Module, shape: tuple[int, ...]) -> str:
    """Return the model's error for inputs of this shape, without the batch; empty if there is none."""
    try:
        _outputs(model, inputs_of(shape)[:2])
    except FAILURES as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return ""


def find_shape(model: nn.Module, *others: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the first usual or other shape that the model takes, without the batch; the model is not changed."""
    for shape in (*usual_shapes(model), *others):
        try:
            outputs = _outputs(model, inputs_of(shape)[:2])
        except FAILURES:
            continue
        if outputs is not None:
            return shape
    return None


def can_be_tried(model: nn.Module) -> bool:
    """Whether the model is in float32, and its forward takes one input."""
    needed = [
        parameter
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.default is parameter.empty
    ]
    one = sum(parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in needed) <= 1
    return one and _is_float32(model)


def why_not_copied(model: nn.Module) -> str:
    """Return why the model can't be copied, and so not be run as a test; else empty."""
    try:
        copied(model)
    except FAILURES as error:
        return str(error) or type(error).__name__
    return ""


def _is_float32(model: nn.Module) -> bool:
    return {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()} == {torch.float32}


def check_trial(model: nn.Module, trial: Trial) -> None:
    """Raise a ValueError unless the model reproduces the file's outputs for one of the two inputs."""
    data = base64.b64decode(trial.outputs)
    if len(data) % 8:
        raise ValueError(f"trial: outputs ({len(data)} bytes) must be numbers for two inputs")
    numbers = struct.unpack(f"<{len(data) // 4}f", data)
    expected = torch.tensor(numbers, dtype=torch.float32, device="cpu").view(2, -1)
    check_copies(model)
    try:
        outputs = _outputs(model, inputs_of(tuple(trial.shape))[trial.inputs])
    except FAILURES as error:
        raise ValueError(f"the network can't take the inputs of the file's test: {error}") from error
    if outputs is None or outputs.shape != expected.shape:
        raise ValueError(f"the network has other outputs than {list(expected.shape)} for the inputs of the file's test")
    moved = _moved(outputs, expected)
    if not (moved <= trial.tolerance).any():  # both: another order of sums may turn a sign in one of them
        raise ValueError(
            "the network computes something other than the saved one: all tensors fit, but its outputs are off by "
            f"{moved.min():.0%} of the largest. A module, one of its arguments or a function in a forward differs, or "
            "the network reads the weight of a layer that it also calls (the file has only the quantized weight)"
        )


def _moved_by_rounding(model: nn.Module, inputs: Tensor, outputs: Tensor) -> Tensor:
    others = [_outputs(model, inputs.double())]
    noise = torch.Generator("cpu").manual_seed(1)
    for _ in range(2):
        drawn = torch.rand(inputs.shape, generator=noise, dtype=torch.float32, device="cpu")
        scale = 1 + ROUNDING * (drawn * 2 - 1)
        others.append(_outputs(model, inputs * scale))
    return torch.stack([_moved(other, outputs) for other in others if other is not None]).amax(0)


def _moved(outputs: Tensor, expected: Tensor) -> Tensor:
    """The largest difference of each output as a share of the largest number; NaN counts as 1."""
    return ((outputs - expected).abs().amax(1) / expected.abs().amax(1)).nan_to_num(1.0)


def inputs_of(shape: tuple[int, ...]) -> Tensor:
    """Return the test inputs of this shape, without the batch."""
    # Whatever dtype and device are torch's default here, they are the same numbers.
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(CANDIDATES, *shape, generator=generator, dtype=torch.float32, device="cpu")


def _outputs(model: nn.Module, inputs: Tensor) -> Tensor | None:
    """Return some numbers of each output of a copy of the model in evaluation, in the inputs' dtype; None if none.

    It runs on the CPU without autocast: bfloat16 and a GPU's TF32 err by more than the tolerance.
    """
    model = copied(model).to("cpu", inputs.dtype)
    with trial(model), torch.autocast("cpu", enabled=False):
        leaves = tree_leaves(model(inputs))
    floating = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    tensors = [leaf for leaf in floating if leaf.ndim and len(leaf) == len(inputs)]
    if not tensors:
        return None
    flat = torch.cat([tensor.reshape(len(inputs), -1) for tensor in tensors], 1).float().cpu()
    count = flat.shape[1]
    places = torch.linspace(0, count - 1, min(count, NUMBERS), dtype=torch.float32, device="cpu")
    return flat[:, places.round().long()] if count else None
