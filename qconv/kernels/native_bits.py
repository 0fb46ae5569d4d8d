"""The operators of `qconv.kernels.bits` in C, called on the memory of tensors.

Each function returns None where the definition has to do it: if there is no compiled module, for other dtypes than
float32, bfloat16 and, of codes and unpacked signs, int8 and uint8, and for empty tensors and unusual arguments. The
results are the definition's; a NaN keeps its bits.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from .native import GRAIN, best, kernels

_PACK_SIGNS, _PACK_PASSES, _PACK_BOTH, _CLAMP, _UNPACK_SIGNS, _WHERE, _PACK_CODES, _UNPACK_CODES = range(8)
_FLOATS = {torch.float32: 0, torch.bfloat16: 1}
_TYPES = _FLOATS | {torch.int8: 2, torch.uint8: 2}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_WORD = 64


def pack_signs(input: Tensor, groups: int = 1) -> Tensor | None:
    """`bits.pack_signs`."""
    signs = _words(input, groups)
    if signs is not None:
        _call(_PACK_SIGNS, input, None, (signs, None, None), groups)
    return signs


def pack_passes(input: Tensor, low: float | None, high: float | None, groups: int = 1) -> tuple[Tensor, Tensor] | None:
    """`bits.pack_passes`."""
    passes, bounds = _words(input, groups), rounded_ends(low, high, input.dtype)
    if passes is None or bounds is None:
        return None
    stops = torch.zeros((), dtype=torch.bool, device="cpu")
    _call(_PACK_PASSES, input, None, (None, passes, stops), groups, bounds=bounds)
    return passes, stops


def pack_signs_and_passes(
    input: Tensor, low: float | None, high: float | None, groups: int = 1
) -> tuple[Tensor, Tensor, Tensor] | None:
    """`bits.pack_signs_and_passes`."""
    signs, bounds = _words(input, groups), rounded_ends(low, high, input.dtype)
    if signs is None or bounds is None:
        return None
    passes, stops = torch.empty_like(signs), torch.zeros((), dtype=torch.bool, device="cpu")
    _call(_PACK_BOTH, input, None, (signs, passes, stops), groups, bounds=bounds)
    return signs, passes, stops


def clamp_and_pack(input: Tensor, low: float | None, high: float | None) -> tuple[Tensor, Tensor, Tensor] | None:
    """`bits.clamp_and_pack`."""
    passes, bounds = _words(input, 1), rounded_ends(low, high, input.dtype)
    if passes is None or bounds is None or channels_last(input) is None:
        return None
    clamped, stops = torch.empty_like(input), torch.zeros((), dtype=torch.bool, device="cpu")
    _call(_CLAMP, input, clamped, (None, passes, stops), bounds=bounds)
    return clamped, passes, stops


def unpack_signs(
    bits: Tensor,
    channels: int,
    groups: int = 1,
    dtype: torch.dtype = torch.int8,
    channels_last: bool = True,
) -> Tensor | None:
    """`bits.unpack_signs`."""
    fits = groups > 0 and channels % groups == 0 and bits.shape[-1] == groups * -(-channels // groups // _WORD)
    if kernels() is None or not fits or not _is_packed(bits, torch.int64) or dtype not in _TYPES or channels < 1:
        return None
    output = _empty(bits, channels, dtype, channels_last)
    _call(_UNPACK_SIGNS, None, output, (bits, None, None), groups)
    return output


def where_passes(grad: Tensor, passes: Tensor, groups: int = 1) -> Tensor | None:
    """`bits.where_passes`."""
    wanted = _words_shape(grad, groups)
    if channels_last(grad) is None or passes.shape != wanted or not _is_packed(passes, torch.int64):
        return None
    output = torch.empty_like(grad)
    _call(_WHERE, grad, output, (None, passes, None), groups)
    return output


def pack_codes(codes: Tensor, bits: int) -> Tensor | None:
    """`bits.pack_codes`."""
    if kernels() is None or bits not in (1, 2, 4, 8) or codes.dtype not in _TYPES or not _is_full(codes):
        return None
    packed = torch.empty(
        (len(codes), *codes.shape[2:], -(-codes.shape[1] * bits // 8)), dtype=torch.uint8, device="cpu"
    )
    _call(_PACK_CODES, codes, None, (packed, None, None), bits=bits)
    return packed


def unpack_codes(
    packed: Tensor,
    channels: int,
    bits: int,
    dtype: torch.dtype = torch.uint8,
    channels_last: bool = True,
) -> Tensor | None:
    """`bits.unpack_codes`."""
    fits = bits in (1, 2, 4, 8) and packed.shape[-1] == -(-channels * bits // 8)
    if kernels() is None or not fits or not _is_packed(packed, torch.uint8) or dtype not in _TYPES:
        return None
    output = _empty(packed, channels, dtype, channels_last)
    _call(_UNPACK_CODES, None, output, (packed, None, None), bits=bits)
    return output


def _is_full(x: Tensor) -> bool:
    return x.dim() > 1 and x.numel() > 0


def _is_packed(bits: Tensor, dtype: torch.dtype) -> bool:
    return _is_full(bits) and bits.dtype == dtype and bits.is_contiguous()


def channels_last(x: Tensor) -> bool | None:
    """Whether the channels are adjacent in memory, or else the pixels; None if neither are.

    Where both are true, the one is taken that has more of them.
    """
    format = _CHANNELS_LAST.get(x.dim())
    last = x.movedim(1, -1).is_contiguous() if format is None else x.is_contiguous(memory_format=format)
    if last and x.shape[1] > 1:
        return True
    return False if x.is_contiguous() else last or None


def without_gaps(x: Tensor) -> bool:
    """Whether the tensor fills its memory, with ``x[i]`` in one piece: contiguous, or with adjacent channels."""
    return x.is_contiguous() or (x.ndim > 2 and x.movedim(1, -1).is_contiguous())


def _words_shape(x: Tensor, groups: int) -> tuple[int, ...] | None:
    """The shape of the bits of a tensor that the kernels take."""
    if kernels() is None or x.dtype not in _FLOATS or not _is_full(x) or groups < 1 or x.shape[1] % groups:
        return None
    return len(x), *x.shape[2:], groups * -(-x.shape[1] // groups // _WORD)


def _words(x: Tensor, groups: int) -> Tensor | None:
    shape = _words_shape(x, groups)
    return None if shape is None else torch.empty(shape, dtype=torch.int64, device="cpu")


@lru_cache(maxsize=256)
def _rounded(bound: float, dtype: torch.dtype) -> float:
    return torch.tensor(bound, dtype=torch.float64, device="cpu").to(dtype).item()


def holds(dtype: torch.dtype, *bounds: float | None) -> bool:
    """Whether comparing with the bounds gives the same in the dtype as in float32, in which torch does it for half."""
    is_half = dtype in (torch.float16, torch.bfloat16)
    return not is_half or all(b is None or _rounded(b, dtype) == _rounded(b, torch.float32) for b in bounds)


def rounded_ends(low: float | None, high: float | None, dtype: torch.dtype) -> tuple[float, float] | None:
    """The bounds as the dtype rounds them, NaN for one that is None; None if the dtype doesn't hold them."""
    found = [math.nan, math.nan]
    for place, bound in enumerate((low, high)):
        if bound is None:
            continue
        found[place] = math.copysign(_rounded(bound, dtype), bound)  # 0.0 and -0.0 are one key of the cache
        if math.isnan(bound) or math.isinf(bound) != math.isinf(found[place]):
            return None
    return found[0], found[1]


def _empty(packed: Tensor, channels: int, dtype: torch.dtype, channels_last: bool) -> Tensor:
    values = packed.new_empty((*packed.shape[:-1], channels), dtype=dtype).movedim(-1, 1)
    return values if channels_last or values.is_contiguous() else packed.new_empty(values.shape, dtype=dtype)


def _call(
    operation: int,
    input: Tensor | None,
    output: Tensor | None,
    packed: Sequence[Tensor | None],
    groups: int = 1,
    bits: int = 1,
    bounds: tuple[float, float] = (math.nan, math.nan),
) -> None:
    module = kernels()
    shaped = output if input is None else input
    if module is None or shaped is None:
        raise ValueError("a pass needs the compiled module, and an input or an output")
    last = channels_last(shaped)
    if last is None:
        shaped = input = shaped.contiguous()
        last = False
    batch, channels = shaped.shape[:2]
    module.pass_over(
        *(0 if tensor is None else tensor.data_ptr() for tensor in (input, output, *packed)),
        *(operation, _TYPES[shaped.dtype], batch, channels // groups, groups, math.prod(shaped.shape[2:])),
        *(bits, int(last), best(), GRAIN),
        *bounds,
    )
