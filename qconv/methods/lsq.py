"""LSQ: uniform levels with a learned step (arXiv:1902.08153)."""

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from ..ground.checks import check_bits, check_choice, check_flags, check_numbers
from ..quantizers.base import Levels, Whole, is_plain
from ..quantizers.chosen_sign import ChosenSign, MagnitudesAndValues, least_error
from ..quantizers.filters import filter_scale
from ..quantizers.from_data import FromData
from ..quantizers.kept_codes import Coded, Coding
from ..quantizers.numbers import SMALLEST, learned, positive, scalars, wide
from ..quantizers.observers import Observer
from ..quantizers.part import Rule
from ..quantizers.rounding import Rounding
from ..quantizers.signs import sign
from ..scheme import Scheme, named, of_input

GradScale = Literal["paper", "numel"]
SEARCH_POWER = 4
"""The power of the error for which steps are searched: above 2, because clipped values shift a layer's outputs."""


def ends_of(bits: int, signed: bool) -> tuple[int, int]:
    """The smallest and the largest whole number of ``bits``; −1 and 1, a sign, for a signed one of one bit."""
    if not signed:
        return 0, 2**bits - 1
    return (-1, 1) if bits == 1 else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


def round_levels(z: Tensor, low: int, high: int) -> Tensor:
    """``round(clamp(z, low, high))``, half to even; the sign if the limits are −1 and 1, the two levels of one bit."""
    return sign(z) if (low, high) == (-1, 1) else z.clamp(low, high).round_()


def step_backward(
    grad: Tensor, x: Tensor, step: Tensor, low: int, high: int, strict: bool, factor: float
) -> tuple[Tensor, Tensor]:
    """Return the gradient of ``x`` through the levels, and ``factor`` times that of the step."""
    if is_plain(x) and (low, high) != (-1, 1) and not torch.compiler.is_compiling():
        return torch.ops.qconv.step_backward(grad, x, step, low, high, strict, factor, SMALLEST)
    z = wide(x) / positive(step)
    clamped = z.clamp(low, high)
    between = (z > low) & (z < high)
    passes = between if strict else clamped == z
    terms = grad.to(z.dtype) * (round_levels(z, low, high) - clamped * between)
    return grad * passes, terms.sum_to_size(step.shape) * factor


def features(x: Tensor) -> int:
    """The number of elements of one sample; a tensor of one dimension is one sample."""
    return x.numel() // max(x.shape[0], 1) if x.ndim > 1 else x.numel()


def clamp_step(step: Tensor, dtype: torch.dtype) -> Tensor:
    """``step`` between `SMALLEST` and the largest number of ``dtype``; the inf of an infinite weight is not hidden."""
    return torch.where(step.isinf(), step, step.clamp(SMALLEST, torch.finfo(dtype).max))


class LSQ(Coded):
    r"""Weights with a learned step s: LSQ.

    ``w_q = s · round(clamp(w / s, −Q_n, Q_p))``, half to even, with ``Q_n = 2^(b−1)`` and ``Q_p = 2^(b−1) − 1``. With
    one bit, where Q_p would be 0: ``w_q = s · sign(w)``, ``sign(±0) = +1``, and ``Q_n = Q_p = 1`` in what follows.
    With z = w / s:

    - ``dw = g · 1[−Q_n ≤ z ≤ Q_p]``. The paper's interval is open (``strict=True``). In hustzxd's code the limits pass;
      in lsq-net's torch's clamp decides, which passed them in the versions of its time and does not in 2.15.
    - ``ds = c · Σ g · (−Q_n where z ≤ −Q_n; Q_p where z ≥ Q_p; round(z) − z between)``, at the limits as in the paper.
      lsq-net has 0 there if the clamp passes. With one bit sign(z) stands for round(z).
    - ``c = 1 / √(N · Q_p)``, N the number of weights that share the step. ``grad_scale="numel"`` takes all weights of
      the layer with a step for each filter, too, as lsq-net does.

    s starts at ``2 · mean |w| / √Q_p``, with one bit at ``mean |w|``, over the layer or over each filter; a mean of
    zero gives the smallest step. That is meant for training: `qconv.calibrate` starts s where the mean of
    ``(w_q − w)^4`` is least, among 32 steps that end the levels at 1/32, 2/32, … 1 of the largest magnitude.
    After each optimizer step s is at least 2^-20. A filter of zeros gives zeros, with one bit s. Latent weights are not
    clipped.

    ±inf gives the end levels, once s is finite; NaN gives NaN (with one bit ±s), no gradient, and a NaN in ds. The
    paper decays s as the weights; hustzxd's code does not. Its first and last layer have 8 bits. The paper's numbers
    are for ResNet-18 on ImageNet, 67.6, 70.2 and 71.1 % with 2, 3 and 4 bits; 93.42, 93.89 and 94.26 % of
    VGG-small on CIFAR-10 are hustzxd's, with ``grad_scale="numel"``.

    Args:
        bits: 1 to 8.
        per_channel: a step for each filter instead of one for the layer.
        grad_scale: ``"paper"`` or ``"numel"``.
        strict: the open interval of the paper in dw.

    Raises:
        ValueError: ``bits`` or ``grad_scale`` out of range, or a step that is not positive in a checkpoint.
    """

    roles = ("weight",)
    learned_scales = ("step",)
    max_bits = 8
    dim: int = 0  # of what each of several steps is for
    step: nn.Parameter

    def __init__(
        self, bits: int = 4, per_channel: bool = False, grad_scale: GradScale = "paper", strict: bool = False
    ) -> None:
        super().__init__()
        self.bits = check_bits("bits", bits, 1, self.max_bits)
        check_choice("grad_scale", grad_scale, "paper", "numel")
        check_flags(per_channel=per_channel, strict=strict)
        self.per_channel = per_channel
        self.grad_scale: GradScale = grad_scale
        self.strict = strict
        self.register_parameter("step", None)

    @property
    def ends(self) -> tuple[int, int]:
        """−Q_n and Q_p."""
        return ends_of(int(self.bits), signed=True)

    @property
    def low(self) -> int:
        """−Q_n."""
        return self.ends[0]

    @property
    def high(self) -> int:
        """Q_p."""
        return self.ends[1]

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.step,) if self.per_channel else scalars(self.step)

    def sharing(self, x: Tensor) -> Tensor:
        """Reshape ``x`` to one row per step, holding the elements that share it."""
        return wide(x).unsqueeze(-1).flatten(1) if self.per_channel else wide(x).reshape(1, x.numel())

    def first_step(self, x: Tensor) -> Tensor:
        """The initial step for each row of `sharing`."""
        return self.step_of(filter_scale(self.sharing(x)).flatten())

    def step_of(self, mean: Tensor) -> Tensor:
        """The initial step for values of this mean magnitude."""
        return mean if self.bits == 1 else 2 * mean / self.high**0.5

    @torch.no_grad()
    def initialize(self, x: Tensor) -> None:
        step = clamp_step(self.first_step(x), x.dtype).to(x.dtype)
        old = self.step
        if old is None or (old.device, old.shape) != (step.device, step.shape):
            self.step = nn.Parameter(step, requires_grad=old is None or old.requires_grad)
        else:
            old.copy_(step)

    def search_(self, x: Tensor) -> None:
        self._search(self.sharing(x))

    @torch.no_grad()
    def _search(self, rows: Tensor) -> None:
        """Set the step of each row to that of the least error; of zeros and infinities it stays."""
        step, _ = least_error(wide(rows), *self.ends, SEARCH_POWER)
        step = step.view(self.step.shape)
        found = (step > 0) & step.isfinite()
        self.step.copy_(torch.where(found, clamp_step(step, self.step.dtype), self.step))

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole:
        rounding = self.rounding_of(x, *tensors)
        return Whole(sign(x), positive(self._step(x, *tensors))) if rounding is None else rounding.whole(x)

    def rounding_of(self, x: Tensor, *tensors: Tensor) -> Rounding | None:
        low, high = self.ends
        return None if (low, high) == (-1, 1) else Rounding(self._step(x, *tensors), low, high, least=SMALLEST)

    @property
    def coding(self) -> Coding:
        low, high = self.ends
        return Coding(2, low=-1, unit=2) if (low, high) == (-1, 1) else Coding(high - low + 1, low=low)

    def levels(self, *tensors: Tensor) -> Levels:
        low, high = self.ends
        return Levels(low, high, positive(wide(tensors[0])), "sign" if (low, high) == (-1, 1) else "nearest")

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        (learned,) = tensors
        step, factor = self._step(x, learned), self._grad_scale(x)
        grad_x, grad_step = step_backward(grad, x, step, *self.ends, self.strict, factor)
        return grad_x, grad_step.reshape(learned.shape).to(learned.dtype)

    def _step(self, x: Tensor, step: Tensor) -> Tensor:
        """The step so that it broadcasts against ``x``."""
        step = step.to(torch.promote_types(x.dtype, torch.float32))
        return step.view(-1, *[1] * (x.ndim - 1 - self.dim % x.ndim)) if self.per_channel else step

    def _grad_scale(self, x: Tensor) -> float:
        shared = x[:1].numel() if self.per_channel and self.grad_scale == "paper" else x.numel()
        return (max(shared, 1) * self.high) ** -0.5


class LSQInput(ChosenSign, FromData[MagnitudesAndValues], LSQ):  # pyright: ignore[reportIncompatibleVariableOverride]
    r"""Activations with a learned step s: LSQ.

    ``x_q``, ``dx`` and ``ds`` are as in `LSQ`, with ``Q_n = 0`` and ``Q_p = 2^b − 1`` unless ``signed``: with one
    bit the levels are 0 and s. By default the data from which s starts decide: signed if that halves the range but has
    the smaller squared error. That is so for normal inputs, and not after a ReLU or for the small negative values of
    SiLU and Hardswish (`qconv.quantizers.chosen_sign`).

    In ``c = 1 / √(N · Q_p)`` N is the number of features of one sample that share the step, as in the paper; lsq-net
    and hustzxd count the inputs of the whole batch (``grad_scale="numel"``), so that c depends on the batch size.

    s starts at ``2 · mean |x| / √Q_p`` of the first training batch, with one bit at ``mean |x|``; `qconv.calibrate`
    starts it where the error is least, as in `LSQ`. Until then it is 1.
    It waits through a batch of equal values, and a channel of zeros keeps its step.
    ``step_init`` starts from a number instead, as lsq-net does with 1.0. After each optimizer step s is at least 2^-20.

    Zeros, infinities and NaN as in `LSQ`.

    Args:
        bits: 1 to 16.
        signed: levels on both sides of 0, for inputs that a ReLU has not cut; None chooses by the data, and is False
            with ``step_init``, where nothing comes from data.
        per_channel: a step for each channel of the input instead of one for the layer.
        grad_scale: ``"paper"`` or ``"numel"``.
        strict: the open interval of the paper in dx.
        step_init: the first step; None takes it from the first batch.

    Raises:
        ValueError: ``bits``, ``grad_scale`` or ``step_init`` out of range, or a step that is not positive in a
            checkpoint.
    """

    roles = ("input",)
    max_bits = 16

    def __init__(
        self,
        bits: int = 4,
        signed: bool | None = None,
        per_channel: bool = False,
        grad_scale: GradScale = "paper",
        strict: bool = False,
        step_init: float | None = None,
    ) -> None:
        super().__init__(bits, per_channel, grad_scale, strict)
        check_numbers(step_init=step_init)
        if step_init is None:
            self.calibrated = False
        elif not SMALLEST <= step_init < float("inf"):
            raise ValueError(f"step_init (={step_init}) must be positive: at least {SMALLEST} and finite")
        self.step_init = step_init
        self.set_sign(signed, from_data=step_init is None)
        self.dim = 1
        self.step = learned(1.0 if step_init is None else float(step_init))

    @property
    def ends(self) -> tuple[int, int]:
        return ends_of(int(self.bits), self.signed)

    def build(self, channels: int, dim: int) -> None:
        self.dim = dim
        if self.per_channel:
            self.step = nn.Parameter(self.step.detach()[:1].repeat(channels))

    def new_observer(self) -> MagnitudesAndValues:
        return MagnitudesAndValues(self.dim if self.per_channel else None)

    def initialize_from(self, observer: Observer) -> None:
        super().initialize_from(observer)
        if self.calibrated and isinstance(observer, MagnitudesAndValues):
            self._search(observer.values.kept)

    def start(self, observer: MagnitudesAndValues) -> bool:
        if self.step_init is not None or not (observer.mean > 0).any():
            return False
        if self.chooses_sign:
            self.choose_sign(observer, *(ends_of(int(self.bits), signed) for signed in (False, True)))
        step = self.step_of(observer.mean).view(self.step.shape)
        self.step.copy_(torch.where(step > 0, clamp_step(step, self.step.dtype), self.step))
        return True

    def after_sign_(self, before: tuple[int, int]) -> None:
        ratio = self.step_of(torch.ones(())) * (1 if self.bits == 1 else before[1] ** 0.5 / 2)
        self.step.copy_(clamp_step(self.step * ratio.to(self.step), self.step.dtype))

    def _grad_scale(self, x: Tensor) -> float:
        shared = features(x) if self.grad_scale == "paper" else x.numel()
        if self.grad_scale == "paper" and self.per_channel:
            shared //= max(x.shape[self.dim], 1)
        return (max(shared, 1) * self.high) ** -0.5

    def rules(self) -> dict[str, Rule]:
        return {**super().rules(), **self.rules_of_sign()}


@named
def lsq(
    weight_bits: int = 4,
    input_bits: int | None = 4,
    signed_input: bool | None = None,
    per_channel: bool = False,
    grad_scale: GradScale = "paper",
    strict: bool = False,
    step_init: float | None = None,
) -> Scheme:
    """LSQ: learned steps for weights and inputs (arXiv:1902.08153).

    ``input_bits=None`` leaves the input float; ``per_channel`` gives each filter a step, the input keeps one. The step
    of the input starts from the first training batch, or at ``step_init``. The paper starts from a trained float
    network and gives the first and the last layer 8 bits. ``signed_input`` puts the input's levels on both sides of 0;
    None, the default, leaves the choice to the data from which its step starts, for each layer.
    """
    check_bits("weight_bits", weight_bits)
    if signed_input is not None:
        check_flags(signed_input=signed_input)
    return Scheme(
        input=of_input(LSQInput, input_bits, signed_input, False, grad_scale, strict, step_init, high=16),
        weight=partial(LSQ, weight_bits, per_channel, grad_scale, strict),
    )
