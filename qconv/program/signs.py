"""Convolutions of floats by binary weights, whose sums are looked up."""

import torch
from torch import Tensor, nn

from ..kernels.look_up import is_fast, weight_pays
from ..kernels.operators import pack_weight
from ..kernels.sizes import Sizes
from ..kernels.window import Window


class SignConv2d(nn.Module):
    """Convolution of floats with signs times a scale per filter, by lookup tables (`qconv.kernels.look_up`).

    ``output = scale_o · Σ sign · input + bias_o``. The weight is stored as bits.

    Args:
        signs: of the weight, (C_out, C / groups, kh, kw): the negative numbers are −1.
        window: of the kernel.
        scale: of the filters, (C_out,).
        bias: (C_out,); None is 0.
    """

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, signs: Tensor, window: Window, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.window, self.channels = window, (signs.shape[1] * window.groups, len(signs))
        self.register_buffer("weight", pack_weight(signs, window.groups)[0])
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)

    def forward(self, input: Tensor) -> Tensor:
        """(N, C_in, H, W) to the same with C_out, channels_last."""
        stride, padding, dilation, _, value = self.window
        operands = input, self.weight, self.scale, self.bias, self.channels[1]
        return torch.ops.qconv.sign_conv2d(*operands, stride, padding, dilation, value)

    def extra_repr(self) -> str:
        inputs, outputs = self.channels
        return f"{inputs}, {outputs}, kernel_size={tuple(self.weight.shape[2:4])}, {self.window}"


def sign_conv(weight: Tensor, window: Window, bias: Tensor | None) -> SignConv2d | None:
    """Return the convolution by a weight of one magnitude in each filter; None if there is none.

    There is none either where it would be slower, as with few channels in a group, or without a kernel for the machine.
    """
    kernel = tuple(weight.shape[2:])
    magnitudes = weight.abs().flatten(1)
    scale = magnitudes.amax(1)
    sizes = Sizes(1, (weight.shape[1] * window.groups, len(weight)), kernel, kernel, window)  # pyright: ignore
    if not is_fast() or not weight_pays(sizes) or bool((magnitudes != scale.view(-1, 1)).any()):
        return None
    return SignConv2d(weight, window, scale, bias)
