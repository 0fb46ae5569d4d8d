"""Weights quantized once, in layers that compute with floats."""

from typing import Any

import torch
from torch import Tensor, nn

from ..layers import QuantizedLayer
from ..layers.computed import computed_by
from ..quantizers import Quantizer, Whole
from ..quantizers.base import whole_of


class FixedWeight(Quantizer):
    """A weight that is already quantized; the layer's filters are ignored.

    Args:
        trained: the quantizer that it replaces.
        weight: ``w_q``, or its whole numbers if `is_whole`.
        whole: the whole numbers and their scale; None if there are none.
        is_whole: whether the layer adds up products of whole numbers and multiplies the sum by the scale.

    Attributes:
        codes_8: the whole numbers as int8, if `weight` does not hold them; None if they exceed 8 bits, or have scales
            other than one float32 number or one for each filter.
    """

    roles = ("weight",)
    has_whole = True
    is_binary = False  # pyright: ignore  # `whole` may return None
    weight: Tensor
    scale: Tensor | None
    codes_8: Tensor | None

    def __init__(self, trained: Quantizer, weight: Tensor, whole: Whole | None, is_whole: bool) -> None:
        super().__init__()
        self.bits, self.signs, self.code_dtype = trained.bits, trained.signs, trained.at_work.code_dtype
        self.is_whole = is_whole
        values, scale = (None, None) if whole is None else whole
        # Whole numbers may be multiples of a power of two below 1.
        fits = values is not None and torch.equal(values.to(torch.int8).to(values.dtype), values)
        is_8_bits = fits and values is not None and not is_whole and bool((values != -128).all())
        if scale is not None and values is not None:
            by_filter = len(values), *[1] * (values.ndim - 1)
            is_8_bits = is_8_bits and scale.dtype == torch.float32 and (scale.numel() == 1 or scale.shape == by_filter)
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("codes_8", values.to(torch.int8) if is_8_bits and values is not None else None)

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.weight,) if self.scale is None or not self.is_whole else (self.weight, self.scale)

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole | None:
        return Whole(*tensors) if self.is_whole else None

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return tensors[0] if len(tensors) == 1 else tensors[0] * tensors[1]

    def extra_repr(self) -> str:
        return f"bits={self.bits:g}"


@torch.no_grad()
def fix_weight_(layer: QuantizedLayer) -> None:
    """Fix the layer's weight at its quantized value in evaluation.

    Whole numbers and their scale stay separate if the trained layer adds up whole numbers, so the sums are the same.
    """
    layer.quantized_weight()  # updates learned tensors that follow the weight
    trained, of_input, filters = layer.weight_quantizer.eval(), layer.input_quantizer, layer.filters()
    whole = whole_of(trained, filters, trained.tensors())
    channels, dim = layer.input_channels()
    probe = torch.zeros(channels) if dim == -1 else torch.zeros(1, channels, *[1] * (layer.weight.ndim - 2))
    is_whole = (
        whole is not None
        and whole.values.dtype == filters.dtype
        and whole_of(of_input, probe, of_input.tensors()) is not None
    )
    weight = whole.values if whole is not None and is_whole else trained.quantize(filters, *trained.tensors())
    if weight.ndim == 4:  # the format of values in frozen models
        weight = weight.contiguous(memory_format=torch.channels_last)
    layer.weight_quantizer = FixedWeight(trained, weight, whole, is_whole)
    if not computed_by(layer) and not layer.filters_are_computed:  # nothing is kept twice
        parameter: Any = nn.Parameter(layer.from_filters(weight), requires_grad=False)
        layer.weight = parameter
