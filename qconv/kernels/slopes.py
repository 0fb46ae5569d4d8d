"""The gradient through a surrogate of the sign, as a `torch.library` operator with a definition and kernels.

``grad · max(2 − 2|input|, 0)``, which `approx_sign_backward_` writes over ``grad``. Torch's operators read and write
memory five times for it, a kernel once. The kernel in C takes float32 and bfloat16 on the CPU, of the same strides and
without gaps. Its result is the definition's bit for bit, but for the bits of a NaN, for any number of threads and any
instruction set. That in Triton (`gpu.passes`) takes float16, too.
"""

import torch
from torch import Tensor

from .gpu import by_triton
from .library import LIBRARY
from .native import GRAIN, best, kernels
from .native_bits import without_gaps

_TYPES = {torch.float32: 0, torch.bfloat16: 1}
LIBRARY.define("approx_sign_backward_(Tensor(a!) grad, Tensor input) -> ()")


def approx_sign_backward_(grad: Tensor, input: Tensor) -> None:
    """Multiply ``grad``, in place, by ``max(2 − 2|input|, 0)``, which is NaN where ``input`` is.

    Raises:
        ValueError: another shape or dtype.

    Example:
        >>> grad = torch.ones(4)
        >>> approx_sign_backward_(grad, torch.tensor([-2.0, -0.5, 0.0, 0.75]))
        >>> grad
        tensor([0.0000, 1.0000, 2.0000, 0.5000])
    """
    if (grad.shape, grad.dtype) != (input.shape, input.dtype):
        raise ValueError(
            f"grad ({grad.dtype}, {tuple(grad.shape)}) must be as input is: {input.dtype}, {tuple(input.shape)}"
        )
    grad.mul_((2 - 2 * input.abs()).clamp_(min=0))


def by_kernel(grad: Tensor, input: Tensor, output: Tensor) -> bool:
    """Write the product to ``output``, which may be ``grad``; return False if the kernel can't take the operands."""
    module = kernels()
    if module is None or not input.numel() or input.dtype not in _TYPES or not without_gaps(input):
        return False
    if any(
        (x.shape, x.stride(), x.dtype, x.device) != (input.shape, input.stride(), input.dtype, input.device)
        for x in (grad, output)
    ):
        return False
    addresses = (x.data_ptr() for x in (grad, input, output))
    module.approx_sign_backward(*addresses, input.numel(), _TYPES[input.dtype], best(), GRAIN)
    return True


def _approx_sign_backward_(grad: Tensor, input: Tensor) -> None:
    if not by_kernel(grad, input, grad):
        approx_sign_backward_(grad, input)


_by_triton = by_triton("passes.approx_sign_backward_", approx_sign_backward_)


def _on_gpu(grad: Tensor, input: Tensor) -> None:
    _by_triton(grad, input)


LIBRARY.impl("approx_sign_backward_", approx_sign_backward_, "CompositeExplicitAutograd")
LIBRARY.impl("approx_sign_backward_", _on_gpu, "CUDA")
LIBRARY.impl("approx_sign_backward_", _approx_sign_backward_, "CPU")
torch.library.register_fake("qconv::approx_sign_backward_", approx_sign_backward_, lib=LIBRARY)
