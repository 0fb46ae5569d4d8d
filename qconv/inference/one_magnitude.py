"""Float layers of frozen models with one magnitude per filter: binary weights with float inputs."""

import torch
from torch import Tensor, nn

from ..kernels.look_up import is_fast, weight_pays
from ..kernels.operators import pack_weight, unpack_weight
from ..kernels.sizes import Sizes
from ..kernels.window import Window
from ..layers.conv import sides_of
from .adapters import Padded

# The least weights of a linear layer that looks up; how many rows it will get is not known when it is frozen. Measured
# on one thread with 2^22 and 2^24 weights, which floats have to read from memory: for one row 0.75 to 1.1 of the float
# time with AVX-512, 1.1 to 1.5 with AVX2; from two rows on 0.35 to 0.65 and 0.5 to 0.9. With 2^18 to 2^21 weights that
# the cache holds, one row takes 1.1 to 3 times the float time, and less only from 2 rows (2^21) to 16 (2^18) on.
_LARGE = 1 << 22


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
        """(N, C_in, H, W), or (C_in, H, W), to the same with C_out, channels_last."""
        if input.ndim == 3:
            return self.forward(input.unsqueeze(0)).squeeze(0)
        stride, padding, dilation, _, value = self.window
        operands = input, self.weight, self.scale, self.bias, self.channels[1]
        return torch.ops.qconv.sign_conv2d(*operands, stride, padding, dilation, value)

    def float_weight(self) -> Tensor:
        """Return the weight, (C_out, C / groups, kh, kw)."""
        return unpack_weight(self.weight, *self.channels) * self.scale.view(-1, 1, 1, 1)

    def as_float(self) -> nn.Module:
        """Return the same convolution as torch's, with the same numbers for a weight."""
        stride, sides, dilation, groups, _ = self.window
        padding = (sides[2], sides[0]) if self.window.is_symmetric else (0, 0)
        kernel = tuple(self.weight.shape[2:4])
        conv = nn.Conv2d(*self.channels, kernel, stride, padding, dilation, groups, self.bias is not None)  # pyright: ignore
        with torch.no_grad():
            conv.weight.copy_(self.float_weight())
            if conv.bias is not None and self.bias is not None:
                conv.bias.copy_(self.bias)
        conv.requires_grad_(False)
        return conv if self.window.is_symmetric else Padded(sides, "constant", conv)

    def extra_repr(self) -> str:
        inputs, outputs = self.channels
        kernel_size = tuple(self.weight.shape[2:4])
        return ", ".join(part for part in (f"{inputs}", f"{outputs}", f"{kernel_size=}", str(self.window)) if part)


class SignConv1d(SignConv2d):
    """`SignConv2d` in one dimension: a convolution of images with one row.

    Args:
        signs: of the weight, (C_out, C / groups, k): the negative numbers are −1.
        window: of the kernel (1, k).
        scale: of the filters, (C_out,).
        bias: (C_out,); None is 0.
    """

    def __init__(self, signs: Tensor, window: Window, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__(signs.unsqueeze(-2), window, scale, bias)

    def forward(self, input: Tensor) -> Tensor:
        """(N, C_in, L), or (C_in, L), to the same with C_out."""
        if input.ndim == 2:
            return self.forward(input.unsqueeze(0)).squeeze(0)
        return super().forward(input.unsqueeze(-2)).squeeze(-2)

    def as_float(self) -> nn.Module:
        (_, stride), (left, right, _, _), (_, dilation), groups, _ = self.window
        kernel, padding = self.weight.shape[3], left if left == right else 0
        conv = nn.Conv1d(*self.channels, kernel, stride, padding, dilation, groups, self.bias is not None)
        with torch.no_grad():
            conv.weight.copy_(self.float_weight().squeeze(-2))
            if conv.bias is not None and self.bias is not None:
                conv.bias.copy_(self.bias)
        conv.requires_grad_(False)
        return conv if left == right else Padded((left, right), "constant", conv)


class SignLinear(SignConv2d):
    """Linear layer of floats with a weight of signs times a scale for each output, as a convolution of single pixels.

    Args:
        signs: of the weight, (out_features, in_features): the negative numbers are −1.
        scale: of the outputs, (out_features,).
        bias: (out_features,); None is 0.
    """

    def __init__(self, signs: Tensor, scale: Tensor, bias: Tensor | None) -> None:
        super().__init__(signs[..., None, None], Window(), scale, bias)

    def forward(self, input: Tensor) -> Tensor:
        """(*, in_features) to (*, out_features)."""
        output = super().forward(input.reshape(-1, input.shape[-1], 1, 1))
        return output.reshape(*input.shape[:-1], self.channels[1])

    def as_float(self) -> nn.Linear:
        linear = nn.Linear(*self.channels, self.bias is not None)
        with torch.no_grad():
            linear.weight.copy_(self.float_weight().flatten(1))
            if self.bias is not None:
                linear.bias.copy_(self.bias)
        return linear.requires_grad_(False)


def sign_layer(layer: nn.Module | None) -> SignConv2d | Padded | None:
    """Return a layer of signs equal to a float layer up to rounding; None if there is none.

    There is none either where it would be slower, as with few channels in a group, in a linear layer whose weight is
    small, or without a kernel for the machine.
    """
    if not is_fast():
        return None
    if type(layer) is nn.Linear:
        return _sign_linear(layer)
    return _sign_conv(layer) if type(layer) in (nn.Conv1d, nn.Conv2d) else None  # pyright: ignore[reportArgumentType]


def _sign_linear(linear: nn.Linear) -> SignLinear | None:
    sizes = Sizes(1, (linear.in_features, linear.out_features), (1, 1), (1, 1), Window())
    scale = _scale(linear.weight)
    if linear.weight.numel() < _LARGE or not weight_pays(sizes) or scale is None:
        return None
    return SignLinear(linear.weight.detach(), scale, _copy(linear.bias))


def _sign_conv(conv: nn.Conv1d | nn.Conv2d) -> SignConv2d | Padded | None:
    row = (1,) * (2 - len(conv.kernel_size))  # a signal is an image of one row
    kernel, sides = (*row, *conv.kernel_size), sides_of(conv)
    pads_zeros = conv.padding_mode == "zeros"
    padding = (*sides, *(0 for _ in (*row, *row))) if pads_zeros else (0, 0, 0, 0)
    window = Window.of((*row, *conv.stride), padding, (*row, *conv.dilation), conv.groups)
    sizes = Sizes(1, (conv.in_channels, conv.out_channels), kernel, kernel, window)  # pyright: ignore
    scale = _scale(conv.weight)
    if not weight_pays(sizes) or scale is None:
        return None
    signs = (SignConv1d if row else SignConv2d)(conv.weight.detach(), window, scale, _copy(conv.bias))
    return signs if pads_zeros else Padded(tuple(sides), conv.padding_mode, signs)


def _scale(weight: Tensor) -> Tensor | None:
    """Return the magnitude of each filter; None if a filter has several."""
    magnitudes = weight.detach().abs().flatten(1)
    scale = magnitudes.amax(1)
    return None if bool((magnitudes != scale.view(-1, 1)).any()) else scale


def _copy(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().clone()
