"""Weights that are quantized once and for all, in layers that compute on floats."""

from typing import Any

import torch
from torch import Tensor, nn

from ..layers import QuantizedLayer
from ..layers.computed import computed_by
from ..quantizers import Quantizer, Whole
from ..quantizers.base import whole_of


class FixedWeight(Quantizer):
    """The layer's ``weight`` is quantized already: it holds the whole numbers of ``w_q = weight · scale``, or ``w_q``.

    Args:
        trained: the quantizer in whose place it stands.
        whole: the whole numbers and their scale; None where there are none.
        is_whole: the layer's weight holds those.

    Attributes:
        codes_8: the whole numbers as int8, where the weight does not hold them; None if they are none of 8 bits.
    """

    roles = ("weight",)
    has_whole = True
    scale: Tensor | None
    codes_8: Tensor | None

    def __init__(self, trained: Quantizer, whole: Whole | None, is_whole: bool) -> None:
        super().__init__()
        self.bits, self.signs, self.code_dtype = trained.bits, trained.signs, trained.code_dtype
        self.is_whole = is_whole
        values, scale = (None, None) if whole is None else whole
        is_8_bits = values is not None and not is_whole and bool((values.abs() <= 127).all())
        self.register_buffer("scale", scale)
        self.register_buffer("codes_8", values.to(torch.int8) if is_8_bits and values is not None else None)

    def tensors(self) -> tuple[Tensor, ...]:
        return () if self.scale is None else (self.scale,)

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole | None:
        return Whole(x, *tensors) if self.is_whole else None

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return x * tensors[0] if self.is_whole and tensors else x

    def extra_repr(self) -> str:
        return f"bits={self.bits:g}"


@torch.no_grad()
def fix_weight_(layer: QuantizedLayer) -> None:
    """Quantize the layer's weight for good: what its forward makes of it in evaluation takes its place.

    Whole numbers and their scale stay apart where the trained layer adds up whole numbers, so that sums are the same.
    """
    if computed_by(layer):
        return
    weight_q = layer.quantized_weight()  # first: learned tensors that follow the weight do so now
    trained, of_input = layer.weight_quantizer.eval(), layer.input_quantizer
    whole = whole_of(trained, layer.filters(), trained.tensors())
    channels, dim = layer.input_channels()
    probe = torch.zeros(channels) if dim == -1 else torch.zeros(1, channels, *[1] * (layer.weight.ndim - 2))
    is_whole = (
        whole is not None
        and whole.values.dtype == layer.weight.dtype
        and whole_of(of_input, probe, of_input.tensors()) is not None
    )
    if whole is not None and is_whole:
        weight_q = layer.from_filters(whole.values)
    layer.weight_quantizer = FixedWeight(trained, whole, is_whole)
    if weight_q.ndim == 4:  # as frozen models have their values
        weight_q = weight_q.contiguous(memory_format=torch.channels_last)
    weight: Any = nn.Parameter(weight_q, requires_grad=False)
    layer.weight = weight
