"""BNN: sign with a straight-through gradient (Courbariaux and Hubara, arXiv:1602.02830)."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from ..ground.checks import check_flags, check_numbers
from ..quantizers.base import WEIGHT, Bounds, Levels, Quantizer, Whole
from ..quantizers.form import Form
from ..quantizers.numbers import wide
from ..quantizers.signs import passed, sign, signs_kept
from ..quantizers.stochastic import Stream
from ..quantizers.surrogates import HardClip, Make, Straight, Surrogate, chosen
from ..scheme import Factory, Scheme, named


class Sign(Quantizer):
    r"""Binary values without a scale, the quantizer of BNN for both weights and activations.

    ``x_q = sign(x)`` with ``sign(±0) = +1``; ``dx = g · d(x)`` with the surrogate's d: for BNN ``1[|x| ≤ 1]``, where
    ties at ±1 pass.

    The paper clips the gradient of activations. For weights it clips not the gradient but the latent weight, after
    every optimizer step: ``weight_clip`` is the bound in `after_step_`. BinaryNet.pytorch leaves the clipping of
    activation gradients to a Hardtanh before the sign; its latest version has lost the latent clamp, which is kept
    here. Larq's ``SteSign`` clips the weight gradient too (``surrogate=HardClip, weight_clip=1``).

    Args:
        surrogate: makes the surrogate derivative (`qconv.quantizers.surrogates`).
        weight_clip: latent weights are clamped to ``[-weight_clip, weight_clip]`` after each optimizer step; None
            leaves them.
        stochastic: in training, +1 with probability ``clamp((x + 1) / 2, 0, 1)``, the paper's equation 2, from a
            `Stream`; in evaluation the sign.
        sharded: with ``stochastic``, whether processes see different elements, as of an input, or the same, as of a
            weight.

    Raises:
        ValueError: ``weight_clip`` is not positive.
    """

    bits = 1
    signs = True
    code_dtype = torch.int8

    def __init__(
        self,
        surrogate: Callable[[], Surrogate] = HardClip,
        weight_clip: float | None = None,
        stochastic: bool = False,
        sharded: bool = True,
    ) -> None:
        super().__init__()
        check_numbers(weight_clip=weight_clip)
        check_flags(stochastic=stochastic, sharded=sharded)
        if weight_clip is not None and not weight_clip > 0:
            raise ValueError(f"weight_clip (={weight_clip}) must be positive or None")
        self.surrogate = surrogate()
        self.weight_clip = weight_clip
        self.stream = Stream(sharded) if stochastic else None
        if stochastic and sharded:
            self.roles = ("input", "grad")  # for a weight, each process would draw other signs

    def tensors(self) -> tuple[Tensor, ...]:
        drawn = self.stream.tensors() if self.stream is not None and self.training else ()
        return *self.surrogate.tensors(), *drawn

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        if self.stream is None or not self._is_drawn(tensors):
            return Whole(sign(x))
        key, step = tensors[-2:]
        # +1 where u is below (x + 1) / 2, so that x = −1 is never +1; sign(0) is +1, hence the two minus signs.
        above = (wide(x) + 1) / 2 - self.stream.uniform(x, key, step)  # of the layout of x, its first operand
        return Whole(-sign(above.neg_()).to(x.dtype))

    def levels(self, *tensors: Tensor) -> Levels:
        return Levels(-1, 1, torch.ones(()), "own" if self._is_drawn(tensors) else "sign")

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        count = len(self.surrogate.tensors())
        return self.surrogate.backward(grad, x, *tensors[:count]), *(None,) * len(tensors)

    @property
    def is_continuous(self) -> bool:
        return self.surrogate.is_continuous

    @property
    def needs_input(self) -> bool:
        return self.surrogate.needs_input

    def keep(self, x: Tensor, form: Form, *tensors: Tensor) -> tuple[Tensor, ...]:
        drawn = self.whole(x, *tensors).values if self._is_drawn(tensors) else None
        return signs_kept(x, form, self.surrogate.ends(x.dtype), drawn)

    def restore(self, kept: Sequence[Tensor], form: Form, *tensors: Tensor) -> Whole:
        return Whole(form.signs(kept[0]))

    def backward_kept(
        self, grad: Tensor, kept: Sequence[Tensor], form: Form, *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        return passed(grad, kept[1:], form), *(None for _ in tensors)

    def _is_drawn(self, tensors: tuple[Tensor, ...]) -> bool:
        """Whether these are the training tensors, with signs drawn at random."""
        return len(tensors) > len(self.surrogate.tensors())

    @property
    def bounds(self) -> Bounds:
        return {} if self.weight_clip is None else {WEIGHT: (-self.weight_clip, self.weight_clip)}

    def set_progress_(self, progress: float, x: Tensor | None) -> None:
        self.surrogate.set_progress_(progress)

    def extra_repr(self) -> str:
        return f"weight_clip={self.weight_clip}"


@named
def bnn(
    padding_value: int = 0,
    *,
    stochastic: bool = False,
    surrogate: Make | None = None,
    weight_surrogate: Make | None = None,
) -> Scheme:
    """BNN, W1A1: signs without a scale (arXiv:1602.02830).

    The gradient of the input passes where ``|x| <= 1``, the weight's everywhere; latent weights are clamped to [-1, 1]
    after each optimizer step (`qconv.after_every_step`). The authors make the last layer binary too
    (``skip=("first",)``). ``stochastic`` draws the signs of the input at random in training, as in some of the paper's
    experiments, but never the weight's.

    Raises:
        TypeError: ``surrogate`` or ``weight_surrogate`` makes no surrogate.
    """
    return Scheme(
        input=partial(Sign, chosen(surrogate, HardClip), stochastic=stochastic),
        weight=partial(Sign, chosen(weight_surrogate, Straight), weight_clip=1.0),
        padding_value=padding_value,
    )


def signs_or_float(
    weight: Factory, surrogate: Make | None, published: Make, padding_value: int, binary_input: bool
) -> Scheme:
    """Return a scheme with binary weights and inputs; ``binary_input=False`` leaves the input float.

    Raises:
        ValueError: a padding value or a surrogate for an input that is float.
        TypeError: ``binary_input`` is not a bool.
    """
    check_flags(binary_input=binary_input)
    if binary_input:
        return Scheme(input=partial(Sign, chosen(surrogate, published)), weight=weight, padding_value=padding_value)
    if padding_value != 0:
        raise ValueError(f"padding_value (={padding_value}) must be 0 with binary_input=False")
    if surrogate is not None:
        raise ValueError(f"surrogate (={surrogate}) must be None with binary_input=False: use weight_surrogate")
    return Scheme(weight=weight)
