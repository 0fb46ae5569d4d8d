"""Activations of binary networks, with learned thresholds for the next sign, and how networks build activations.

A network takes `activation`, which is called with the number of channels to make a module, such as `RPReLU` or
`functools.partial(Maxout, negative=0.5)`. The classes of `torch.nn` can be given as they are: `build_activation` knows
which of them take the number of channels.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ground.checks import check_at_least_one

Activation = Callable[..., nn.Module]


def build_activation(activation: Activation, channels: int) -> nn.Module:
    """Build the module that `activation` makes for `channels` channels.

    Of torch's own activations, `nn.PReLU` is called with the number of channels. All others (`nn.ReLU`, `nn.Hardtanh`,
    `nn.LeakyReLU`, …) are called without arguments, because their first argument means something else; the same holds
    for a `functools.partial` of them, as a config with ``_partial_: true`` makes it. So is one of `nn.PReLU` that gives
    ``num_parameters``. Everything else is called with the number of channels.

    Raises:
        TypeError: `activation` makes something other than a module, or is a module itself.
    """
    kind = activation.func if isinstance(activation, partial) else activation
    if isinstance(activation, nn.Module):
        raise TypeError(f"activation (={activation}) must make a module, not be one: pass the class or a partial")
    without_channels = isinstance(kind, type) and kind.__module__ == nn.ReLU.__module__ and kind is not nn.PReLU
    if kind is nn.PReLU and isinstance(activation, partial):
        without_channels = bool(activation.args) or "num_parameters" in activation.keywords
    module = activation() if without_channels else activation(channels)
    if not isinstance(module, nn.Module):
        made = type(module).__name__
        raise TypeError(f"activation (={activation}) must make a torch.nn.Module from a number of channels, not {made}")
    return module


class LearnedBias(nn.Module):
    """Adds a learned value to each channel: ``y = x + b_c``, with b initialised to 0.

    ReActNet (arXiv:2003.03488) builds its RPReLU from two. The one before its sign belongs to the input quantizer.

    Args:
        channels: of the input, its dimension 1.

    Raises:
        ValueError: `channels` is less than 1, or the input has another number of channels.

    Example:
        >>> LearnedBias(3)(torch.ones(1, 3, 2, 2)).sum().item()
        12.0
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        check_at_least_one(channels=channels)
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, *spatial) to the same shape and dtype."""
        return input + per_channel(self.bias, input)

    def extra_repr(self) -> str:
        return str(self.bias.numel())


class RPReLU(nn.Module):
    """ReAct-PReLU: ``y = PReLU_c(x + m1_c) + m2_c`` with ``PReLU_c(v) = v if v > 0 else slope_c · v``.

    Everything is learned: both shifts start at 0, the slopes at 0.25. At ``x + m1_c = 0`` the gradient takes the slope.
    From ReActNet, arXiv:2003.03488, which writes the first shift with a minus sign; the authors' code adds it, as here.

    Args:
        channels: of the input, its dimension 1.
        slope: the slopes' initial value.

    Raises:
        ValueError: `channels` is less than 1, or the input has another number of channels.

    Example:
        >>> RPReLU(1)(torch.tensor([[[-4.0, 4.0]]]))
        tensor([[[-1.,  4.]]], grad_fn=<AddBackward0>)
    """

    def __init__(self, channels: int, slope: float = 0.25) -> None:
        super().__init__()
        check_at_least_one(channels=channels)
        self.before = LearnedBias(channels)
        self.slope = nn.Parameter(torch.full((channels,), slope))
        self.after = LearnedBias(channels)

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, *spatial) to the same shape and dtype."""
        return rprelu(input, self.before.bias, self.slope, self.after.bias)


def rprelu(input: Tensor, before: Tensor, slope: Tensor, after: Tensor) -> Tensor:
    """``PReLU_c(x + before_c) + after_c`` with the slopes ``slope_c``."""
    shifted = F.prelu(input + per_channel(before, input), slope.to(input.dtype))
    return shifted + per_channel(after, input)


class Maxout(nn.Module):
    """Two learned slopes: ``y = gamma+_c · relu(x) − gamma-_c · relu(−x)``.

    From AdaBin, arXiv:2208.08084. At ``x = 0`` no gradient passes to x.

    Args:
        channels: of the input, its dimension 1.
        positive: the initial value of gamma+, the slope above 0.
        negative: the initial value of gamma-, the slope below 0.

    Raises:
        ValueError: `channels` is less than 1, or the input has another number of channels.

    Example:
        >>> Maxout(1)(torch.tensor([[[-4.0, 4.0]]]))
        tensor([[[-1.,  4.]]], grad_fn=<SubBackward0>)
    """

    def __init__(self, channels: int, positive: float = 1.0, negative: float = 0.25) -> None:
        super().__init__()
        check_at_least_one(channels=channels)
        self.positive = nn.Parameter(torch.full((channels,), positive))
        self.negative = nn.Parameter(torch.full((channels,), negative))

    def forward(self, input: Tensor) -> Tensor:
        """(N, C, *spatial) to the same shape and dtype."""
        return maxout(input, self.positive, self.negative)

    def extra_repr(self) -> str:
        return str(self.positive.numel())


def maxout(input: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """``positive_c · relu(x) − negative_c · relu(−x)``."""
    above = per_channel(positive, input) * F.relu(input)
    return above - per_channel(negative, input) * F.relu(-input)


def per_channel(parameter: Tensor, input: Tensor) -> Tensor:
    """`parameter` (C,) in the shape and dtype for computing with `input` (N, C, *spatial)."""
    channels = parameter.numel()
    # A single channel would be broadcast silently.
    if input.dim() < 2 or input.shape[1] != channels:
        raise ValueError(f"input (of shape {tuple(input.shape)}) must have channels (={channels}) in its dimension 1")
    return parameter.to(input.dtype).view(-1, *[1] * (input.dim() - 2))
