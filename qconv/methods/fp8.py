"""FP8: 8-bit floating point for weights, inputs and gradients (Micikevicius et al., arXiv:2209.05433)."""

from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..ground.checks import check_choice
from ..quantizers.base import Codes
from ..quantizers.form import Form
from ..quantizers.identity import Identity
from ..quantizers.kept_codes import Coding, Passing
from ..quantizers.numbers import wide
from ..scheme import Scheme, named

Format = Literal["e4m3", "e5m2"]


class Float8(NamedTuple):
    """A format: torch's dtype, mantissa bits, the exponent of the smallest normal number, the largest number."""

    dtype: torch.dtype
    mantissa: int
    exponent: int
    largest: float


FORMATS: dict[str, Float8] = {
    "e4m3": Float8(torch.float8_e4m3fn, 3, -6, 448.0),
    "e5m2": Float8(torch.float8_e5m2, 2, -14, 57344.0),
}

_EXPONENT_BITS = 0x7FF0_0000_0000_0000  # of a float64


def round_fp8(x: Tensor, format: str) -> Tensor:
    """Return the nearest number of the format, half to even, or the largest one beyond it; NaN stays.

    Example:
        >>> round_fp8(torch.tensor([0.3, 17.0, 1e9, -1e-9]), "e4m3").tolist()
        [0.3125, 16.0, 448.0, -0.0]
    """
    dtype, mantissa, exponent, largest = FORMATS[format]
    x = x.clamp(-largest, largest)  # the cast alone would give NaN (e4m3) or inf (e5m2)
    if x.dtype != torch.float64:
        return x.to(dtype).to(x.dtype)
    # The cast goes through float32, and rounding twice is not rounding once.
    power = (x.view(torch.int64) & _EXPONENT_BITS).view(torch.float64).clamp(min=2.0**exponent)
    unit = power * 2.0**-mantissa
    return (x / unit).round() * unit


class FP8(Passing):
    r"""Values rounded to an 8-bit float: for weights, inputs, or as a `Scheme`'s gradient quantizer.

    ``x_q = s · fp8(x / s)``: fp8 is the nearest number of the format, half to even, and the largest finite one beyond
    it. ``"e4m3"`` (`torch.float8_e4m3fn`) has 3 bits of mantissa and reaches 448, ``"e5m2"`` 2 bits and 57344.

    ``scale="dynamic"``: ``s = max |x| / largest`` over the tensor, at every call; nothing is clipped and ``dx = g``, s
    a constant. ``scale=None``: ``s = 1`` and ``dx = g · 1[|x| ≤ largest]``, with the ends. The paper uses e4m3 for
    weights and inputs and e5m2 for gradients. Latent weights are not clipped.

    ±0 gives ±0, a tensor of zeros gives zeros. If the largest magnitude is below about 2^-90 (for float64, 2^-985), all
    become 0 too, since their step would leave the normal range. With a dynamic scale a NaN or inf leaves no finite
    number in the tensor, so that a gradient scaler sees it; without one NaN gives NaN and ±inf the largest finite
    number. The result has the dtype of ``x``, so bfloat16 and float16 are rounded once more after the multiplication by
    s.

    Codes are multiples of the smallest subnormal: up to 448 · 2^9 for e4m3 and 57344 · 2^16 for e5m2, as int64.

    Args:
        format: ``"e4m3"`` or ``"e5m2"``.
        scale: ``"dynamic"`` or None.

    Raises:
        ValueError: ``format`` or ``scale`` is none of these.
    """

    bits = 8

    def __init__(self, format: Format = "e4m3", scale: Literal["dynamic"] | None = "dynamic") -> None:
        super().__init__()
        if scale not in ("dynamic", None):
            raise ValueError(f"scale (={scale!r}) must be 'dynamic' or None")
        check_choice("format", format, *FORMATS)
        self.format = format
        self.scale = scale
        self.is_elementwise = scale is None

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        if self.scale is None:
            return round_fp8(wide(x), self.format).to(x.dtype)
        values, scale = self._scaled(x)
        return (values * scale).to(x.dtype)

    @property
    def coding(self) -> Coding:
        return Coding(2**8)

    def parts(self, x: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        values, scale = self._scaled(x)
        return values.to(FORMATS[self.format].dtype).view(torch.uint8), scale

    def joined(self, form: Form, values: Tensor, *others: Tensor) -> Tensor:
        (scale,) = others
        numbers = values.to(torch.uint8).view(FORMATS[self.format].dtype)
        return (numbers.to(scale.dtype) * scale).to(form.dtype)

    def passes(self, x: Tensor, *tensors: Tensor) -> Tensor | None:
        return None if self.scale == "dynamic" else x.abs() <= FORMATS[self.format].largest

    def codes(self, x: Tensor, *tensors: Tensor) -> Codes:
        _, mantissa, exponent, _ = FORMATS[self.format]
        values, scale = self._scaled(x)
        steps_per_one = 2.0 ** (mantissa - exponent)
        return Codes((values * steps_per_one).long(), scale / steps_per_one)

    def _scaled(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``fp8(x / s)`` and s."""
        wide_x = wide(x)
        scale = wide_x.new_ones(())
        if self.scale == "dynamic" and x.numel():
            scale = wide_x.abs().max() / FORMATS[self.format].largest
            scale = torch.where(scale < torch.finfo(scale.dtype).tiny * 2**20, 1.0, scale)
        return round_fp8(wide_x / scale, self.format), scale


@named
def fp8(
    format: Format = "e4m3",
    input_format: Format | None = "e4m3",
    grad_format: Format | None = None,
    scale: Literal["dynamic"] | None = "dynamic",
) -> Scheme:
    """Weights and inputs in 8-bit floating point (arXiv:2209.05433).

    Args:
        format: the weight's format, ``"e4m3"`` or ``"e5m2"``.
        input_format: the input's format; None leaves it float.
        grad_format: the format of the output's gradient, ``"e5m2"`` in the paper; None leaves it float.
        scale: ``"dynamic"`` maps the largest magnitude to the largest number of the format; None clips there.
    """
    check_choice("format", format, *FORMATS)
    for key, value in (("input_format", input_format), ("grad_format", grad_format)):
        if value is not None:
            check_choice(key, value, *FORMATS)
    return Scheme(
        input=Identity if input_format is None else partial(FP8, input_format, scale),
        weight=partial(FP8, format, scale),
        grad=None if grad_format is None else partial(FP8, grad_format, scale),
    )
