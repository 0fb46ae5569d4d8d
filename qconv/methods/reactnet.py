"""ReActNet: a sign with a learned threshold for each channel (Liu et al., arXiv:2003.03488)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from ..quantizers.base import Whole
from ..quantizers.form import Form
from ..quantizers.numbers import wide
from ..quantizers.signs import Binary, passed, sign, signs_kept
from ..quantizers.surrogates import ApproxSign, HardClip, Make, Surrogate, chosen
from ..scheme import Scheme, named
from .bireal import BiRealWeight


class ReActNetInput(Binary):
    r"""Signs of the shifted input, ReActNet's RSign.

    ``x_q = sign(x + b_c)``, with a learned b for each input channel, 0 at first; ``sign(±0) = +1``. The threshold is
    −b_c. With the surrogate's ``d(v) = max(2 − 2|v|, 0)``: ``dx = g · d(x + b_c)`` and ``db_c`` is the sum of dx over
    all dimensions but the channel's. ±inf gives ±1, NaN either of them.

    In stage 1 of the authors' recipe b has weight decay, because it has four dimensions, by which they tell weights
    from other parameters. Here it is a vector.

    Args:
        surrogate: makes the surrogate derivative of the sign.
    """

    signs = True
    roles = ("input",)
    bias: nn.Parameter

    def __init__(self, surrogate: Callable[[], Surrogate] = ApproxSign) -> None:
        super().__init__(surrogate)
        self.register_parameter("bias", None)
        self.dim = 1

    def build(self, channels: int, dim: int) -> None:
        self.dim = dim
        self.bias = nn.Parameter(torch.zeros(channels))

    def tensors(self) -> tuple[Tensor, ...]:
        """The bias and the tensors of the surrogate.

        Raises:
            ValueError: before `build`.
        """
        if self.bias is None:
            raise ValueError("bias (=None) of ReActNetInput must be made for the channels: call build(channels, dim)")
        return self.bias, *super().tensors()

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        return Whole(sign(self._shifted(x, tensors[0])).to(x.dtype))

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        bias, *schedule = tensors
        shifted = self._shifted(x, bias)
        grad_shifted = self.surrogate.backward(grad.to(shifted.dtype), shifted, *schedule)
        return *self._gradients(grad_shifted, x.dtype, bias), *(None for _ in schedule)

    @property
    def needs_input(self) -> bool:
        return self.surrogate.needs_input

    def keep(self, x: Tensor, form: Form, *tensors: Tensor) -> tuple[Tensor, ...]:
        shifted = self._shifted(x, tensors[0])
        return signs_kept(shifted, form, self.surrogate.ends(shifted.dtype))

    def backward_kept(
        self, grad: Tensor, kept: Sequence[Tensor], form: Form, *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        bias, *schedule = tensors
        shifted = grad.to(torch.promote_types(form.dtype, bias.dtype))
        return *self._gradients(passed(shifted, kept[1:], form), form.dtype, bias), *(None for _ in schedule)

    def _gradients(self, grad_shifted: Tensor, dtype: torch.dtype, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and of the bias, from their sum's."""
        grad_bias = wide(grad_shifted).sum_to_size(self._per_channel(grad_shifted, bias).shape).view_as(bias)
        return grad_shifted.to(dtype), grad_bias.to(bias.dtype)

    def _per_channel(self, x: Tensor, bias: Tensor) -> Tensor:
        after = x.ndim - 1 - self.dim % x.ndim
        return bias.view(-1, *[1] * after) if after else bias

    def _shifted(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + self._per_channel(x, bias)


@named
def reactnet(
    gradient: Literal["code", "paper"] = "code",
    padding_value: int = 0,
    *,
    surrogate: Make | None = None,
    weight_surrogate: Make | None = None,
) -> Scheme:
    """ReActNet, W1A1: `bireal` with a learned threshold for each input channel (arXiv:2003.03488).

    Raises:
        ValueError: ``gradient`` is neither of the two.
        TypeError: ``surrogate`` or ``weight_surrogate`` makes no surrogate.
    """
    return Scheme(
        input=partial(ReActNetInput, chosen(surrogate, ApproxSign)),
        weight=partial(BiRealWeight, gradient, chosen(weight_surrogate, HardClip)),
        padding_value=padding_value,
    )
