"""Float convolutions of frozen models whose filters have one magnitude each: of binary weights on float inputs."""

import torch
from torch import Tensor, nn

from ..kernels.look_up import is_fast, weight_pays
from ..kernels.operators import pack_weight, unpack_weight
from ..kernels.sizes import Sizes
from ..kernels.window import Window
from ..layers.conv import sides_of
from .around import Padded


class SignConv2d(nn.Module):
    """Convolution of floats with a weight of signs times a scale for each filter, by look-up (`qconv.kernels.look_up`).

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
        """(N, C_in, H, W), or (C_in, H, W), to the same with C_out, channels_last."""
        if input.ndim == 3:
            return self.forward(input.unsqueeze(0)).squeeze(0)
        stride, padding, dilation, _, value = self.window
        operands = input, self.weight, self.scale, self.bias, self.channels[1]
        return torch.ops.qconv.sign_conv2d(*operands, stride, padding, dilation, value)

    def as_float(self) -> nn.Module:
        """Return the same convolution as torch's, with the same numbers for a weight."""
        stride, sides, dilation, groups, _ = self.window
        padding = (sides[2], sides[0]) if self.window.is_symmetric else (0, 0)
        kernel = tuple(self.weight.shape[2:4])
        conv = nn.Conv2d(*self.channels, kernel, stride, padding, dilation, groups, self.bias is not None)  # pyright: ignore
        with torch.no_grad():
            conv.weight.copy_(unpack_weight(self.weight, *self.channels) * self.scale.view(-1, 1, 1, 1))
            if conv.bias is not None and self.bias is not None:
                conv.bias.copy_(self.bias)
        conv.requires_grad_(False)
        return conv if self.window.is_symmetric else Padded(sides, "constant", conv)

    def extra_repr(self) -> str:
        inputs, outputs = self.channels
        kernel_size = tuple(self.weight.shape[2:4])
        return ", ".join(part for part in (f"{inputs}", f"{outputs}", f"{kernel_size=}", str(self.window)) if part)


def sign_conv(conv: nn.Module | None) -> SignConv2d | Padded | None:
    """Return a convolution of signs that computes the same as a float one, up to rounding; None if there is none.

    There is none either where it would be slower, as with few channels in a group, or without a kernel for the machine.
    """
    if type(conv) is not nn.Conv2d or not is_fast():
        return None
    sides, pads_zeros = sides_of(conv), conv.padding_mode == "zeros"
    window = Window.of(conv.stride, sides if pads_zeros else (0, 0, 0, 0), conv.dilation, conv.groups)
    weight, bias = conv.weight.detach(), None if conv.bias is None else conv.bias.detach().clone()
    kernel = conv.kernel_size[0], conv.kernel_size[1]
    sizes = Sizes(1, (conv.in_channels, conv.out_channels), kernel, kernel, window)
    scale = weight.abs().flatten(1).amax(1)
    if not weight_pays(sizes) or bool((weight.abs() != scale.view(-1, 1, 1, 1)).any()):
        return None
    signs = SignConv2d(weight, window, scale, bias)
    return signs if pads_zeros else Padded(tuple(sides), conv.padding_mode, signs)
