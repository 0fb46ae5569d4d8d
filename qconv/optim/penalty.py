"""DeepShift-PS's weight decay as a term of the loss (arXiv:1905.13298)."""

import torch
from torch import Tensor, nn

from ..quantizers import ShiftPS


def shift_penalty(model: nn.Module) -> Tensor:
    r"""DeepShift-PS's weight decay, ``½ · Σ (2^shift)²`` over the shifts of all `ShiftPS` (arXiv:1905.13298).

    Add ``weight_decay * shift_penalty(model)`` to the loss, and give the optimizer no weight decay for shift and sign:
    ``parameter_groups(model, {"weight_quantizers": {"weight_decay": 0.0}})``. The shifts are not rounded, and the sign
    plays no part, so weights that are 0 count as well. ``dshift = ln 2 · (2^shift)²``.

    Returns:
        A scalar, float32 or wider; shared quantizers count once.

    Raises:
        ValueError: no `ShiftPS` in the model, or one whose shifts have not yet been created by a layer.
    """
    quantizers = [(name, module) for name, module in model.named_modules() if isinstance(module, ShiftPS)]
    if not quantizers:
        raise ValueError(
            f"model ({type(model).__name__}) must have a ShiftPS quantizer, as schemes.shift_ps() gives it"
        )
    for name, quantizer in quantizers:
        if quantizer.shift is None:
            raise ValueError(f"quantizer {name!r} has no shift yet: initialize it from a weight")
    shifts = {quantizer.shift: None for _, quantizer in quantizers}  # each parameter once, in order
    wide = (shift.to(torch.promote_types(shift.dtype, torch.float32)) for shift in shifts)
    return 0.5 * torch.stack([shift.exp2().square().sum() for shift in wide]).sum()
