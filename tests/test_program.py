"""Programs: what each operation means, the exact edges of quantizers, and plans in C that give the same bits."""

import copy
import ctypes
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from settings import default_dtype, mostly_nightly
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import qconv
from qconv import Scheme, schemes
from qconv.inference import FrozenModel, freeze, lower as lowering, verify
from qconv.inference.build import build
from qconv.kernels.native import instruction_sets
from qconv.models import ResNet, RPReLU
from qconv.program import operations as ops
from qconv.program.edges import NotMonotone, are_edges_of, edges_of, first_floats, float_at, place_of
from qconv.program.library import Library
from qconv.program.operations import Program, Window
from qconv.program.plan import Plan, form_of, program_bytes
from qconv.program.planned import run_operation
from qconv.program.read import read_program

resnet = partial(ResNet, 3, 10, widths=(16, 64), blocks=(1, 1), downsample="A")
BINARY: dict[str, Any] = {"shortcut": "per_conv", "activation": nn.Hardtanh}
NETWORKS: dict[str, tuple[Callable[[], nn.Module], Scheme | None]] = {
    "bnn": (partial(resnet, **BINARY), schemes.bnn()),
    "bireal": (partial(resnet, downsample="avgpool", **BINARY), schemes.bireal()),
    "reactnet": (partial(resnet, shortcut="per_conv", activation=RPReLU), schemes.reactnet()),
    "lsq44": (resnet, schemes.lsq(4, 4)),
    "lsq88": (partial(resnet, downsample="B"), schemes.lsq(8, 8)),
    "minmax88": (resnet, schemes.minmax(8, 8)),
    "dorefa22": (partial(resnet, activation=nn.PReLU), schemes.dorefa(2, 2)),
    "apot44": (resnet, schemes.apot(4, 4)),
    "n2uq22": (resnet, schemes.n2uq(2, 2)),
    "bwn": (resnet, schemes.bwn()),
    "float": (resnet, None),
}


def trained(model: nn.Module, scheme: Scheme | None, input: Tensor, **options: Any) -> nn.Module:
    """A network that has seen some images."""
    if scheme is not None:
        qconv.convert(model, scheme, **options)
        qconv.calibrate(model, [input])
    with torch.no_grad():
        for _ in range(3):
            model.train()(input)
    return model.eval()


def check_plan(model: nn.Module, input: Tensor) -> FrozenModel:
    """The frozen model runs as a plan, equal to its program's definition, and `verify` finds it equal to the model."""
    frozen = build(model, input)
    outputs = (pytree.tree_leaves(each(input)) for each in (frozen, frozen.program(input).run))
    assert all(map(torch.equal, *outputs))
    assert not frozen.unplanned
    checked = verify(model, frozen, input)
    assert checked.equal, f"\n{checked}"
    return frozen


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    make, scheme = NETWORKS[name]
    return trained(make(), scheme, torch.randn(8, 3, 16, 16))


@pytest.fixture(scope="module")
def bnn() -> FrozenModel:
    return freeze(network("bnn"))


def of_channels(channels: int, size: float = 1.0) -> dict[str, Any]:
    return {"scale": torch.randn(channels) * size, "bias": torch.randn(channels)}


def every(kinds: int, groups: int) -> Program:
    """A program with convolutions of bits, codes and floats in a row, with odd windows, and a map as its output."""
    torch.manual_seed(kinds)
    program = Program(5)
    windows = [
        Window((3, 3), (1, 1), (1, 1, 1, 1)),
        Window((3, 2), (2, 1), (0, 1, 2, 1), (1, 2)),
        Window((2, 5), (1, 3), (2, 2, 0, 1), (2, 1)),
    ]
    window, channels = windows[kinds], 6 * groups
    x = program.add(
        ops.ConvFloats(inputs=(0,), channels=channels, weight=torch.randn(channels, 5, 3, 3), window=windows[0])
    )

    def affine(place: int, size: float = 1.0) -> int:
        return program.add(ops.Affine(inputs=(place,), channels=channels, **of_channels(channels, size)))

    x = affine(x)
    x = program.add(ops.PReLU(inputs=(x,), channels=channels, slope=torch.randn(channels)))
    edges = torch.randn(9).sort().values
    codes = torch.tensor([0, 1, 2, 3, 5, 9, 90, 200, 254, 255], dtype=torch.uint8)
    uneven = program.add(ops.Quantize(inputs=(x,), channels=channels, edges=edges, codes=codes, zero=2, step=0.5))
    weight = torch.randint(-127, 128, (channels, channels // groups, *window.kernel), dtype=torch.int8)
    conv: dict[str, Any] = {"channels": channels, "window": window, "groups": groups}
    a = affine(program.add(ops.ConvCodes(**conv, inputs=(uneven,), weight=weight, zero=2)), 1e-4)
    small = torch.randint(-8, 8, weight.shape, dtype=torch.int8)
    levels = torch.arange(16, dtype=torch.uint8)
    even = ops.Quantize(
        inputs=(x,), channels=channels, edges=(torch.arange(15) - 7.5) * 0.25, codes=levels, zero=8, step=0.25
    )
    b = affine(program.add(ops.ConvCodes(**conv, inputs=(program.add(even),), weight=small, zero=8)), 1e-2)
    sign = program.add(ops.Sign(inputs=(x,), channels=channels, edge=torch.randn(channels)))
    signs = torch.randint(0, 2, weight.shape, dtype=torch.int8) * 2 - 1
    c = affine(program.add(ops.ConvBits(**conv, inputs=(sign,), weight=signs, pad_value=kinds - 1)), 1e-2)
    ab = program.add(ops.Add(inputs=(a, b), channels=channels))
    x = program.add(ops.Add(inputs=(ab, c), channels=channels))
    pool = Window((3, 3), (2, 2), (1, 1, 1, 1), ceil=True)
    y = program.add(ops.Maximum(inputs=(x,), channels=channels, window=pool))
    z = program.add(ops.Average(inputs=(x,), channels=channels, window=pool))
    x = program.add(ops.Add(inputs=(y, z), channels=channels))
    x = program.add(ops.Clamp(inputs=(x,), channels=channels, low=-2.0, high=3.0))
    taken = program.add(ops.Take(inputs=(x,), channels=channels + 7, stride=(2, 2), first=3))
    means = program.add(ops.Mean(inputs=(x,), channels=channels))
    gate = program.add(ops.Largest(inputs=(x,), channels=channels))
    gate = program.add(ops.Add(inputs=(means, gate), channels=channels))
    gate = program.add(ops.Affine(inputs=(gate,), channels=channels, **of_channels(channels)))
    gated = program.add(ops.Multiply(inputs=(x, gate), channels=channels, is_gate=True))
    x = program.add(ops.Multiply(inputs=(gated, x), channels=channels))
    x = program.add(ops.Clamp(inputs=(x,), channels=channels, low=-1.5))
    for how in ({"mode": ("reflect", "replicate", "circular")[kinds]}, {"value": 0.5 * kinds}):
        x = program.add(ops.Pad(inputs=(x,), channels=channels, arguments=(ops.Given(0), [1, 2, 2, 1]), named=how))
        x = program.add(ops.Average(inputs=(x,), channels=channels, window=Window((4, 4))))
    x = program.add(ops.SiLU(inputs=(x,), channels=channels))
    x = program.add(ops.Maximum(inputs=(x,), channels=channels, window=Window()))
    gate = program.add(
        ops.Affine(inputs=(x,), channels=channels, scale=torch.ones(channels), bias=torch.full((channels,), 3.0))
    )
    gate = program.add(ops.Clamp(inputs=(gate,), channels=channels, low=0.0, high=6.0))
    gate = program.add(
        ops.Affine(inputs=(gate,), channels=channels, scale=torch.ones(channels) / 6, bias=torch.zeros(channels))
    )
    x = program.add(ops.Multiply(inputs=(x, gate), channels=channels))
    wider: dict[str, Any] = {"channels": channels + 21}
    y = program.add(ops.Take(**wider, inputs=(x,)))
    z = program.add(ops.Take(**wider, inputs=(x,), first=21))
    y = program.add(ops.Add(**wider, inputs=(z, y)))
    y = program.add(ops.Select(**wider, inputs=(y,), index=torch.randint(channels + 21, (channels + 21,))))
    y = program.add(ops.Affine(**wider, inputs=(y,), **of_channels(channels + 21)))
    y = program.add(ops.Sigmoid(**wider, inputs=(y,)))
    y = program.add(ops.Repeat(**wider, inputs=(y,), times=(2, 3)))
    y = program.add(ops.Bilinear(**wider, inputs=(y,), times=(2, 1), align_corners=bool(kinds)))
    y = program.add(ops.GELU(**wider, inputs=(y,)))
    y = program.add(ops.LayerNorm(**wider, inputs=(y,), eps=1e-3))
    y = program.add(ops.Average(**wider, inputs=(y,), window=Window((4, 3), (4, 3))))
    blocks = torch.randn(4 * channels, channels + 21, 1, 1)
    x = program.add(ops.ConvFloats(inputs=(y,), channels=4 * channels, weight=blocks, window=Window()))
    x = program.add(ops.Shuffle(inputs=(x,), channels=channels, times=2))
    x = program.add(ops.PReLU(inputs=(x,), channels=channels, slope=torch.randn(channels)))
    x = program.add(ops.Average(inputs=(x,), channels=channels, window=Window((2, 2), (2, 2))))
    depth = Window((3, 3), (2, 2), (1, 1, 1, 1))
    wide = program.add(
        ops.ConvFloats(
            inputs=(x,), channels=channels + 7, weight=torch.randn(channels + 7, channels, 3, 3), window=depth
        )
    )
    program.outputs = (program.add(ops.Add(inputs=(wide, taken), channels=channels + 7)),)
    return program


# The operations


def test_floats_against_torch() -> None:
    x, weight = torch.randn(2, 6, 9, 8), torch.randn(8, 3, 3, 2)
    window = Window((3, 2), (2, 1), (1, 0, 2, 1), (1, 2))
    conv = ops.ConvFloats(inputs=(0,), channels=8, weight=weight, window=window, groups=2)
    exact = F.conv2d(F.pad(x.double(), window.padding), weight.double(), None, (2, 1), 0, (1, 2), 2)
    assert (conv.run(x) - exact).abs().max() < 1e-5
    assert conv.run(x).shape[2:] == conv.size((9, 8))
    for kernel, stride, padding, ceil in [(2, 2, 0, True), (3, 2, 1, True), (3, 1, 1, False), (3, 3, 0, False)]:
        pads = padding, padding, padding, padding
        window = Window((kernel, kernel), (stride, stride), pads, ceil=ceil)
        given: dict[str, Any] = {"inputs": (0,), "channels": 6, "window": window}
        average = F.avg_pool2d(x, kernel, stride, padding, ceil, count_include_pad=False)
        assert torch.allclose(ops.Average(**given).run(x), average, atol=1e-6)
        assert torch.equal(ops.Maximum(**given).run(x), F.max_pool2d(x, kernel, stride, padding, ceil_mode=ceil))
    assert torch.allclose(ops.Mean(inputs=(0,), channels=6).run(x), x.mean((2, 3), keepdim=True), atol=1e-6)
    x = torch.cat([torch.linspace(-87, 100, 10001), torch.tensor([0.0, torch.nan])]).view(1, 1, 1, -1)
    for kind, function in ((ops.Sigmoid, torch.sigmoid), (ops.SiLU, F.silu)):
        exact = function(x.double()).float()
        torch.testing.assert_close(kind(inputs=(0,), channels=1).run(x), exact, rtol=2e-7, atol=0, equal_nan=True)
    exact = F.gelu(x.double()).float()
    torch.testing.assert_close(ops.GELU(inputs=(0,), channels=1).run(x), exact, rtol=2e-7, atol=1e-6, equal_nan=True)
    far = torch.linspace(-20, -6, 1000).view(1, 1, 1, -1)
    assert torch.equal(ops.GELU(inputs=(0,), channels=1).run(far) < 0, F.gelu(far) < 0)  # for signs behind it
    norm = ops.LayerNorm(inputs=(0,), channels=19, eps=1e-5)
    x = torch.randn(2, 5, 7, 19) * 3 + 1
    exact = F.layer_norm(x.double(), (19,), eps=1e-5).float().movedim(-1, 1)
    torch.testing.assert_close(norm.run(x.movedim(-1, 1)), exact, rtol=0, atol=1e-6)
    x = torch.randn(2, 3, 5, 4)
    for times, corners in product([(1, 2), (3, 1), (2, 40)], [False, True]):
        up = ops.Bilinear(inputs=(0,), channels=3, times=times, align_corners=corners).run(x)
        exact = F.interpolate(x.double(), scale_factor=times, mode="bilinear", align_corners=corners).float()
        torch.testing.assert_close(up, exact, rtol=0, atol=5e-7)


def test_sums_of_floats_are_fused_in_order() -> None:
    """2^12 + 1 squared is 2^24 + 2^13 + 1: only a fused sum with −2^24 − 2^13 keeps the 1."""
    x = torch.tensor([1.0, 4097.0]).view(1, 2, 1, 1)
    weight = torch.tensor([-(2.0**24) - 2.0**13, 4097.0]).view(1, 2, 1, 1)
    conv = ops.ConvFloats(inputs=(0,), channels=1, weight=weight, window=Window())
    assert conv.run(x).item() == 1
    swapped = ops.ConvFloats(inputs=(0,), channels=1, weight=weight.flip(1), window=Window())
    assert swapped.run(x.flip(1)).item() == 0  # the product is rounded to a float before the next sum


def test_sums_near_midpoints_of_floats_are_rounded_once() -> None:
    """Against the C library: sums of float64 that are rounded again are wrong where they end on a midpoint."""
    fused = ctypes.CDLL(None).fmaf
    fused.restype, fused.argtypes = ctypes.c_float, [ctypes.c_float] * 3
    count = 400
    a, c = 1 + torch.rand(count), (1 + torch.rand(count)) * 2.0 ** torch.randint(24, 32, (count,))
    c *= torch.randint(0, 2, c.shape) * 2 - 1
    b = 2.0 ** (c.abs().log2().floor() - 24) / a  # the product is about half of a unit of c in its last place
    weight = torch.stack([c, b], 1)[..., None, None]
    images = torch.stack([torch.ones(count), a], 1)[..., None, None]
    found = ops.ConvFloats(inputs=(0,), channels=count, weight=weight, window=Window()).run(images).flatten(1)
    pairs = list(zip(b.tolist(), c.tolist(), strict=True))
    wanted = torch.tensor([[fused(x, *pair) for pair in pairs] for x in a.tolist()])
    assert torch.equal(found, wanted)
    twice = (a.double().unsqueeze(1) * b.double() + c.double()).float()
    assert not torch.equal(twice, wanted)


# Edges


def test_the_order_of_floats() -> None:
    x = torch.tensor([-torch.inf, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, torch.inf])
    assert torch.equal(float_at(place_of(x)), x)
    assert (place_of(x).diff() > 0).all()
    assert (place_of(torch.tensor(0.0)), place_of(torch.tensor(-0.0))) == (0, -1)


@pytest.mark.parametrize("step", [0.1, 1.0, 3e-5, 7.3])
def test_edges_are_the_first_floats(step: float) -> None:
    number = torch.tensor(step)
    for codes in (
        lambda x: (x / number).clamp(-8, 7).round(),
        lambda x: (x / number).clamp(-8, 7).add(0.5).floor(),
        lambda x: torch.where(x < 100 * number, -8, 7),
    ):
        edges = edges_of(codes, -8, 7, step)
        assert torch.equal(edges, first_floats(lambda x: codes(x) >= torch.arange(-7, 8), (15,)))  # noqa: B023
        assert are_edges_of(codes, edges, -8)
        assert not are_edges_of(codes, edges * (1 + 2**-20), -8)
    with pytest.raises(NotMonotone, match="a larger number has a smaller code"):
        edges_of(lambda x: (x / number).clamp(-8, 7).round().neg(), -8, 7, step)
    with pytest.raises(NotMonotone, match="a code is never reached"):
        edges_of(lambda x: (x / number).clamp(-8, 6).round(), -8, 7, step)


def test_products_stand_for_quotients_only_where_all_edges_agree() -> None:
    found = set()
    for step in torch.rand(200) + 0.01:
        edges = edges_of(lambda x: (x / step).clamp(-128, 127).round(), -128, 127, float(step))  # noqa: B023
        codes = torch.arange(256, dtype=torch.uint8)
        quantize = ops.Quantize(inputs=(0,), channels=1, edges=edges, codes=codes, zero=128, step=float(step))
        form, number = form_of(quantize)
        found.add(form)
        near = float_at(place_of(edges).unsqueeze(1) + torch.arange(-3, 4)).view(1, 1, 1, -1)
        rounded = near * number if form == 0 else near / number
        assert torch.equal(rounded.clamp(-128, 127).round() + 128, quantize.run(near).float())
    assert found == {0, 1}


# Plans


def plan_of(program: Program, size: ops.Size, isa: str | None = None, guard: bool = False) -> Plan:
    return Plan(program_bytes(program, guard), size, instruction_set=isa)


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize(("kinds", "groups"), mostly_nightly(product((0, 1, 2), (1, 2, 6)), [(0, 6), (1, 2), (2, 1)]))
def test_every_operation_in_c(kinds: int, groups: int, isa: str) -> None:
    program = every(kinds, groups)
    for size in [(11, 14), (16, 16)]:
        plan = plan_of(program, size, isa)
        for count, threads in [(1, 1), (1, 2), (3, 2), (9, 2)]:
            x = torch.randn(count, 5, *size)
            x[0, 1, 3, 4] = x[-1, 1, 3, 4] = torch.inf * (-1) ** count
            wanted = program.run(x)
            for each in (x, x.contiguous(memory_format=torch.channels_last)):
                assert torch.equal(plan(each, threads=threads)[0], wanted)
        x = torch.randn(2, 5, *size)
        assert all(map(torch.equal, program.values(x, run_operation), program.values(x)))


@pytest.mark.parametrize("isa", instruction_sets())
def test_sums_of_the_largest_codes(isa: str) -> None:
    """Every weight of a filter has one sign: on AVX2 as many products are added in 16 bits as may fit there.

    Where none do, weights have 8 bits in memory for few pixels, and 16 for many.
    """
    for (largest, zero), kernel, channels in product(
        ((1, 1), (15, 2), (15, 250), (255, 2)), ((1, 1), (3, 2)), (6, 33, 260)
    ):
        program = Program(channels)
        levels = torch.arange(largest + 1, dtype=torch.uint8)
        codes = ops.Quantize(inputs=(0,), channels=channels, edges=levels[1:] - 0.5, codes=levels, zero=zero, step=1.0)
        place = program.add(codes)
        window, signs = Window(kernel, padding=(1, 0, 0, 1)), torch.tensor([1, -1] * 10).view(-1, 1, 1, 1)
        outputs, height = [], 3 if channels == 33 else 8
        for size in (1, 2, 3, 7, 14, 63, 64, 126):
            weight = (signs * torch.full((20, channels, *kernel), size)).to(torch.int8)
            weight[:, 1::2] += signs.to(torch.int8)
            weight[::3, ::5] = torch.randint(-size, size + 1, weight[::3, ::5].shape, dtype=torch.int8)
            fields: dict[str, Any] = {"channels": 20, "window": window, "zero": codes.zero}
            outputs.append(program.add(ops.ConvCodes(inputs=(place,), weight=weight, **fields)))
        program.outputs, program.ranks = tuple(outputs), (4,) * len(outputs)
        x = torch.full((2, channels, height, 5), 1000.0)
        x[1] = torch.rand(channels, height, 5) * 300
        wanted = program.values(x)
        for place, found in zip(outputs, plan_of(program, (height, 5), isa)(x, threads=1), strict=True):
            assert torch.equal(found, wanted[place])


@pytest.mark.parametrize("isa", instruction_sets())
def test_sums_of_bits(isa: str) -> None:
    """Of whole blocks of 16, 32 and 64 channels, and of groups of such; some pixels differ from all of a filter."""
    for groups, channels, outputs in ((1, 24, 16), (1, 520, 10), (1, 72, 32), (1, 136, 100), (2, 32, 32), (3, 192, 96)):
        program, window = Program(channels), Window((3, 2), padding=(1, 0, 0, 1))
        place = program.add(ops.Sign(inputs=(0,), channels=channels, edge=torch.zeros(channels)))
        signs = torch.randint(0, 2, (outputs, channels // groups, 3, 2), dtype=torch.int8) * 2 - 1
        signs[::3] = 1
        fields: dict[str, Any] = {"channels": outputs, "window": window, "groups": groups, "pad_value": 0}
        program.outputs = (program.add(ops.ConvBits(inputs=(place,), weight=signs, **fields)),)
        program.ranks = (4,)
        x = torch.cat([torch.full((1, channels, 7, 5), -1.0), torch.randn(2, channels, 7, 5)])
        assert torch.equal(plan_of(program, (7, 5), isa)(x, threads=1)[0], program.run(x))


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize("levels", [1, 2, 3, 22, 200, 1000])
def test_float_weights_of_few_levels_are_small_in_a_file(levels: int, isa: str) -> None:
    """Each filter has levels of its own; -0 and NaN are some, too."""
    for channels, outputs, groups in ((24, 20, 1), (6, 9, 3), (40, 40, 40)):
        program, shape = Program(channels), (outputs, channels // groups, 5, 5)
        choices = torch.randn(outputs, levels)
        choices[-1, : min(levels, 3)] = torch.tensor([-0.0, torch.nan, 0.0])[: min(levels, 3)]
        weight = choices.gather(1, torch.randint(levels, (outputs, shape[1] * 25))).view(shape)
        fields: dict[str, Any] = {"weight": weight, "window": Window((5, 5), padding=(2, 2, 2, 2)), "groups": groups}
        program.outputs = (program.add(ops.ConvFloats(inputs=(0,), channels=outputs, **fields)),)
        program.ranks = (4,)
        content, x = program_bytes(program, guard=False), torch.randn(2, channels, 6, 7)
        read = read_program(content)[0].operations[1]
        assert isinstance(read, ops.ConvFloats)
        assert torch.equal(read.weight.view(torch.int32), weight.view(torch.int32))
        if channels == 24:
            assert (len(content) < 0.8 * 4 * weight.numel()) == (levels < 1000)
        found, wanted = plan_of(program, (6, 7), isa)(x, threads=1)[0], program.run(x)
        assert torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))


@pytest.mark.parametrize("isa", instruction_sets())
@pytest.mark.parametrize(("stride", "dilation"), [((1, 1), (1, 1)), ((3, 2), (1, 2)), ((2, 1), (1, 3))], ids=str)
def test_sums_of_codes(stride: Any, dilation: Any, isa: str) -> None:
    """Of images with rows of few and of many pixels, which tiles of AMX cut in many ways, and of 1 to 3 groups.

    Weights of 1 to 8 bits are as many in a file.
    """
    shapes = (5, 3, 4), (9, 8, 7), (7, 17, 16), (11, 31, 33), (6, 70, 5)
    for number, ((height, width, outputs), groups) in enumerate(product(shapes, (1, 2, 3))):
        program, levels = Program(20 * groups), torch.arange(256, dtype=torch.uint8)
        fields: dict[str, Any] = {"edges": levels[1:] - 0.5, "codes": levels, "zero": 3, "step": 1.0}
        place = program.add(ops.Quantize(inputs=(0,), channels=20 * groups, **fields))
        half = 1 << number % 8
        weight = torch.randint(-half, half, (outputs * groups, 20, 3, 3), dtype=torch.int8)
        weight[0, 0, 0] = torch.tensor([-half, half - 1, 0])
        fields = {"weight": weight, "window": Window((3, 3), stride, (3, 1, 2, 3), dilation), "groups": groups}
        program.outputs = (program.add(ops.ConvCodes(inputs=(place,), channels=len(weight), zero=3, **fields)),)
        program.ranks = (4,)
        x = 256 * torch.rand(3, 20 * groups, height, width)
        plan, wanted = plan_of(program, (height, width), isa), program.run(x)
        content = program_bytes(program, guard=False)
        assert len(content) < 3000 + len(weight) * (184 * (number % 8 + 1) // 8)  # 180 weights, and the codes' table
        assert torch.equal(read_program(content)[0].run(x), wanted)
        assert torch.equal(plan(x, threads=1)[0], wanted)
        assert torch.equal(torch.cat([plan(image[None], threads=2)[0] for image in x]), wanted)
        assert torch.equal(plan(x, threads=2**31 - 1)[0], wanted)


@pytest.mark.parametrize("name", mostly_nightly(NETWORKS, ("minmax88",)))
def test_networks_in_c(name: str) -> None:
    model, x = network(name), torch.randn(5, 3, 17, 13)
    program = check_plan(model, x).program(x)
    wanted = program.run(x)
    for isa in instruction_sets():
        plan = plan_of(program, (17, 13), isa)
        assert torch.equal(plan(x, threads=1)[0].flatten(1), wanted)
        assert torch.equal(torch.cat([plan(image[None], threads=2)[0] for image in x]).flatten(1), wanted)


def test_a_plan_keeps_to_its_images(bnn: FrozenModel) -> None:
    """One plan for each size, and the program is one for all sizes."""
    for size in (8, 9, 32, 8):
        x = torch.randn(2, 3, size, size)
        program = bnn.program(x)
        assert program.size is None
        assert torch.equal(bnn(x), program.run(x))
    with pytest.raises(RuntimeError, match="expected input"):
        freeze(network("bnn"))(torch.randn(2, 4, 8, 8))


class Joined(nn.Module):
    """Two branches whose channels are joined, as in SqueezeNet, and a fixed blur as a function, as in QuickNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.left, self.right = nn.Conv2d(8, 5, 1), nn.Conv2d(8, 20, 3, padding=1)
        self.last, self.blur = nn.Conv2d(33, 4, 3), torch.ones(4, 1, 3, 3) / 9

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.first(input)
        joined = torch.cat([self.left(hidden), hidden, self.right(hidden.clamp(-1, 1))], 1)
        return F.conv2d(self.last(joined).relu(), self.blur, None, 2, 1, 1, 4)


def test_a_linear_layer_of_flattened_images_fixes_their_size() -> None:
    for scheme in (schemes.bnn(), schemes.lsq(4, 4)):
        parts = (
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.Hardtanh(),
            nn.Flatten(),
            nn.Linear(8 * 36, 12),
            nn.Linear(12, 3),
        )
        x = torch.randn(4, 3, 8, 8)
        frozen = build(trained(nn.Sequential(*parts), scheme, x), x)
        assert torch.equal(frozen(x), frozen.program(x).run(x))
        assert not frozen.unplanned
        assert frozen.program(x).size == (8, 8)


class Gated(nn.Module):
    """A network with what C has no operation for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.first(input)
        return self.second(hidden * hidden.mean((2, 3), keepdim=True).tanh())


class Interrupted(nn.Module):
    """Functions of torch between convolutions: normalized channels, attention, upsampling, and pixels of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide = nn.Conv2d(3, 16, 3, 2, 1), nn.Conv2d(16, 16, 3, 1, 1)
        self.left, self.right = nn.Conv2d(16, 8, 1), nn.Conv2d(16, 8, 3, 1, 1)
        self.norm, self.last = nn.LayerNorm(16), nn.Conv2d(20, 12, 1)
        self.up, self.classes = nn.ConvTranspose2d(16, 4, 2, 2), nn.Linear(6, 4)

    def forward(self, input: Tensor) -> dict[str, Tensor]:
        hidden = F.relu(self.first(input))
        normal = self.norm(hidden.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        both = torch.stack([self.left(normal), self.right(hidden)], 1).flatten(3).softmax(-1)
        deep = F.gelu(self.wide(normal)) + hidden * both.prod(1).sum((1, 2)).view(-1, 1, 1, 1)
        small = F.interpolate(F.max_pool2d(deep, 2), scale_factor=4.0, mode="bilinear")
        maps = self.last(torch.cat([small, self.up(deep)], 1))
        frames = maps.view(len(input), 2, 6, *maps.shape[2:]).flatten(0, 1)  # twice as many images
        scores = self.classes(frames.mean((2, 3))).view(len(input), 2, 4)
        return {"maps": F.pixel_shuffle(maps, 2), "scores": scores}


@pytest.mark.parametrize("scheme", [schemes.lsq(4, 4), schemes.bnn()])
def test_c_runs_the_parts_between_functions_of_torch(scheme: Scheme) -> None:
    x = torch.randn(5, 3, 16, 12)
    model = trained(Interrupted(), scheme, x)
    frozen = build(model, x)
    wanted, values = frozen(x), frozen.own_values(x)
    outputs = pytree.tree_leaves(wanted)
    assert all(map(torch.equal, outputs, [values[place] for place in frozen.program(x).outputs]))
    checked = verify(model, frozen, x)
    assert checked.equal, f"\n{checked}"
    assert frozen.unplanned.endswith(": C has no stack")
    for other in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
        found = other(x[2:].contiguous(memory_format=torch.channels_last))
        for output, whole in zip(pytree.tree_leaves(found), outputs, strict=True):
            assert torch.allclose(output, whole[2:], atol=1e-6)
    exported = torch.export.export(frozen, (x,)).module()(x)
    assert torch.allclose(exported["maps"], wanted["maps"], atol=1e-5)
    x[3, 0, 0, 0] = torch.inf
    for output, whole in zip(pytree.tree_leaves(frozen(x)), outputs, strict=True):
        assert output.flatten(1).isnan().all(1).tolist() == [False, False, False, True, False]
        assert torch.allclose(output[:3], whole[:3], atol=1e-6)


def test_what_c_has_no_operation_for_runs_by_torch(bnn: FrozenModel, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 8, 8)
    model = trained(Gated(), schemes.lsq(4, 4), x, skip=["first"])
    frozen = build(model, x)
    assert verify(model, frozen, x).equal
    assert frozen.unplanned == "'tanh': C has no tanh"
    with pytest.raises(ValueError, match=r"the model has no program for C: 'tanh': C has no tanh"):
        qconv.save_program(model, tmp_path / "model.qcp", x)
    assert not (tmp_path / "model.qcp").exists()
    planned = bnn(x)
    assert not bnn.unplanned
    assert torch.allclose(bnn(x.clone().requires_grad_()), planned, atol=1e-5)
    with torch.autocast("cpu"):
        assert bnn(x).shape == planned.shape
    made: Any = torch  # tensors that C can't read
    assert torch.allclose(bnn(made._neg_view(-x.clone())), planned, atol=1e-5)
    assert torch.allclose(bnn(made._efficientzerotensor(2, 3, 8, 8)), bnn(torch.zeros(2, 3, 8, 8)), atol=1e-5)
    with default_dtype(torch.float64):
        assert torch.equal(bnn(x), planned)
        assert torch.equal(copy.deepcopy(bnn)(x), planned)


@pytest.mark.parametrize("function", [nn.SiLU(), nn.GELU(), nn.Sigmoid(), nn.AvgPool2d(16)], ids=str)
def test_gradients_and_autocast_are_torchs(function: nn.Module) -> None:
    x = 10 * torch.randn(2, 3, 16, 16)
    model = trained(nn.Sequential(nn.Conv2d(3, 8, 1), function, nn.Conv2d(8, 4, 1)), schemes.bwn(), x, skip=["0"])
    frozen = build(model, x)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for network, input in zip((model, frozen), inputs, strict=True):
        network(input).square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(frozen(x), model(x))  # GELU rounds by memory format on processors with AMX


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize(("zero", "weight"), [(0, 15), (127, 255), (255, 32767)])  # the last sums exceed 2^24
@pytest.mark.parametrize("padding", [(1, 1, 1, 1), (0, 2, 1, 0)])
def test_sums_of_codes_without_a_plan_are_exact(groups: int, zero: int, weight: int, padding: Any) -> None:
    program = Program(16)
    edges = torch.arange(1.0, 256) - 0.5
    quantize = ops.Quantize(inputs=(0,), channels=16, edges=edges, codes=torch.arange(256).byte(), zero=zero, step=1.0)
    filters = torch.randint(-weight, weight + 1, (8, 16 // groups, 3, 3), dtype=torch.int16)
    window = Window((3, 3), (2, 1), padding, (1, 2))
    given: Any = {"channels": 8, "weight": filters, "groups": groups, "window": window, "zero": zero}
    program.outputs = (program.add(ops.ConvCodes(inputs=(program.add(quantize),), **given)),)
    x = torch.randint(0, 256, (2, 16, 7, 8)).float()
    library = Library(program)
    for module in (library, library.float()):
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(module(x), program.run(x))


@pytest.mark.nightly
def test_many_multiplications_of_floats_with_signs_are_torchs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, x = network("bwn"), torch.randn(2, 3, 16, 16)
    assert build(model, x).program(x).multiplications((16, 16)) == (4_128_768, 111_232)
    monkeypatch.setattr("qconv.program.planned._MANY", 4 * 10**6)
    frozen = build(model, x)
    frozen(x)
    assert frozen.unplanned == "4,128,768 multiplications of floats with signs are faster in torch"
    assert frozen.traced(x) is frozen
    qconv.save_program(model, tmp_path / "model.qcp", x)


class Attentive(nn.Module):
    """Hard activations, a gate for each channel, padding of its own, numbers before values, a head of functions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, 2), nn.Conv2d(8, 8, 1)
        self.down, self.act, self.pad = nn.Conv2d(8, 8, 1), nn.Hardswish(), nn.ZeroPad2d((1, 0, 2, 1))
        self.classes = torch.linspace(-1, 1, 24).view(3, 8)

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.act(self.first(input))
        hidden = self.second(F.pad(self.pad(hidden), (0, 1))) * 1.5
        gate = F.hardsigmoid(self.down(F.adaptive_avg_pool2d(hidden, 1)))
        hidden = self.last(2 + gate * hidden)
        return F.linear(hidden.mean((2, 3)), self.classes)


class Shuffled(nn.Module):
    """Channels that are split, shuffled and dropped, pixels that are left out or repeated, and smooth activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.gate = nn.Conv2d(3, 12, 3), nn.Conv2d(6, 6, 3, 2, 1), nn.Conv2d(12, 12, 1)
        self.last = nn.Conv2d(10, 4, 3)

    def forward(self, input: Tensor) -> Tensor:
        hidden = F.silu(self.first(input))
        count, channels, height, width = hidden.shape
        hidden = hidden.view(count, 3, 4, height, width).transpose(1, 2).reshape(count, channels, height, width)
        hidden = hidden * self.gate(F.adaptive_avg_pool2d(hidden, 1)).sigmoid()
        left, right = hidden.chunk(2, 1)
        up = F.interpolate(self.down(right), scale_factor=2.0)
        pixels = hidden.permute(0, 2, 3, 1)[:, ::2, ::2, 4:]
        taken = pixels.permute(0, 3, 1, 2).roll(1, 1).mean((2, 3), keepdim=True)
        first, _, third = left.split([1, 2, 3], 1)
        return self.last(torch.cat([F.channel_shuffle(up, 2), third * taken[:, [2, 0, 1]], first], 1)[..., ::2])


class Signals(nn.Module):
    """A network of signals, whose output is a signal, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.pool = nn.Conv1d(3, 16, 5, 2, 2), nn.BatchNorm1d(16), nn.MaxPool1d(3, 2, 1)
        self.deep, self.wide = nn.Conv1d(16, 16, 3, padding=2, dilation=2, groups=16), nn.Conv1d(16, 32, 4)
        self.act, self.gate, self.last = nn.PReLU(32), nn.Conv1d(32, 32, 1), nn.Conv1d(32, 5, 3, padding="same")

    def forward(self, input: Tensor) -> Tensor:
        hidden = self.pool(F.relu(self.norm(self.first(input))))
        hidden = self.act(self.wide(F.pad(self.deep(hidden) + hidden, (1, 2))))
        hidden = hidden * self.gate(hidden.mean(2, keepdim=True)).sigmoid()
        first, second = F.avg_pool1d(hidden, 2).chunk(2, 1)
        return self.last(torch.cat([second, first * 0.5], 1))


@pytest.mark.parametrize(
    "scheme",
    [schemes.minmax(8, 8), schemes.lsq(4, 4), schemes.bnn(), schemes.reactnet(), schemes.adabin(), schemes.bwn()],
)
def test_signals_are_images_of_one_row(scheme: Scheme, tmp_path: Path) -> None:
    x = torch.randn(4, 3, 96)
    model = trained(Signals(), scheme, x)
    frozen = build(model, x)
    checked = verify(model, frozen, x)
    assert checked.equal, f"\n{checked}"
    assert not frozen.unplanned
    assert frozen.program(x).size is None
    assert {told.arithmetic for told in frozen.layers} <= {"binary", "integer", "offset", "float"}
    for signals in (x[:1], torch.randn(3, 3, 141)):
        torch.testing.assert_close(frozen(signals), model(signals), rtol=0, atol=5e-6)
    assert torch.equal(torch.export.export(frozen, (x,)).module()(x), frozen(x))
    qconv.export(model, tmp_path / "model.qcp", to="program", images=x)
    assert qconv.verify_export(model, tmp_path / "model.qcp", x).agrees


@pytest.mark.parametrize("scheme", [schemes.bnn(), schemes.lsq(4, 4), schemes.n2uq(3, 3), schemes.bwn()])
def test_rows_are_images_of_one_pixel(scheme: Scheme, tmp_path: Path) -> None:
    x = torch.randn(16, 20)
    hidden = nn.Linear(20, 32), nn.BatchNorm1d(32), nn.PReLU(), nn.Linear(32, 24), nn.BatchNorm1d(24), nn.Hardtanh()
    model = trained(nn.Sequential(*hidden, nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 5)), scheme, x)
    frozen = build(model, x)
    checked = verify(model, frozen, x)
    assert checked.equal, f"\n{checked}"
    assert not frozen.unplanned
    torch.testing.assert_close(frozen(x[:3]), model(x[:3]), rtol=0, atol=5e-6)
    assert torch.equal(torch.export.export(frozen, (x,)).module()(x), frozen(x))
    with pytest.raises(RuntimeError, match="running_mean should contain 3 elements not 32"):
        frozen(torch.randn(2, 3, 20))
    assert frozen(x[:0]).shape == (0, 5)
    linear = trained(nn.Sequential(nn.Linear(20, 8), nn.Linear(8, 8), nn.Linear(8, 5)), scheme, x)
    assert build(linear, torch.randn(2, 5, 3, 20))(x[:0]).shape == (0, 5)
    for to, name in (("program", "model.qcp"), ("onnx", "model.onnx")):
        qconv.export(model, tmp_path / name, to=to, images=x)
        assert qconv.verify_export(model, tmp_path / name, x).agrees


def test_a_model_of_images_takes_no_rows() -> None:
    model = trained(
        nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(3))), schemes.lsq(4, 4), x := torch.randn(4, 3, 8, 8)
    )
    with pytest.raises(ValueError, match=r"input has shape \(2, 3\); a frozen model takes batches, of 4 dimensions$"):
        build(model, x)(torch.randn(2, 3))


@pytest.mark.parametrize("size", [(1, 5), (1, 1), (3, 1)])
@pytest.mark.parametrize("pool", [nn.MaxPool2d, partial(nn.AvgPool2d, count_include_pad=False)])
def test_windows_that_end_beyond_the_image(pool: Any, size: tuple[int, int]) -> None:
    x = torch.randn(2, 3, *size)
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), pool(2, ceil_mode=True), nn.Tanh(), nn.Conv2d(8, 8, 1))
    model = trained(nn.Sequential(net, pool(3, ceil_mode=True), nn.Conv2d(8, 4, 1)), schemes.lsq(4, 4), x)
    torch.testing.assert_close(build(model, x)(x), model(x), rtol=0, atol=1e-6)


class Padded(nn.Module):
    """Every padding, and magnitudes."""

    def __init__(self) -> None:
        super().__init__()
        modes = "reflect", "replicate", "circular", "zeros"
        self.first, self.padding = (
            nn.Conv2d(3, 24, 3, padding=1, padding_mode="reflect"),
            nn.ReplicationPad2d((1, 0, 2, 1)),
        )
        self.inner = nn.Sequential(*(nn.Conv2d(24, 24, 3, padding=(2, 1), padding_mode=mode) for mode in modes))
        self.last = nn.Conv2d(24, 4, 3)

    def forward(self, input: Tensor) -> Tensor:
        x = self.inner(self.padding(self.first(input)).abs())
        x = F.max_pool2d(F.pad(x, (0, 1, 1, 0), value=-torch.inf), 2)
        return self.last(F.pad(x, (2, 1, 0, 1), mode="reflect"))


class Pixels(nn.Module):
    """Pixels with channels last, and one after another, as ConvNeXt's blocks and tokens of attention have them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.wide, self.narrow = (
            nn.Conv2d(3, 16, 3, 2, 1),
            nn.LayerNorm(16),
            nn.Linear(16, 24),
            nn.Linear(24, 16),
        )
        self.gamma, self.mixed, self.last = nn.Parameter(torch.rand(16)), nn.Linear(16, 20), nn.Conv2d(20, 4, 3)

    def forward(self, input: Tensor) -> Tensor:
        pixels = self.first(input).permute(0, 2, 3, 1)
        pixels = self.narrow(F.gelu(self.wide(self.norm(pixels)))) * self.gamma + pixels
        count, height, width, channels = pixels.shape
        mixed = self.mixed(pixels.reshape(count, height * width, channels)).relu()
        return self.last(mixed.transpose(1, 2).reshape(count, 20, height, width))


@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        (Attentive, schemes.minmax(8, 8)),
        (Joined, schemes.bnn()),
        (Shuffled, schemes.lsq(4, 4)),
        (Pixels, schemes.minmax(8, 8)),
        (Pixels, schemes.bnn()),
        (Padded, schemes.lsq(4, 4)),
        (Padded, schemes.adabin()),
    ],
)
def test_gates_and_joined_channels(kind: type[nn.Module], scheme: Scheme) -> None:
    x = torch.randn(3, 3, 12, 12)
    check_plan(trained(kind(), scheme, x), x)


class Tokens(nn.Module):
    """A block of a transformer, and a layer that sees the tokens before the images."""

    def __init__(self, is_first: bool) -> None:
        super().__init__()
        self.is_first, self.token = is_first, nn.Parameter(torch.randn(1, 1, 16))
        self.patches, self.norm, self.parts = nn.Conv2d(3, 16, 4, 4), nn.LayerNorm(16), nn.Linear(16, 48)
        self.mixed, self.wide, self.narrow = nn.Linear(16, 16), nn.Linear(16, 24), nn.Linear(24, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, input: Tensor) -> Tensor:
        tokens = self.patches(input).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(input), -1, -1), tokens], 1)
        tokens = tokens.transpose(0, 1) if self.is_first else tokens
        query, key, value = self.parts(self.norm(tokens)).chunk(3, -1)
        dims = (1, 2, 0) if self.is_first else (0, 2, 1)
        scores = (query @ key.transpose(1, 2) if not self.is_first else query * key).softmax(-1)
        mixed = scores @ value if not self.is_first else scores * value
        tokens = tokens + self.mixed(mixed)
        tokens = tokens + self.narrow(F.gelu(self.wide(self.norm(tokens))))
        return self.last(tokens.permute(dims).mean(2))


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("scheme", [schemes.minmax(8, 8), schemes.bnn()])
def test_tokens(is_first: bool, scheme: Scheme) -> None:
    x = torch.randn(5, 3, 12, 8)
    model = trained(Tokens(is_first), scheme, x)
    frozen = build(model, x)
    checked = verify(model, frozen, x)
    assert checked.equal, f"\n{checked}"
    rows = [operation for operation in frozen.program(x).operations if isinstance(operation, ops.LayerNorm)]
    assert len(rows) == (0 if is_first else 2)
    for count in (1, 2, 3, 5):
        torch.testing.assert_close(frozen(x[:count]), model(x[:count]), rtol=0, atol=2e-6)


@pytest.mark.parametrize("norm", [nn.LayerNorm(16), nn.Identity()])  # behind which pixels lie otherwise in memory
def test_linear_layers_of_pixels_that_stay_float(norm: nn.Module) -> None:
    network, x = Pixels(), torch.randn(3, 3, 16, 12)
    network.add_module("norm", norm)
    model = trained(network, schemes.lsq(4, 4), x, skip=["wide", "mixed"])
    frozen = check_plan(model, x)
    for images in (x[:1], torch.randn(2, 3, 10, 22)):
        torch.testing.assert_close(frozen(images), model(images), rtol=0, atol=2e-6)


OTHERS = [
    "mobilenet_v2",
    "squeezenet1_1",
    "densenet121",
    "googlenet",
    "mnasnet0_5",
    "mobilenet_v3_small",
    "regnet_x_400mf",
    "shufflenet_v2_x0_5",
    "efficientnet_b0",
    "lraspp_mobilenet_v3_large",
    "convnext_tiny",
    "timm/hrnet_w18_small",
    "timm/resnet18d",
    "timm/tf_mixnet_s",
    "timm/repvit_m0_9",
]


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of untrained weights
@pytest.mark.parametrize("name", OTHERS)
def test_networks_that_nobody_here_wrote(name: str) -> None:
    import timm
    import torchvision

    torch.manual_seed(0)
    is_timm, x = name.startswith("timm/"), torch.randn(4, 3, 64, 64)
    make: Any = partial(timm.create_model, name[5:]) if is_timm else partial(torchvision.models.get_model, name)
    make = partial(make, weights_backbone=None) if name.startswith("lraspp") else make
    model = trained(make(num_classes=10), schemes.minmax(8, 8), x)
    check_plan(model, x[:2])


class InPlace(nn.Module):
    """Values that are written to after another name was given to them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.relu = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(inplace=True)

    def forward(self, input: Tensor) -> Tensor:
        shortcut = self.first(input)
        hidden = self.second(self.relu(shortcut))
        hidden += shortcut  # which is past the ReLU
        return hidden.mul_(0.5)


class Upsampled(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.conv, self.up, self.norm = nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 12, **options), nn.BatchNorm2d(12)

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(self.norm(self.up(self.conv(input))))


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "more", "groups", "of_signs"),
    [
        (2, 2, 0, 0, 1, "binary"),
        (3, 1, 1, 0, 1, "binary"),
        (3, 2, 1, 1, 2, "integer"),
        ((4, 2), 2, (1, 0), 0, 4, "integer"),
        (8, 4, 2, 0, 1, "integer"),
        (5, 3, 1, 0, 1, "integer"),
        (1, 2, 0, 1, 1, "integer"),
        (3, 2, 0, 0, 1, "float"),
        (3, 1, 3, 0, 1, "float"),
    ],
)
def test_transposed_convolutions(kernel: Any, stride: int, padding: Any, more: int, groups: int, of_signs: str) -> None:
    """As convolutions, whose channels become blocks, where the output has a whole number of blocks of the stride."""
    x = torch.randn(2, 3, 9, 8)
    options: dict[str, Any] = {"kernel_size": kernel, "stride": stride, "padding": padding, "output_padding": more}
    kinds = {schemes.bnn(): of_signs, schemes.minmax(8, 8): of_signs.replace("binary", "integer")}
    for scheme, kind in kinds.items():
        model = trained(Upsampled(**options, groups=groups), scheme, x, skip=())
        frozen = build(model, x)
        assert frozen.layers[1].arithmetic == kind
        assert bool(frozen.unplanned) == (kind == "float")
        assert torch.equal(frozen(x), frozen.program(x).run(x)) or frozen.unplanned
        assert verify(model, frozen, x).equal


def test_values_that_are_written_in_place() -> None:
    x = torch.randn(2, 3, 8, 8)
    model = trained(InPlace(), None, x)
    frozen = build(model, x)
    assert torch.allclose(frozen(x), model(x.clone()), atol=1e-5)
    assert not frozen.unplanned


class Heads(nn.Module):
    """A mask, classes, and the values behind them, under names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.mask = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 2, 1)

    def forward(self, input: Tensor) -> dict[str, Any]:
        hidden = self.first(input)
        deep = self.second(hidden).relu()
        return {"maps": (hidden, deep), "mask": self.mask(deep), "classes": deep.mean((2, 3))}


def test_several_outputs_are_one_plan(qconv_run: str, tmp_path: Path) -> None:
    x = torch.randn(4, 3, 9, 8)
    model = trained(Heads(), schemes.lsq(4, 4), x)
    frozen = build(model, x)
    wanted = frozen.program(x).run(x)
    outputs = [*wanted["maps"], wanted["mask"], wanted["classes"]]
    assert all(map(torch.equal, pytree.tree_leaves(frozen(x)), outputs))
    assert not frozen.unplanned
    assert verify(model, frozen, x).equal
    qconv.save_program(model, tmp_path / "model.qcp", x)
    rows = torch.cat([output.flatten(1) for output in outputs], 1)
    assert torch.equal(printed([qconv_run, tmp_path / "model.qcp", "9", "8"], x), rows)
    with pytest.raises(ValueError, match="the program has several outputs"):
        torch.ops.qconv.run_program(program_bytes(frozen.program(x), True), x, [8, 0, 1, 1, 0, 1, 1])
    exported = torch.export.export(frozen, (x,)).module()(x)
    assert torch.allclose(exported["mask"], wanted["mask"], atol=1e-5)
    x[1, 0, 0, 0] = torch.nan
    assert [each.flatten(1).isnan().all(1).tolist() for each in pytree.tree_leaves(frozen(x))] == [
        [False, True, False, False]
    ] * 4


class Many(Heads):
    """More outputs than fit into a fixed list."""

    def forward(self, input: Tensor) -> dict[str, Any]:
        deep = self.mask(self.second(self.first(input)))
        return {str(number): deep * (1 + number) for number in range(200)}


def test_any_number_of_outputs_is_one_plan() -> None:
    x = torch.randn(4, 3, 9, 8)
    frozen = build(trained(Many(), schemes.lsq(4, 4), x), x)
    found, wanted = frozen(x), frozen.program(x).run(x)
    assert len(found) == 200
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not frozen.unplanned


def test_nan(bnn: FrozenModel) -> None:
    x = torch.randn(4, 3, 8, 8)
    x[1, 0, 0, 0], x[2, 2, 7, 7] = torch.nan, -torch.inf
    got, right = bnn(x), bnn(x[[0, 3]])
    assert got.isnan().all(1).tolist() == [False, True, True, False]
    assert torch.equal(got[[0, 3]], right)


def test_copies_and_threads(bnn: FrozenModel) -> None:
    x = torch.randn(3, 3, 16, 16)
    frozen = build(network("lsq44"), x)
    wanted = frozen(x)
    assert torch.equal(copy.deepcopy(frozen)(x), wanted)
    assert torch.equal(pickle.loads(pickle.dumps(frozen))(x), wanted)
    of_other = bnn(x)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda place: (frozen, bnn)[place % 2](x), range(64)))
    assert all(torch.equal(result, (wanted, of_other)[place % 2]) for place, result in enumerate(results))


# Verification of what runs


def wrong(program: Program, kind: type, **fields: Any) -> None:
    """Change the third operation of a kind, or the last."""
    place = [number for number, operation in enumerate(program.operations) if isinstance(operation, kind)][:3][-1]
    program.operations[place] = copy.copy(program.operations[place])
    for name, change in fields.items():
        object.__setattr__(program.operations[place], name, change(getattr(program.operations[place], name)))


def flipped(weight: Tensor) -> Tensor:
    return torch.cat([-weight[:1], weight[1:]])


FAULTS: dict[str, Callable[[Program], None]] = {
    "a filter of codes": lambda p: wrong(p, ops.ConvCodes, weight=flipped),
    "the zero of codes": lambda p: wrong(p, ops.ConvCodes, zero=lambda zero: zero + 1),
    "edges": lambda p: wrong(p, ops.Quantize, edges=lambda edges: edges * 1.01),
    "a scale": lambda p: wrong(p, ops.Affine, scale=lambda scale: scale * 1.01),
    "a bias": lambda p: wrong(p, ops.Affine, bias=lambda bias: bias + 1e-3),
    "a filter of floats": lambda p: wrong(p, ops.ConvFloats, weight=flipped),
    "a shortcut": lambda p: wrong(p, ops.Add, inputs=lambda inputs: (inputs[0], inputs[0])),
}


@pytest.mark.parametrize("fault", mostly_nightly(FAULTS, ("a filter of codes", "edges", "a shortcut")))
def test_faults_of_a_program_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = trained(resnet(downsample="B"), schemes.lsq(4, 4), x := torch.randn(8, 3, 16, 16))

    def faulty(network: nn.Module, sample: Tensor) -> Program:
        program = lowering.lower(network, sample)
        FAULTS[fault](program)
        return program

    monkeypatch.setattr("qconv.inference.build.lower", faulty)
    assert not verify(model, build(model, x), x).equal


def test_faults_of_the_kernels_are_found(bnn: FrozenModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = network("bnn"), torch.randn(4, 3, 16, 16)
    assert verify(model, bnn, x).equal
    original = FrozenModel.forward
    monkeypatch.setattr(FrozenModel, "forward", lambda self, images: original(self, images) + 1e-4)
    assert not verify(model, bnn, x).equal


# Files, and qconv_run


@pytest.fixture
def qconv_run() -> str:
    """The program, which is installed beside Python."""
    if not instruction_sets():
        pytest.skip("qconv was installed without a C compiler")
    found = shutil.which("qconv_run", path=Path(sys.executable).parent)
    assert found is not None
    return found


def printed(command: list[str | Path], images: Tensor) -> Tensor:
    """The outputs that qconv_run prints, a row for each image."""
    done = subprocess.run(command, input=bytes(images.numpy()), capture_output=True, check=True).stdout.decode()
    return torch.tensor([[float(number) for number in line.split()] for line in done.splitlines()])


@pytest.mark.parametrize("name", mostly_nightly(["bireal", "lsq88", "apot44"], ("bireal",)))
def test_qconv_run_prints_what_freeze_gives(name: str, qconv_run: str, tmp_path: Path) -> None:
    model, x = network(name), torch.randn(70, 3, 12, 9)
    qconv.save_program(model, tmp_path / "model.qcp", x[:4])
    assert torch.equal(printed([qconv_run, tmp_path / "model.qcp", "12", "9", "2"], x), build(model, x)(x))
    assert Path(qconv_run).stat().st_size < 200_000


def built(compiler: str, folder: Path) -> list[Path]:
    """qconv_run, built without warnings as docs/program.md says: with the best kernels, and with portable ones."""
    source = Path(qconv.__file__).parent / "kernels" / "csrc"
    (folder / "portable.c").write_text('#include "plan.h"\n#define PLAN_BEST 0\n#include "qconv_run.c"\n')
    command = [compiler, "-O3", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-static", f"-I{source}"]
    files = [*source.glob("plan*.c"), source / "instruction_sets.c"]
    subprocess.run([*command, "-c", *files], cwd=folder, check=True)
    for name, main in [("best", source / "qconv_run.c"), ("portable", folder / "portable.c")]:
        libraries = ["-lm", "-lpthread"]
        subprocess.run([*command, "-o", folder / name, main, *folder.glob("*.o"), *libraries], check=True)
    return [folder / "best", folder / "portable"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("compiler", "runners"),
    [
        ("clang", [[]]),
        # without and with dot products
        ("aarch64-linux-gnu-gcc", [["qemu-aarch64", "-cpu", cpu] for cpu in ("cortex-a53", "max")]),
    ],
)
def test_qconv_run_of_other_compilers_and_processors(compiler: str, runners: list[list[str]], tmp_path: Path) -> None:
    for tool in (compiler, *(runner[0] for runner in runners if runner)):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    cases = [(every(kinds, groups), torch.randn(2, 5, 11, 14)) for kinds in range(3) for groups in (1, 2, 6)]
    for name in ("bireal", "lsq88", "n2uq22", "float"):
        x = torch.randn(2, 3, 12, 9)
        cases.append((freeze(network(name)).program(x), x))
    file, programs = tmp_path / "model.qcp", built(compiler, tmp_path)
    for program, x in cases:
        program_bytes(program, guard=True).numpy().tofile(file)
        wanted, size = program.run(x).flatten(1), map(str, x.shape[2:])
        arguments = [file, *size]
        for runner in runners:
            for qconv_run in programs:
                assert torch.equal(printed([*runner, qconv_run, *arguments], x), wanted)


def test_messages_of_qconv_run(qconv_run: str, tmp_path: Path) -> None:
    file = tmp_path / "model.qcp"
    qconv.save_program(network("bnn"), file, torch.randn(1, 3, 8, 8))
    (tmp_path / "cut.qcp").write_bytes(file.read_bytes()[:-100])
    flat = nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(2 * 36, 3))
    qconv.save_program(trained(flat, None, torch.randn(4, 3, 8, 8)), tmp_path / "flat.qcp", torch.randn(1, 3, 8, 8))
    for arguments, rc, message in [
        ([], 2, "usage: "),
        ([file, "8"], 2, "usage: "),
        ([file, "8", "eight"], 2, "usage: "),
        ([tmp_path / "none.qcp", "8", "8"], 1, "none.qcp: No such file or directory"),
        ([tmp_path / "cut.qcp", "8", "8"], 1, "cut.qcp: "),
        ([tmp_path / "flat.qcp", "8", "9"], 1, "flat.qcp: the program is for images of 8 x 8"),
        ([file, "8", "8"], 1, "the standard input: it ends within an image"),
    ]:
        done = subprocess.run([qconv_run, *arguments], input=bytes(100), capture_output=True, check=False)
        assert (done.returncode, message in done.stderr.decode()) == (rc, True), done.stderr


# What may go wrong between a graph and a program


class Body(nn.Module):
    """A quantized network with a forward of the caller's between its parts."""

    def __init__(self, forward: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.conv = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.fc, self.wide = nn.BatchNorm2d(8), nn.Linear(8, 5), nn.Linear(8 * 4, 5)
        self.gate, self.aux, self.pool = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.MaxPool2d(2)
        self.own = forward

    def body(self, input: Tensor) -> Tensor:
        return self.norm(self.conv(self.stem(input).relu()))

    def forward(self, input: Tensor) -> Tensor:
        return self.own(self, input)


class Branch(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return F.relu(input) if input.shape[-1] > 8 else input * 2


class Scale(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        input *= 2
        return input


BRANCH, SCALE = Branch(), Scale()


def scaled_in_place(net: Any, x: Tensor) -> Tensor:
    hidden = net.body(x)
    twice = SCALE(hidden)
    return net.fc((twice + hidden).mean((2, 3)))


def unused(net: Any, x: Tensor) -> Tensor:
    hidden = net.body(x)
    net.aux(hidden[:, :, ::2, ::2])
    return net.fc(hidden.mean((2, 3)))


def written_view(net: Any, x: Tensor) -> Tensor:
    hidden = net.body(x)
    view = hidden[:, :, ::2, ::2]
    view.relu_()
    return net.fc(hidden.mean((2, 3)) + view.mean((2, 3)))


FORWARDS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "numbers of the size": lambda net, x: net.body(x) * x.shape[2],
    "padding by the size": lambda net, x: net.body(F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))),
    "a branch on the size": lambda net, x: BRANCH(net.body(x)),
    "a gate of one pixel": lambda net, x: (
        (h := net.pool(net.pool(net.body(x)))) * F.hardsigmoid(net.gate(h.mean((2, 3), keepdim=True)))
    ),
    "a sum with one pixel": lambda net, x: (h := net.body(x)) + h.mean((2, 3), keepdim=True),
    "flattened images": lambda net, x: net.wide(net.pool(net.pool(net.body(x))).flatten(1)),
    "arguments by name": lambda net, x: F.linear(
        F.prelu(torch.cat(tensors=[net.body(x)], dim=1), weight=torch.ones(1) / 3).mean((2, 3), dtype=torch.float32),
        net.fc.weight,
        bias=net.fc.bias,
    ),
    "layers by name": lambda net, x: net.fc(input=net.body(x).mean((2, 3))),
    "a part that is not used": unused,
    "squeezed": lambda net, x: net.fc(net.body(x).mean((2, 3), keepdim=True).squeeze()),
    "a write in a module": scaled_in_place,
    "a write to a view": written_view,
}


@pytest.mark.parametrize(
    "name", mostly_nightly(FORWARDS, ("a branch on the size", "a gate of one pixel", "a write to a view"))
)
def test_other_forwards_at_other_sizes(name: str) -> None:
    """As the trained network, whether as a plan or not; and errors where it raises them."""
    model = trained(
        Body(FORWARDS[name]), schemes.lsq(4, 4), torch.randn(4, 3, 8, 8), skip=["stem", "fc", "wide", "gate"]
    )
    frozen = build(model, torch.randn(4, 3, 8, 8))
    for count, size in [(4, 8), (4, 16), (1, 16), (2, 9), (2, 4), (1, 8)]:
        x = torch.randn(count, 3, size, size)
        try:
            wanted = model(x)
        except (RuntimeError, IndexError):
            with pytest.raises((RuntimeError, IndexError, ValueError)):
                frozen(x)
            continue
        found = frozen(x)
        assert found.shape == wanted.shape
        assert (found - wanted).abs().max() <= 1e-4 * (1 + wanted.abs().max()) or verify(model, frozen, x).equal


def test_a_mean_of_many_equal_pixels() -> None:
    x = torch.rand(1, 4, 1, 1).expand(1, 4, 1000, 1000).contiguous()
    program = Program(4)
    program.outputs = (program.add(ops.Mean(inputs=(0,), channels=4)),)
    found = program.run(x)
    assert torch.equal(plan_of(program, (1000, 1000))(x, threads=2)[0], found)
    assert (found - x[..., :1, :1]).abs().max() < 2e-5


def test_images_that_are_too_large_or_small_go_through_the_modules() -> None:
    x = torch.randn(2, 3, 8, 8)
    frozen = build(trained(nn.Sequential(nn.Conv2d(3, 8, 5), nn.Conv2d(8, 8, 1)), None, x), x)
    wanted = frozen(x)
    with pytest.raises(RuntimeError, match="Kernel size can't be greater than actual input size"):
        frozen(torch.randn(1, 3, 4, 4))
    assert not frozen.unplanned  # other sizes still have a plan
    assert torch.equal(frozen(x), wanted)
    parts = nn.Conv2d(3, 8, 3), nn.Tanh(), nn.AvgPool2d(4), nn.Tanh(), nn.Conv2d(8, 8, 1)
    with pytest.raises(ValueError, match="images are too small for a window of 4 x 4 pixels"):
        build(trained(nn.Sequential(*parts), None, x), x)(torch.randn(1, 3, 4, 4))
