"""Bits of tensors: operators against what they say, written with torch's comparisons."""

import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from settings import emulated, instruction_set, threads
from torch import Tensor

from qconv.kernels import bits, native, native_bits

ops = torch.ops.qconv
SHAPES = [(2, 3), (2, 64, 5), (1, 65, 3, 7), (3, 128, 4, 4), (2, 130, 2, 3, 2), (0, 8, 2, 2), (2, 6, 0, 3)]
ODD = [0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-45, -1e-45, 1.0, -1.0]


def values(
    shape: tuple[int, ...], channels_last: bool, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Tensor:
    torch.manual_seed(0)
    x = (torch.randn(shape) * 1.5).to(dtype)
    if x.numel():
        odd = torch.randint(x.numel(), (min(x.numel() // 2, 20),))
        x.view(-1)[odd] = torch.tensor(ODD * 3, dtype=dtype)[: len(odd)]
    x = x.to(device)
    return x.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_signs_and_passes(shape: tuple[int, ...], channels_last: bool, dtype: torch.dtype, device: str) -> None:
    x = values(shape, channels_last, dtype, device)
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
            grad = values(shape, not channels_last, dtype, device)
            masked = ops.where_passes(grad, packed, groups)
            assert torch.equal(masked.nan_to_num(7), torch.where(passes, grad, 0).nan_to_num(7))
            assert masked.stride() == grad.stride() or not x.numel()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_clamp(shape: tuple[int, ...], channels_last: bool, device: str) -> None:
    x = values(shape, channels_last, device=device)
    for low, high in ((-1.0, 1.0), (0.0, None), (0.0, 6.0)):
        clamped, *packed = ops.clamp_and_pack(x, low, high)
        assert torch.equal(clamped.nan_to_num(7), x.clamp(low, high).nan_to_num(7))
        assert clamped.stride() == x.stride() or not x.numel()
        assert all(torch.equal(a, b) for a, b in zip(packed, ops.pack_passes(x, low, high), strict=True))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES)
def test_codes(shape: tuple[int, ...], bits: int, device: str) -> None:
    codes = torch.randint(2**bits, shape).to(device)
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


@pytest.mark.nightly
def test_torch_finds_the_operators_well_made(device: str) -> None:
    x = values((2, 70, 3, 3), True, device=device).nan_to_num(0)  # NaN is not equal to itself
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


KERNELS = native.instruction_sets()


def random_shape(rng: random.Random) -> tuple[int, ...]:
    """Sizes about those of vectors, words and strips of pixels."""
    channels = rng.choice([1, 2, 3, 7, 16, 31, 32, 48, 63, 64, 65, 72, 100, 128, 130])
    spatial = rng.choice(
        [(), (1,), (5,), (16,), (513,), (1100,), (1, 1), (2, 2), (3, 3), (7, 7), (8, 9), (20, 31), (2, 3, 5)]
    )
    return rng.randint(1, 3), channels, *spatial


def same(found: Any, wanted: Any) -> bool:
    """Whether tensors are equal, bit for bit but for those of a bfloat16 NaN, which torch's own clamp does not keep."""
    if isinstance(wanted, tuple):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if wanted.is_floating_point():
        whole = {2: torch.int16, 4: torch.int32}[wanted.element_size()]
        nan = torch.where(wanted.isnan(), 0, 1) if wanted.dtype == torch.bfloat16 else 1
        if not torch.equal(found.isnan(), wanted.isnan()):
            return False
        found, wanted = (x.view(whole) * nan for x in (found, wanted))
    strides = ([step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1] for x in (found, wanted))
    return found.dtype == wanted.dtype and torch.equal(found, wanted) and next(strides) == next(strides)


def calls(
    rng: random.Random, make_shape: Callable[[random.Random], tuple[int, ...]] = random_shape, device: str = "cpu"
) -> list[tuple[str, tuple[Any, ...]]]:
    """A call of each operator on one random shape: its name and its arguments."""
    shape, last, dtype = make_shape(rng), rng.random() < 0.5, rng.choice([torch.float32, torch.bfloat16])
    groups = rng.choice([g for g in (1, 1, 2, 4, 7) if shape[1] % g == 0])
    low, high = rng.choice([-1.0, -0.3, 0.0, -0.0, None]), rng.choice([1.0, 0.7, 0.0, -0.0, None])
    x, width = values(shape, last, dtype, device), rng.choice([1, 2, 4, 8])
    codes = values(shape, last, device=device).nan_to_num(0).abs().mul(50).clamp(max=2**width - 1).trunc()
    kind: torch.dtype = rng.choice([dtype, torch.uint8, torch.float32, *([torch.int8] if width < 8 else [])])
    signs, passes, _ = bits.pack_signs_and_passes(x, low, high, groups)
    return [
        ("pack_signs", (x, groups)),
        ("pack_passes", (x, low, high, groups)),
        ("pack_signs_and_passes", (x, low, high, groups)),
        ("clamp_and_pack", (x, low, high)),
        ("unpack_signs", (signs, shape[1], groups, rng.choice([torch.int8, dtype]), last)),
        ("where_passes", (x, passes, groups)),
        ("pack_codes", (codes.to(kind), width)),
        ("unpack_codes", (bits.pack_codes(codes, width), shape[1], width, kind, last)),
    ]


@pytest.mark.parametrize("seed", range(60))
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_gives_what_its_definition_says(name: str, seed: int) -> None:
    for operator, arguments in calls(random.Random(seed)):
        with instruction_set(name):
            found = getattr(native_bits, operator)(*arguments)
        assert found is not None
        assert same(found, getattr(bits, operator)(*arguments)), (operator, arguments[1:])


@pytest.mark.skipif(not KERNELS, reason="there is no compiled module")
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", [(5, 70, 23, 31), (700, 64), (3, 16, 4000)])
def test_threads_change_nothing(shape: tuple[int, ...], last: bool) -> None:
    x = values(shape, last)
    operators: list[Callable[[], Any]] = [
        lambda: ops.pack_signs_and_passes(x, -1.0, 1.0),
        lambda: ops.clamp_and_pack(x, 0.0, None),
        lambda: ops.pack_codes((x < 0).float(), 4),
        lambda: ops.where_passes(x, ops.pack_signs(x)),
    ]
    alone = [each() for each in operators]
    with threads(3):
        assert all(same(each(), first) for each, first in zip(operators, alone, strict=True))


def test_what_kernels_leave_to_the_definition() -> None:
    x = torch.randn(2, 6, 4, 5)
    strided = torch.randn(2, 4, 6, 5).transpose(1, 2)
    assert native_bits.pack_signs(x.double()) is None
    assert native_bits.clamp_and_pack(strided, 0.0, 1.0) is None
    assert native_bits.pack_passes(x, float("nan"), None) is None
    assert native_bits.pack_passes(x, 1e300, None) is None
    assert native_bits.pack_signs(x[:0]) is None
    assert native_bits.where_passes(x, ops.pack_signs(x)[:1]) is None
    with pytest.raises(RuntimeError, match="unflatten"):
        ops.pack_signs(x, 4)
    for operator, arguments in (("pack_signs", (strided, 2)), ("clamp_and_pack", (strided, 0.0, 1.0))):
        assert same(getattr(ops, operator)(*arguments), getattr(bits, operator)(*arguments))


def test_a_gradient_stops_at_the_last_element_alone() -> None:
    for shape in ((1, 3, 40, 40), (2, 65, 3), (1, 16, 1)):
        for last in (False, True):
            x = torch.zeros(shape)
            x.view(-1)[-1] = 2.0
            x = x.movedim(1, -1).contiguous().movedim(-1, 1) if last else x
            assert [ops.pack_passes(x, -1.0, bound)[1].item() for bound in (1.0, 3.0)] == [True, False]
            assert not ops.pack_passes(x, None, None)[1]


def test_neon_writes_what_the_portable_kernels_do(tmp_path: Path) -> None:
    neon = native.INSTRUCTION_SETS.index("neon")
    subprocess.run([*emulated("emulated_bits.c", ["bits.c"], tmp_path, "-O1"), str(neon)], check=True)
