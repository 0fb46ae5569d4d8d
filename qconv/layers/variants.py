"""Mixins for quantized forms of well-known subclasses of convolutions: a computed weight, padding by input size.

The quantized form of your own class is a subclass of a quantized layer and of that class, with ``float_type`` set to
it. Pass it to `qconv.convert` as ``subclasses={UnitConv2d: QUnitConv2d}``:

    class QUnitConv2d(ComputedFilters, QConv2d, UnitConv2d):
        float_type = UnitConv2d

        def filters(self):
            return self.weight / self.weight.norm()

A class that computes the same as its parent needs no such form: ``subclasses={MyConv2d: QConv2d}``.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from ..function.operations import Convolution
from ..quantizers import INQ, ShiftPS
from ..scheme import Scheme
from .base import QuantizedLayer
from .conv import QConv2d, same_sides


class ComputedFilters(QuantizedLayer):
    """Mixin for layers that quantize the result of `filters`, computed from the weight; the gradient goes through it.

    Nothing is written back into the weight: the clamp of a scheme has no effect, so `filters` should keep the range.
    Schemes that learn other tensors in place of the weight (`schemes.shift_ps`), or freeze it gradually
    (`schemes.inq`), raise a ValueError.
    """

    filters_are_computed = True

    @property
    def baked_type(self) -> type[nn.Module]:
        """The class of a frozen layer, which uses the weight as it is."""
        return nn.Conv2d

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

    def operation(self, input: Tensor) -> Convolution:
        if not self.same_pad:
            return self.op
        spans = zip(input.shape[2:], self.kernel_size, self.stride, self.dilation, strict=True)
        return self.padded_op(same_sides([_missing(*span) for span in spans]))


def _missing(size: int, kernel_size: int, stride: int, dilation: int) -> int:
    outputs = -(-size // stride)
    return max((outputs - 1) * stride + dilation * (kernel_size - 1) + 1 - size, 0)
