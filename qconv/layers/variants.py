"""Mixins for quantized forms of well-known subclasses of convolutions: a computed weight, padding by input size.

The quantized form of your own class is a subclass of a quantized layer and of that class, with ``float_type`` set to
it. Pass it to `qconv.convert` as ``subclasses={UnitConv2d: QUnitConv2d}``:

    class QUnitConv2d(ComputedFilters, QConv2d, UnitConv2d):
        float_type = UnitConv2d

        def filters(self):
            return self.weight / self.weight.norm()

A class that computes the same as its parent needs no such form: ``subclasses={MyConv2d: QConv2d}``; nor does one that
does something, such as padding, around the forward of its parent (`around_own_forward`).
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..quantizers import INQ, ShiftPS
from ..scheme import Scheme
from .arguments import as_node
from .base import QuantizedLayer
from .bypassed import has_own_forward
from .conv import QConv2d, same_sides


class ComputedFilters(QuantizedLayer):
    """Mixin for layers that quantize the result of `filters`, computed from the weight; the gradient goes through it.

    Nothing is written back into the weight: the clamp of a scheme has no effect, so `filters` should keep the range.
    Schemes that learn other tensors in place of the weight (`schemes.shift_ps`), or freeze it gradually
    (`schemes.inq`), raise a ValueError.
    """

    filters_are_computed = True

    @classmethod
    def check_scheme(cls, scheme: Scheme) -> None:
        super().check_scheme(scheme)
        if any(isinstance(part, INQ | ShiftPS) for part in scheme.weight().modules()):
            raise ValueError(f"{scheme.name} changes the weight itself, and {cls.__name__} computes it from another")

    def _put_back(self, filters: Tensor) -> None:
        pass


class StandardizedFilters(ComputedFilters):
    """Mixin for weight standardization (arXiv:1903.10520), with the gain of arXiv:2101.08692 if the layer has one.

    ``filters = gain · scale · (w − mean) / √(var + eps)``, with mean and (biased) variance of each filter; ``gain`` and
    ``scale`` are 1 if the layer has none. This result is quantized.
    """

    eps: float
    scale: float
    gain: nn.Parameter

    def filters(self) -> Tensor:
        rows = self.weight.reshape(1, len(self.weight), -1)
        factor = (self.gain * self.scale).view(-1) if hasattr(self, "gain") else None
        standard = F.batch_norm(rows, None, None, weight=factor, training=True, momentum=0.0, eps=self.eps)
        return standard.reshape_as(self.weight)


class SamePadded(QConv2d):
    """Mixin for TensorFlow's "same" padding: enough for ``ceil(size / stride)`` outputs, an odd one at the end.

    It surrounds the quantized input and is filled with ``padding_value``. If `same_pad` is False, `QConv2d` pads.
    """

    same_pad: bool = True

    @property
    def pads_by_size(self) -> bool:
        return self.same_pad and max(self.stride) > 1

    def sides_for(self, size: Sequence[int]) -> list[int]:
        if not self.same_pad:
            return self.padding_sides
        spans = zip(size, self.kernel_size, self.stride, self.dilation, strict=True)
        return same_sides([_missing(*span) for span in spans])


@cache
def around_own_forward(layer: type[QuantizedLayer], kind: type[nn.Module]) -> type[QuantizedLayer]:
    """Return the quantized layer of ``kind``: ``layer``, within the forward of ``kind`` if that has one of its own.

    Raises:
        TypeError: this forward of a convolution calls neither that of its parent nor ``_conv_forward``.
    """
    own, parents = kind.forward, layer.float_type.forward
    if own is parents or issubclass(layer, kind) or not hasattr(kind, "_conv_forward"):
        return layer
    if not {"forward", "_conv_forward"}.intersection(own.__code__.co_names):
        raise TypeError(
            f"subclasses: {kind.__name__}.forward calls neither super().forward() nor self._conv_forward(), so that "
            f"{layer.__name__} would lose what it does: write its quantized layer (see qconv.layers.variants); if it "
            f"does what its parent does, set the layers' __class__ to {layer.float_type.__name__}"
        )

    def forward(self: Any, input: Any) -> Any:
        return as_node(self, input) if isinstance(input, fx.Proxy) else own(self, input)

    def _conv_forward(self: Any, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # A forward that is set on the layer computes as the float twin.
        of_twin: Any = kind
        return of_twin._conv_forward(self, input, weight, bias) if has_own_forward(self) else layer.forward(self, input)

    attributes = {"float_type": kind, "forward": forward, "_conv_forward": _conv_forward}
    return type(f"Q{kind.__name__}", (layer, kind), attributes)


def _missing(size: int, kernel_size: int, stride: int, dilation: int) -> int:
    outputs = -(-size // stride)
    return max((outputs - 1) * stride + dilation * (kernel_size - 1) + 1 - size, 0)
