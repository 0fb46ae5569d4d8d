"""Quantization of a random share of the elements."""

from collections.abc import Callable

import torch
from torch import Tensor

from .base import Quantizer
from .flags import SHARE
from .observers import Observer
from .part import Rule
from .stochastic import Stream


class Mixed(Quantizer):
    r"""Quantizes a random share of the elements; the share grows from 0 to 1 with `set_progress_`.

    ``x_q = Q(x)`` where ``u < progress``, with u from [0, 1) for each element, else x, which is clipped to [−1, 1] if Q
    gives signs. A weight's u stay the same, so an element that is quantized once stays so; those of an input are drawn
    again at each optimizer step (`Stream`). In evaluation all elements are quantized.

    ``dx`` is Q's of the gradients of its elements, and ``g`` of the others, 0 where they are clipped; Q's learned
    tensors get the gradients of its elements. A schedule of Q stays at its beginning.

    It follows StoMPP (arXiv:2601.22660), stochastic masked partial progressive binarization. There a quantized element
    has no gradient, or Q's as an option; and some elements of a mask are drawn again from time to time.

    Args:
        quantizer: makes Q.
        is_weight: whether it is for a weight, which has the same u in all processes.

    Raises:
        ValueError: Q is for another role, or replaces the weight.
    """

    share: Tensor

    def __init__(self, quantizer: Callable[[], Quantizer], is_weight: bool) -> None:
        super().__init__()
        self.quantizer = quantizer()
        if self.quantizer.replaces_weight:
            raise ValueError(f"quantizer (={self.quantizer}) must not be one whose learned tensors replace the weight")
        role = "weight" if is_weight else "input"
        if role not in self.quantizer.roles:
            raise ValueError(f"quantizer (={self.quantizer}) must be one for a{'n' * (not is_weight)} {role}")
        self.roles = (role,)
        self.is_weight = is_weight
        self.stream = Stream(sharded=not is_weight)
        self.register_buffer("share", torch.zeros(()))

    @property
    def bits(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The bits of the quantizer."""
        return self.quantizer.bits

    @property
    def is_final(self) -> bool:
        """Always False: evaluation differs from training."""
        return False

    @property
    def at_work(self) -> Quantizer:
        """This one in training, in which it quantizes only a share; in evaluation its quantizer."""
        return self if self.training else self.quantizer.at_work

    @property
    def splits_at_zero(self) -> bool:
        return self.quantizer.splits_at_zero

    @property
    def needs_data(self) -> bool:
        return self.quantizer.needs_data

    @property
    def calibrated(self) -> bool:
        """Whether the quantizer is calibrated."""
        return self.quantizer.calibrated

    @calibrated.setter
    def calibrated(self, value: bool) -> None:
        self.quantizer.calibrated = value

    @property
    def is_fresh(self) -> bool:
        return self.quantizer.is_fresh

    def reads_fresh(self) -> bool:
        return self.quantizer.reads_fresh()

    def settle_(self) -> None:
        self.quantizer.settle_()

    def tensors(self) -> tuple[Tensor, ...]:
        """The quantizer's tensors, and in training the share and the random stream."""
        return *self.quantizer.tensors(), *((self.share, *self.stream.tensors()) if self.training else ())

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        own, chance = self._split(tensors)
        x_q = self.quantizer.quantize(x, *own)
        if not chance:
            return x_q
        rest = x.clamp(-1, 1) if self.quantizer.signs else x
        return torch.where(self._is_quantized(x, *chance), x_q, rest)

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        own, chance = self._split(tensors)
        if not chance:
            return self.quantizer.backward(grad, x, *own)
        is_quantized = self._is_quantized(x, *chance)
        passes = ~is_quantized
        if self.quantizer.signs:
            passes &= x.abs() <= 1
        through = torch.where(passes, grad, 0.0)
        grad_x, *others = self.quantizer.backward(torch.where(is_quantized, grad, 0.0), x, *own)
        return through if grad_x is None else grad_x + through, *others, None, None, None

    def _split(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the quantizer's tensors, and in training those of the random share."""
        count = len(self.quantizer.tensors())
        return tensors[:count], tensors[count:]

    def _is_quantized(self, x: Tensor, share: Tensor, key: Tensor, step: Tensor) -> Tensor:
        mask = torch.empty_like(x, dtype=torch.bool)  # in the memory format of x, and so is what is chosen by it
        return mask.copy_(self.stream.uniform(x, key, step) < share)

    def build(self, channels: int, dim: int) -> None:
        self.quantizer.build(channels, dim)

    def initialize(self, x: Tensor) -> None:
        self.quantizer.initialize(x)

    def search_(self, x: Tensor) -> None:
        self.quantizer.search_(x)

    def observer(self) -> Observer:
        return self.quantizer.observer()

    def initialize_from(self, observer: Observer) -> None:
        self.quantizer.initialize_from(observer)

    def go_on_from_(self, other: Quantizer, x: Tensor | None) -> None:
        fresh = other.quantizer if isinstance(other, Mixed) else other
        self.quantizer.go_on_from_(fresh, x)

    def set_progress_(self, progress: float, x: Tensor | None) -> None:
        self.share.fill_(progress)

    def after_step_(self, x: Tensor | None) -> None:
        self.quantizer.after_step_(x)
        if not self.is_weight:
            self.stream.after_step_()

    def rules(self) -> dict[str, Rule]:
        return {"share": SHARE}
