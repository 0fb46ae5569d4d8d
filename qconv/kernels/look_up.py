"""Convolutions of numbers with signs by the C kernel with lookup tables."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from . import native
from .native import INSTRUCTION_SETS, best
from .sizes import Sizes


@lru_cache(maxsize=4096)
def _numbers(sizes: Sizes, instruction_set: int, dtype: torch.dtype) -> tuple[int, ...]:
    """Return the numbers for a call of the kernels."""
    groups = sizes.window.groups
    left, _, top, _ = sizes.window.padding
    return (
        *(sizes.batch, *sizes.input_size, groups, sizes.words, sizes.channels[0] // groups),
        *(sizes.packed[1], sizes.channels[1] // groups, *sizes.kernel_size),
        *(*sizes.window.stride, *sizes.window.dilation, top, left, *sizes.output[2:]),
        *(sizes.window.padding_value, instruction_set, int(dtype == torch.bfloat16)),
    )


@lru_cache(maxsize=4096)
def weight_pays(sizes: Sizes) -> bool:
    """Whether lookup is faster than multiplication for the output and the input's gradient, and there is a kernel.

    As measured with AVX-512 and AVX2, for one image and more, channels_last. A table costs as much as some look-ups:
    it has to be used by enough taps and channels, and by more where the channels of a group do not fill its vectors.
    The rows of a linear layer, each an image of one pixel, are looked up together: 16 and more take less time from
    512 × 512 weights on, 128 from 256 × 256 on; one row does from 2^22 weights on only, as a frozen layer asks.
    """
    groups = sizes.window.groups
    fan = min(sizes.channels) // groups
    uses = fan * sizes.kernel_size[0] * sizes.kernel_size[1]
    return fan >= 16 and uses >= (128 if groups == 1 else 256)


@lru_cache(maxsize=4096)
def input_pays(sizes: Sizes) -> bool:
    """Whether lookup is faster than the definition for the weight's gradient, as measured with AVX-512.

    The images of a batch are taken five at a time.
    """
    groups = sizes.window.groups
    fan_in, fan_out = sizes.channels[0] // groups, sizes.channels[1] // groups
    uses = fan_in * sizes.kernel_size[0] * sizes.kernel_size[1]
    return min(fan_in, fan_out) >= 16 and uses >= 128 and sizes.batch >= 4 and sizes.products >= 1 << 22


def is_fast() -> bool:
    """Whether this machine has a kernel."""
    return native.kernels() is not None and INSTRUCTION_SETS[best()] != "portable"


def _kernel(numbers: Tensor, pays: bool) -> tuple[Any, int] | None:
    """Return the compiled module and the number of the instruction set; None where the definition has to run."""
    module = native.kernels()
    if module is None or not pays or numbers.dtype not in (torch.float32, torch.bfloat16):
        return None
    used = best()
    return None if INSTRUCTION_SETS[used] == "portable" else (module, used)


def _address(operand: Tensor | None) -> int:
    return 0 if operand is None else operand.data_ptr()


def look_up_conv2d(
    input: Tensor,
    sizes: Sizes,
    weight: Tensor,
    scale: Tensor | None = None,
    bias: Tensor | None = None,
    always: bool = False,
) -> Tensor | None:
    """`qconv.kernels.sign_conv.sign_conv2d` by the kernel; None if there is none, or the definition is faster.

    With ``always`` the kernel is used even where it is slower.
    """
    found = _kernel(input, always or weight_pays(sizes))
    if found is None:
        return None
    module, used = found
    output = torch.empty(sizes.output, dtype=input.dtype, device="cpu", memory_format=torch.channels_last)
    if output.numel():
        padded, sizes = sizes.padded_but_zeros(input)
        scale, bias = (None if each is None else each.contiguous() for each in (scale, bias))
        padded = padded.contiguous(memory_format=torch.channels_last)
        operands = padded, weight.contiguous(), scale, bias, None, output
        module.sign_conv2d(*map(_address, operands), *_numbers(sizes, used, input.dtype), torch.get_num_threads())
    return output


def look_up_grad_input(
    grad_output: Tensor,
    sizes: Sizes,
    weight: Tensor,
    scale: Tensor | None = None,
    passes: Tensor | None = None,
    always: bool = False,
) -> Tensor | None:
    """`sign_grad_input` by the kernel; None and ``always`` as in `look_up_conv2d`."""
    found = _kernel(grad_output, always or weight_pays(sizes))
    if found is None:
        return None
    module, used = found
    output = torch.empty(sizes.input, dtype=grad_output.dtype, device="cpu", memory_format=torch.channels_last)
    if output.numel():
        scale, passes = (None if each is None else each.contiguous() for each in (scale, passes))
        grad_output = grad_output.contiguous(memory_format=torch.channels_last)
        operands = grad_output, weight.contiguous(), scale, None, passes, output
        numbers = _numbers(sizes, used, grad_output.dtype)
        module.sign_grad_input(*map(_address, operands), *numbers, torch.get_num_threads())
    return output


def look_up_grad_weight(grad_output: Tensor, sizes: Sizes, input: Tensor, always: bool = False) -> Tensor | None:
    """`sign_grad_weight` by the kernel; None and ``always`` as in `look_up_conv2d`."""
    found = _kernel(grad_output, always or input_pays(sizes))
    if found is None:
        return None
    module, used = found
    if not sizes.batch:
        return grad_output.new_zeros(sizes.weight)
    output = grad_output.new_empty(sizes.weight)
    grad_output = grad_output.contiguous(memory_format=torch.channels_last)
    operands = grad_output, input.contiguous(), None, None, None, output
    numbers = _numbers(sizes, used, grad_output.dtype)
    module.sign_grad_weight(*map(_address, operands), *numbers, torch.get_num_threads())
    return output
