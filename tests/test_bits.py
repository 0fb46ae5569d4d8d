"""Bits of tensors: operators against what they say, written with torch's comparisons."""

import pytest
import torch
from torch import Tensor

ops = torch.ops.qconv
SHAPES = [(2, 3), (2, 64, 5), (1, 65, 3, 7), (3, 128, 4, 4), (2, 130, 2, 3, 2), (0, 8, 2, 2), (2, 6, 0, 3)]
ODD = [0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-45, -1e-45, 1.0, -1.0]


def values(shape: tuple[int, ...], channels_last: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(0)
    x = (torch.randn(shape) * 1.5).to(dtype)
    if x.numel():
        odd = torch.randint(x.numel(), (min(x.numel() // 2, 20),))
        x.view(-1)[odd] = torch.tensor(ODD * 3, dtype=dtype)[: len(odd)]
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_signs_and_passes(shape: tuple[int, ...], channels_last: bool, dtype: torch.dtype) -> None:
    x = values(shape, channels_last, dtype)
    for groups in (1, *([2] if shape[1] % 2 == 0 else [])):
        signs = ops.pack_signs(x, groups)
        assert signs.shape == (shape[0], *shape[2:], groups * -(-shape[1] // groups // 64))
        back = ops.unpack_signs(signs, shape[1], groups, dtype, channels_last)
        assert torch.equal(back, torch.where(x < 0, -1, 1).to(dtype))
        assert back.stride() == x.stride() or not x.numel()
        for low, high in ((-1.0, 1.0), (None, 1.0), (0.0, None), (None, None)):
            passes = torch.ones_like(x, dtype=torch.bool)
            passes &= ~(x <= low) if low is not None else passes
            passes &= ~(x >= high) if high is not None else passes
            both = ops.pack_signs_and_passes(x, low, high, groups)
            packed, stops = ops.pack_passes(x, low, high, groups)
            assert all(torch.equal(a, b) for a, b in zip(both, (signs, packed, stops), strict=True))
            assert stops.item() is (not passes.all().item())
            grad = values(shape, not channels_last, dtype)
            masked = ops.where_passes(grad, packed, groups)
            assert torch.equal(masked.nan_to_num(7), torch.where(passes, grad, 0).nan_to_num(7))
            assert masked.stride() == grad.stride() or not x.numel()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_clamp(shape: tuple[int, ...], channels_last: bool) -> None:
    x = values(shape, channels_last)
    for low, high in ((-1.0, 1.0), (0.0, None), (0.0, 6.0)):
        clamped, *packed = ops.clamp_and_pack(x, low, high)
        assert torch.equal(clamped.nan_to_num(7), x.clamp(low, high).nan_to_num(7))
        assert clamped.stride() == x.stride() or not x.numel()
        assert all(torch.equal(a, b) for a, b in zip(packed, ops.pack_passes(x, low, high), strict=True))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_codes(shape: tuple[int, ...], bits: int) -> None:
    codes = torch.randint(2**bits, shape)
    for given in (codes, codes.float(), codes.to(torch.uint8)):
        packed = ops.pack_codes(given, bits)
        assert packed.shape == (shape[0], *shape[2:], -(-shape[1] * bits // 8))
        for channels_last in (False, True):
            back = ops.unpack_codes(packed, shape[1], bits, torch.float32, channels_last)
            assert torch.equal(back, codes.float())
            last = back.movedim(1, -1)
            assert (last if channels_last else back).is_contiguous()


def test_codes_of_other_bits() -> None:
    with pytest.raises(ValueError, match=r"bits \(=3\) must be 1, 2, 4 or 8"):
        ops.pack_codes(torch.zeros(1, 2), 3)


def test_torch_finds_the_operators_well_made() -> None:
    x = values((2, 70, 3, 3), True).nan_to_num(0)  # NaN is not equal to itself
    signs, passes, _ = ops.pack_signs_and_passes(x, -1.0, 1.0)
    packed = ops.pack_codes(torch.ones_like(x), 4)
    for operator, arguments in (
        (ops.pack_signs, (x, 2)),
        (ops.pack_passes, (x, -1.0, None)),
        (ops.pack_signs_and_passes, (x, -1.0, 1.0)),
        (ops.clamp_and_pack, (x, 0.0, None)),
        (ops.unpack_signs, (signs, 70, 1, torch.float32, True)),
        (ops.where_passes, (x, passes)),
        (ops.pack_codes, (torch.ones_like(x), 4)),
        (ops.unpack_codes, (packed, 70, 4, torch.uint8, False)),
    ):
        torch.library.opcheck(operator.default, arguments)
