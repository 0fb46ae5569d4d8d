"""Surrogates: replacements for the derivative of the sign. Any binary quantizer takes one as ``surrogate=``."""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from ..ground.checks import check_choice, check_flags, check_numbers, check_positive
from ..kernels import slopes as _registered  # noqa: F401
from .base import is_plain_cpu, is_wrapped, place
from .numbers import wide, within
from .part import POSITIVE, Part, Rule


class Surrogate(Part):
    """Base of all surrogates: ``dx = g · d(x)``, a pure function of ``x`` and of the tensors of a schedule.

    Attributes:
        is_continuous: whether ``d`` is a continuous function of ``x``.
    """

    is_continuous: bool = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Of a class with a derivative of its own, what it inherits says nothing.
        own = place(cls, "backward", base=Surrogate)
        if own < place(cls, "ends", base=Surrogate):
            cls.ends = Surrogate.ends
        if own < place(cls, "is_continuous", base=Surrogate):
            cls.is_continuous = Surrogate.is_continuous

    def tensors(self) -> tuple[Tensor, ...]:
        """Buffers that a schedule sets, in the order in which `backward` takes them."""
        return ()

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> Tensor:
        """Return the gradient of ``x`` from ``grad``, for ``sign(x)``; ``grad`` may be overwritten and returned."""
        raise NotImplementedError(f"{type(self).__name__} defines no backward()")

    def ends(self, dtype: torch.dtype) -> tuple[float | None, float | None] | None:
        """The open interval with derivative 1, if it is 0 elsewhere; None stands for an infinite end.

        None if the derivative takes other values.
        """
        return None

    @property
    def needs_input(self) -> bool:
        """Whether the gradient needs ``x``, because bits of where it passes do not determine the derivative."""
        return self.ends(torch.float32) is None

    def set_progress_(self, progress: float) -> None:
        """Set the buffers; ``progress`` goes from 0 to 1 during training."""


Make = Callable[[], Surrogate]
"""A class of surrogates, or a `functools.partial` of one."""


def chosen(given: Make | None, published: Make) -> Make:
    """Return the given surrogate factory, or the method's own for None."""
    return published if given is None else given


class Straight(Surrogate):
    """``d = 1``: the gradient passes everywhere."""

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> Tensor:
        return grad

    def ends(self, dtype: torch.dtype) -> tuple[float | None, float | None]:
        return None, None


class HardClip(Surrogate):
    """``d = 1[|x| <= clip]``, both ends included: the clipped straight-through estimator (arXiv:1602.02830).

    A NaN in ``x`` gives gradient 0, ``g`` or NaN; training stops on a NaN long before (`qconv.training.FiniteGuard`).

    Args:
        clip: half the width of the interval.

    Raises:
        ValueError: ``clip`` is not positive and finite.
    """

    def __init__(self, clip: float = 1.0) -> None:
        super().__init__()
        check_positive(clip=clip)
        self.clip = clip

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or is_wrapped(grad):
            return grad * within(x, -self.clip, self.clip)
        low, high = self.ends(x.dtype)
        return torch.ops.aten.hardtanh_backward.grad_input(grad, x, low, high, grad_input=grad)

    def ends(self, dtype: torch.dtype) -> tuple[float, float]:
        bound = _next_above(self.clip, dtype)
        return -bound, bound

    def extra_repr(self) -> str:
        return f"{self.clip}"


class ApproxSign(Surrogate):
    """``d = max(2 − 2|x|, 0)``, the derivative of a piecewise quadratic: Bi-Real Net (arXiv:1808.00278)."""

    is_continuous = True

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> Tensor:
        alike = grad.shape == x.shape and grad.dtype == x.dtype
        is_known = is_plain_cpu(x) or (x.is_cuda and type(x) is Tensor)
        if alike and is_known and not torch.compiler.is_compiling() and not is_wrapped(grad):
            torch.ops.qconv.approx_sign_backward_(grad, x)
            return grad
        return grad * (2 - 2 * x.abs()).clamp_(min=0)


class EDE(Surrogate):
    """``d = k · t · (1 − tanh²(t x))``, the error decay estimator of IR-Net (arXiv:1909.10788).

    ``t = t_min · (t_max / t_min)^progress`` and ``k = max(1 / t, 1)``: close to the identity first, close to the sign
    in the end. The paper has t_min = 0.1, as does its code for VGG and for W1A32; its code for ResNet-20 W1A1 and
    AdaBin's have 0.001.

    Args:
        t_min: t at the start of training.
        t_max: t at the end of training.

    Raises:
        ValueError: not ``0 < t_min <= t_max < inf``; in a checkpoint, t or k that is not positive and finite.
    """

    is_continuous = True

    t: Tensor
    k: Tensor

    def __init__(self, t_min: float = 0.1, t_max: float = 10.0) -> None:
        super().__init__()
        self.t_min, self.t_max = _range("t_min", t_min, "t_max", t_max)
        self.register_buffer("t", torch.tensor(t_min))
        self.register_buffer("k", torch.tensor(max(1 / t_min, 1.0)))

    def tensors(self) -> tuple[Tensor, ...]:
        return self.t, self.k

    def rules(self) -> dict[str, Rule]:
        return {"t": POSITIVE, "k": POSITIVE}

    def set_progress_(self, progress: float) -> None:
        t = self.t_min * (self.t_max / self.t_min) ** progress
        self.t.fill_(t)
        self.k.fill_(max(1 / t, 1.0))

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> Tensor:
        t, k = tensors
        return grad * ((1 - torch.tanh(x * t).square()) * (k * t))


class Polynomial(EDE):
    """``d = k · max(√2 · t − t² |x|, 0)``, of RBNN (arXiv:2009.13055); t as in `EDE`.

    For weights ``k = max(1 / t, 1)``; for activations (``input=True``) ``k = 1`` and ``t`` is at least 1.

    Args:
        t_min: t at the start of training.
        t_max: t at the end of training.
        input: the form for activations.

    Raises:
        ValueError: not ``0 < t_min <= t_max < inf``; in a checkpoint, t or k that is not positive and finite.
    """

    is_continuous = True

    def __init__(self, t_min: float = 0.01, t_max: float = 10.0, input: bool = False) -> None:
        super().__init__(t_min, t_max)
        check_flags(input=input)
        self.input = input
        self.set_progress_(0.0)

    def set_progress_(self, progress: float) -> None:
        super().set_progress_(progress)
        if self.input:
            self.t.clamp_(min=1.0)
            self.k.fill_(1.0)

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> Tensor:
        t, k = tensors
        return grad * ((math.sqrt(2) * t - t.square() * x.abs()).clamp_(min=0) * k)


class ReSTE(Surrogate):
    r"""``d = |x|^((1−o)/o) / o`` for ``m < |x| <= t``; ``m^(1/o) / m`` for ``|x| <= m``; 0 beyond (arXiv:2308.06689).

    The derivative of ``sign(x) · |x|^(1/o)``, which is the identity for ``o = 1`` and approaches the sign as o grows.
    At the share p of the training ``o = 1 + (o_max − 1) · (1 − cos(π p / 2))``, as in the authors' code, or with the
    schedule "linear" ``o = 1 + (o_max − 1) · p``.

    Args:
        o_max: o at the end of training.
        m: for smaller ``|x|`` the derivative is held at a finite value.
        t: for larger ``|x|`` the derivative is 0.
        schedule: "cosine" or "linear".

    Raises:
        ValueError: ``o_max`` is less than 1 or not finite, not ``0 < m <= t < inf``, or no such schedule.
    """

    o: Tensor

    def __init__(
        self, o_max: float = 3.0, m: float = 0.1, t: float = 1.5, schedule: Literal["cosine", "linear"] = "cosine"
    ) -> None:
        super().__init__()
        check_numbers(o_max=o_max)
        if not 1 <= o_max < math.inf:
            raise ValueError(f"o_max (={o_max}) must be at least 1 and finite")
        check_choice("schedule", schedule, "cosine", "linear")
        self.o_max, self.schedule = o_max, schedule
        self.m, self.t = _range("m", m, "t", t)
        self.register_buffer("o", torch.tensor(1.0))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.o,)

    def rules(self) -> dict[str, Rule]:
        return {"o": (lambda o: (o >= 1) & o.isfinite(), "must be at least 1 and finite")}

    def set_progress_(self, progress: float) -> None:
        share = progress if self.schedule == "linear" else 1 - math.cos(math.pi / 2 * progress)
        self.o.fill_(1 + (self.o_max - 1) * share)

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> Tensor:
        (o,) = tensors
        magnitude = x.abs()
        outer = magnitude.clamp(min=self.m).pow((1 - o) / o) / o
        derivative = torch.where(magnitude <= self.m, (self.m ** (1 / o) / self.m).to(x.dtype), outer)
        return grad * torch.where(magnitude <= self.t, derivative, 0.0)


class Fourier(Surrogate):
    r"""``d = 4ω/π · Σ_{i=0…n} cos((2i + 1) ω x)`` for ``|x| <= 1``, 0 beyond: FDA (arXiv:2103.00841).

    The derivative of the first n + 1 sines of a square wave, which equals the sign for ``|x| < π/ω``. At the share p
    of the training ``n = n_min + floor(p · (n_max − n_min))``: a wide hill that becomes narrower. ±inf gives 0, NaN
    gives NaN.

    Args:
        omega: the frequency ω.
        n_min: n at the start of training.
        n_max: n at its end.

    Raises:
        ValueError: not ``0 < omega < π``, ``n_min`` or ``n_max`` is not a whole number, or not ``0 <= n_min <=
            n_max``; in a checkpoint, fewer than one term, or a number that is not finite.
    """

    terms: Tensor

    def __init__(self, omega: float = 0.1, n_min: int = 9, n_max: int = 18) -> None:
        super().__init__()
        check_numbers(omega=omega, n_min=n_min, n_max=n_max)
        if not 0 < omega < math.pi:
            raise ValueError(f"omega (={omega}) must be above 0 and below π")
        if not 0 <= n_min <= n_max < math.inf or n_min % 1 or n_max % 1:
            raise ValueError(f"n_min (={n_min}) and n_max (={n_max}) must be whole numbers from 0 on, in this order")
        self.omega, self.n_min, self.n_max = omega, n_min, n_max
        self.register_buffer("terms", torch.tensor(n_min + 1.0))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.terms,)

    def rules(self) -> dict[str, Rule]:
        return {"terms": (lambda count: (count >= 1) & count.isfinite(), "must be at least 1")}

    def set_progress_(self, progress: float) -> None:
        self.terms.fill_(self.n_min + math.floor(progress * (self.n_max - self.n_min)) + 1)

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> Tensor:
        wide_x = wide(x)
        terms = tensors[0].to(wide_x.dtype)
        angle = wide_x.clamp(-1, 1) * self.omega
        sine = angle.sin()
        # The sum of the cosines, in closed form.
        total = torch.where(sine == 0, terms, (2 * terms * angle).sin() / (2 * torch.where(sine == 0, 1.0, sine)))
        slope = total * (4 * self.omega / math.pi) * within(x, -1.0, 1.0)
        return grad * slope.to(grad.dtype)


class SwishSign(Surrogate):
    """``d = b · (2 − b x · tanh(b x / 2)) / (1 + cosh(b x))``, the derivative of SignSwish (arXiv:1812.11800), in Larq.

    Args:
        beta: b, the steepness.

    Raises:
        ValueError: ``beta`` is not positive and finite.
    """

    is_continuous = True

    def __init__(self, beta: float = 5.0) -> None:
        super().__init__()
        check_positive(beta=beta)
        self.beta = beta

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        z = (x.to(dtype) * self.beta).clamp(-30, 30)  # beyond, the derivative is 0 and cosh would overflow
        return grad * (self.beta * (2 - z * torch.tanh(z / 2)) / (1 + torch.cosh(z))).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.beta}"


def _next_above(value: float, dtype: torch.dtype) -> float:
    """The smallest number of ``dtype`` above ``value > 0``: ``hardtanh_backward`` excludes its own bounds."""
    step = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(value))
    return (math.floor(value / step) + 1) * step


def _range(low_name: str, low: float, high_name: str, high: float) -> tuple[float, float]:
    check_numbers(**{low_name: low, high_name: high})
    if not 0 < low <= high < math.inf:
        raise ValueError(f"{low_name} (={low}) must be positive and at most {high_name} (={high}), and that finite")
    return low, high
