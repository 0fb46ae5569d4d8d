"""Layers of known papers: `QConv2d` with a preset scheme."""

from typing import Any

import torch

from .. import schemes
from .conv import QConv2d


class BNNConv2d(QConv2d):
    """`QConv2d` with `qconv.schemes.bnn`: signs of weight and input. Takes the arguments of `torch.nn.Conv2d`."""

    def __init__(self, *args: Any, padding_value: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, scheme=schemes.bnn(padding_value), padding_value=padding_value, **kwargs)


class BWNConv2d(QConv2d):
    """`QConv2d` with `qconv.schemes.bwn`: scaled signs of the weight. Takes the arguments of `torch.nn.Conv2d`."""

    def __init__(self, *args: Any, detach_scale: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, scheme=schemes.bwn(detach_scale), **kwargs)


class XNORConv2d(QConv2d):
    """`QConv2d` with `qconv.schemes.xnor`: scaled signs of the weight, signs of the input.

    It takes the arguments of `torch.nn.Conv2d`; ``scale_map=True`` multiplies by the map K of input magnitudes.
    """

    def __init__(
        self, *args: Any, scale_map: bool = False, detach_scale: bool = False, padding_value: int = 0, **kwargs: Any
    ) -> None:
        scheme = schemes.xnor(scale_map, detach_scale, padding_value)
        super().__init__(*args, scheme=scheme, padding_value=padding_value, **kwargs)


class Conv2dShift(QConv2d):
    """`QConv2d` with `qconv.schemes.shift_ps`: DeepShift's layer of this name, with learned shift and sign.

    Args:
        *args: as in `torch.nn.Conv2d`, up to ``padding_mode``.
        check_grad: use double precision, as a numerical check of gradients needs.
        weight_bits: 2 to 8, the sign included.
        fixed_point: (integer bits, fraction bits) of the input; None leaves it float.
        **kwargs: as in `torch.nn.Conv2d`.

    Raises:
        ValueError: ``check_grad`` together with a ``dtype`` other than float64, or ``weight_bits`` out of range.
    """

    _scheme = staticmethod(schemes.shift_ps)

    def __init__(
        self,
        *args: Any,
        check_grad: bool = False,
        weight_bits: int = 5,
        fixed_point: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> None:
        if check_grad:
            if kwargs.get("dtype") not in (None, torch.float64):
                raise ValueError(f"dtype (={kwargs['dtype']}) must be torch.float64 with check_grad=True")
            kwargs["dtype"] = torch.float64
        super().__init__(*args, scheme=self._scheme(weight_bits, fixed_point), **kwargs)


class Conv2dShiftQ(Conv2dShift):
    """`Conv2dShift` with `qconv.schemes.shift_q`: the weight itself is rounded to powers of two."""

    _scheme = staticmethod(schemes.shift_q)
