"""Floating-point operations of convolutions of signs, codes and numbers, and of their gradients.

`torch.compile` weighs with them what is computed again and what is kept (``activation_memory_budget``). The gradients
and convolutions of codes and numbers count as the float ones that they replace; a convolution of signs, which takes 64
at once, as a 64th of one: papers count bit operations so. A module of its own, because torch's one imports Triton,
which takes as long as all of qconv.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from . import operators as _operators, sign_conv as _numbers, sign_gradients as _gradients  # noqa: F401
from .bits import WORD


def _flops(grad_output: Sequence[int], fan_in: int, kernel_size: Sequence[int]) -> int:
    batch, channels, height, width = grad_output
    return 2 * batch * channels * height * width * fan_in * kernel_size[0] * kernel_size[1]


@register_flop_formula(torch.ops.qconv.sign_grad_input)
def _flops_of_input(grad_output: Any, weight: Any, scale: Any, in_channels: int, *_: Any, **__: Any) -> int:
    return _flops(grad_output, in_channels // weight[0], weight[2:4])


@register_flop_formula(torch.ops.qconv.sign_grad_weight)
def _flops_of_weight(grad_output: Any, input: Any, in_channels: int, kernel_size: Any, *rest: Any, **_: Any) -> int:
    return _flops(grad_output, in_channels // rest[3], kernel_size)


@register_flop_formula(torch.ops.qconv.binary_conv2d)
def _flops_of_signs(
    input: Any, weight: Any, tap_sums: Any, in_channels: int, *_: Any, out_shape: Any, **__: Any
) -> int:
    return _flops(out_shape, in_channels // weight[0], weight[2:4]) // WORD


@register_flop_formula(torch.ops.qconv.sign_conv2d)
def _flops_of_numbers(input: Any, weight: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    return _flops(out_shape, input[1] // weight[0], weight[2:4])
