"""Random numbers for stochastic rounding, from a counter instead of a generator's state.

A number is a hash of (key, optimizer step, index of the element). So a resumed run, a recomputed forward and a process
of another rank draw the same numbers wherever they ask, and nothing is drawn from torch's own generator. Batches whose
gradients are accumulated for one step draw the same numbers, too.
"""

import torch
from torch import Tensor

from ..ground.processes import rank_and_count
from .part import Part

_MASK = 0xFFFFFFFF


class Stream(Part):
    """The key of a layer's numbers, drawn once from torch's generator, and the optimizer step; both are saved.

    Args:
        sharded: whether each process has other elements (inputs and gradients of its part of the batch) or all have the
            same (weights).
    """

    casts = ("key", "step")
    key: Tensor
    step: Tensor

    def __init__(self, sharded: bool) -> None:
        super().__init__()
        self.sharded = sharded
        self.register_buffer("key", torch.randint(2**31, ()))
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def extra_repr(self) -> str:
        return ""  # its quantizer tells it

    def tensors(self) -> tuple[Tensor, ...]:
        """The key and the optimizer step."""
        return self.key, self.step

    def after_step_(self) -> None:
        """Advance to the numbers of the next optimizer step."""
        self.step.add_(1)

    def uniform(self, x: Tensor, key: Tensor, step: Tensor) -> Tensor:
        """Return one number in [0, 1) for each element of ``x``, in float32."""
        rank, processes = rank_and_count() if self.sharded else (0, 1)
        return uniform(x.shape, key, step, x.device, rank, processes)


def uniform(
    shape: torch.Size, key: Tensor, step: Tensor, device: torch.device, first: int = 0, stride: int = 1
) -> Tensor:
    """Return numbers of the stream ``(key, step)`` for a tensor: multiples of 2^-24 in [0, 1), in float32.

    Sample i of the tensor, in dimension 0, is sample ``first + stride · i`` of the stream. `Stream` deals samples to
    processes in turn, so no two of them share a number, however many samples each has. The hash is two rounds of a
    32-bit mixer (multiply and xor-shift), one keyed by ``key`` and one by ``step``.
    """
    samples = shape[0] if shape else 1
    per_sample = shape.numel() // max(samples, 1)
    sample = torch.arange(samples, dtype=torch.long, device=device) * stride + first
    index = sample[:, None] * per_sample + torch.arange(per_sample, dtype=torch.long, device=device)
    step_key = _mix(step.to(device) + 0x5851F42D)
    mixed = _mix(_mix(index ^ _mix(key.to(device))) ^ step_key)
    return (mixed >> 8).float().mul_(2.0**-24).view(shape)


def _mix(x: Tensor) -> Tensor:
    # 64-bit integers that hold 32 bits: both factors are below 2^31, so no product overflows.
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _MASK
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _MASK
    return x ^ (x >> 15)
