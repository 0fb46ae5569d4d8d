import copy
import csv
import io
import json
import math
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from conftest import same
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import qconv
from qconv import schemes
from qconv.ground.table import Column, least_width, lines, repeats
from qconv.models import resnet18, resnet20, small_cnn
from qconv.quantizers import Codes
from qconv.summary import summarize, summary
from qconv.summary.costs_table import Row, Summary, format_int
from qconv.summary.terminal import repeated, screen_text, short
from qconv.training.report.result import about_run


def row_of(layer: nn.Module, input_size: tuple[int, ...]) -> Row:
    row, *others = summarize(nn.Sequential(layer), input_size).rows
    assert not others
    return row


LAYERS = pytest.mark.parametrize(
    ("layer", "input_size", "output_shape", "macs"),
    [
        (nn.Conv1d(4, 6, 3, stride=2), (4, 9), (6, 4), 6 * 4 * 4 * 3),
        (nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 5, 7), (6, 5, 7), 6 * 35 * 2 * 9),
        (nn.Conv3d(2, 3, 2), (2, 3, 3, 3), (3, 2, 2, 2), 3 * 8 * 2 * 8),
        (nn.ConvTranspose1d(4, 6, 3), (4, 5), (6, 7), 4 * 5 * 6 * 3),
        (nn.ConvTranspose2d(4, 6, 2, stride=2, groups=2), (4, 3, 3), (6, 6, 6), 4 * 9 * 3 * 4),
        (nn.Conv2d(6, 6, 3, padding=1, groups=6), (6, 5, 5), (6, 5, 5), 6 * 25 * 9),  # depthwise
        (nn.Conv2d(4, 8, 1, groups=4, dilation=3, bias=False), (4, 1, 7), (8, 1, 7), 8 * 7 * 1),
        (nn.ConvTranspose2d(4, 4, 3, groups=4, padding=1), (4, 3, 3), (4, 3, 3), 4 * 9 * 9),
        (nn.ConvTranspose3d(1, 2, 2), (1, 2, 2, 2), (2, 3, 3, 3), 8 * 2 * 8),
        (nn.Conv2d(4, 6, (3, 2), padding=1), (4, 5, 5), (6, 5, 6), 6 * 5 * 6 * 4 * 6),
        (nn.Linear(5, 3), (5,), (3,), 15),
        (nn.Linear(5, 3), (7, 5), (7, 3), 7 * 15),
        (nn.Linear(5, 3, bias=False), (1, 5), (1, 3), 15),
    ],
    ids=str,
)


@LAYERS
def test_multiply_accumulates(
    layer: nn.Module, input_size: tuple[int, ...], output_shape: tuple[int, ...], macs: int
) -> None:
    row = row_of(layer, input_size)
    parameters = sum(parameter.numel() for parameter in layer.parameters())
    assert (row.output_shape, row.macs, row.parameters) == (output_shape, macs, parameters)
    assert (row.scheme, row.weight_bits, row.input_bits) == ("float", 32, 32)
    assert row.float_bytes == row.packed_bytes == 4 * parameters
    assert row.parameters_by_bits == {32: parameters}
    assert row.macs_by_bits == {(32, 32): macs}
    assert row.bops == 1024 * macs
    assert row.saved_bytes == 4 * math.prod(input_size)  # the gradient of the weight reads the input, and nothing else


@LAYERS
@pytest.mark.parametrize("scheme", [schemes.bnn(), schemes.shift_q(weight_bits=3, fixed_point=(2, 2))], ids=str)
def test_quantized_layers(
    layer: nn.Module, input_size: tuple[int, ...], output_shape: tuple[int, ...], macs: int, scheme: qconv.Scheme
) -> None:
    model: Any = qconv.convert(nn.Sequential(copy.deepcopy(layer)), scheme, skip=())
    (row,) = summarize(model, input_size).rows
    weight_bits, input_bits = (1, 1) if scheme.name == "bnn()" else (3, 4)
    weights, biases = model[0].weight.numel(), row.parameters - model[0].weight.numel()
    assert row.output_shape == output_shape
    assert row.macs_by_bits == {(weight_bits, input_bits): macs}
    assert row.bops == macs * weight_bits * input_bits
    assert row.parameters_by_bits == {weight_bits: weights} | ({32: biases} if biases else {})
    assert row.packed_bytes == math.ceil(weight_bits * weights / 8) + scales_and_levels(model[0]) + 4 * biases
    # At least a bit of each input value is kept, at most the value and a copy of the weight in another layout.
    values = math.prod(input_size)
    assert math.ceil(values / 8) <= row.saved_bytes <= 4 * values + 4 * weights


class Deformed(nn.Module):
    """A deformable layer with the convolution that predicts its offsets and mask."""

    def __init__(self, masked: bool) -> None:
        super().__init__()
        ops = pytest.importorskip("torchvision.ops")
        self.masked = masked
        self.offset = nn.Conv2d(4, 2 * 18, 3, padding=1)
        self.mask = nn.Conv2d(4, 2 * 9, 3, padding=1, bias=False)
        self.conv: nn.Module = type("Subclass", (ops.DeformConv2d,), {})(4, 6, 3, padding=1, groups=2)

    def forward(self, input: Tensor) -> Tensor:
        return self.conv(input, self.offset(input), mask=self.mask(input).sigmoid() if self.masked else None)


@pytest.mark.parametrize("masked", [False, True])
def test_deformable_layers_count_as_their_convolution(masked: bool) -> None:
    rows = {row.name: row for row in summarize(Deformed(masked), (4, 5, 7)).rows}
    assert (rows["conv"].type, rows["conv"].output_shape) == ("Subclass", (6, 5, 7))
    assert (rows["conv"].macs, rows["conv"].parameters) == (6 * 35 * 2 * 9, 6 * 2 * 9 + 6)
    assert rows["offset"].macs == 36 * 35 * 4 * 9
    assert rows["mask"].macs == masked * 18 * 35 * 4 * 9
    # The input counts with the offsets' convolution, the sigmoid's output with the model, where both were saved first.
    assert rows["offset"].saved_bytes == 4 * 4 * 35
    assert rows["(model)"].saved_bytes == 4 * 18 * 35 if masked else "(model)" not in rows
    assert rows["conv"].saved_bytes >= 4 * 36 * 35  # the offsets


def test_quantized_deformable_layers() -> None:
    pytest.importorskip("torchvision")
    from qconv.layers.deform import QDeformConv2d

    model = Deformed(True)
    model.conv = QDeformConv2d(4, 6, 3, padding=1, groups=2, scheme=schemes.bnn())
    row = {row.name: row for row in summarize(model, (4, 5, 7)).rows}["conv"]
    # What is sampled lies between the signs, so that it is multiplied as a float.
    assert row.macs_by_bits == {(1, 32): 6 * 35 * 2 * 9}
    assert row.parameters_by_bits == {1: 6 * 2 * 9, 32: 6}
    assert row.packed_bytes == 14 + 4 + 4 * 6  # ceil(108 / 8), a scale, the biases


def scales_and_levels(layer: qconv.QuantizedLayer) -> int:
    """Bytes of the scales, and of the codes where these are powers of two and so not evenly spaced."""
    values, scale = layer.weight_codes()[:2]
    codes = values.unique()
    span = int(codes[-1] - codes[0]) // math.gcd(*codes.diff().tolist()) + 1
    levels = len(codes) * (1 if codes.abs().max() < 128 else 2) if span > 2**layer.weight_quantizer.bits else 0
    return scale.nbytes + levels


class Segments(nn.Sequential):
    def forward(self, input: Tensor) -> dict[str, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return {"out": super().forward(input), "mean": input.mean((1, 2, 3))}


FILES: dict[str, tuple[Any, tuple[int, ...], bool]] = {
    # the network, the size of an input, and whether save_packed needs an example of it
    "small_cnn": (lambda: small_cnn(1, 10), (1, 8, 8), False),
    "resnet20": (lambda: resnet20(num_classes=100, shortcut="per_conv"), (3, 32, 32), False),
    "fixed": (lambda: nn.Sequential(*map(conv, (3, 4, 4), (4, 4, 2)), nn.Flatten(), nn.Linear(2, 2)), (3, 7, 7), True),
    "outputs": (lambda: Segments(*map(conv, (3, 4, 4), (4, 4, 2))), (3, 64, 64), False),
    "linear": (lambda: nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 1)), (7,), False),
}


def conv(inputs: int, outputs: int) -> nn.Module:
    return nn.Conv2d(inputs, outputs, 3)


KINDS = [
    schemes.bnn(),
    schemes.adabin(),
    schemes.twn(),
    schemes.lsq(4, 4),
    schemes.shift_q(),
    schemes.shift_ps(5),
    None,
]


@pytest.mark.parametrize(
    ("scheme", "network"),
    [
        *((scheme, name) for scheme in KINDS for name in ("fixed", "outputs", "linear")),
        *((schemes.bnn(), "small_cnn"), (schemes.lsq(4, 4), "resnet20"), (None, "resnet20")),
    ],
    ids=str,
)
def test_packed_bytes_are_those_of_the_file(scheme: qconv.Scheme | None, network: str, tmp_path: Path) -> None:
    make, size, by_example = FILES[network]
    model = make() if scheme is None else qconv.convert(make(), scheme)
    images = torch.randn(4, *size)
    model(images)  # sets ranges
    qconv.save_packed(model.eval(), tmp_path / "model", example=images if by_example else None)
    table, of_float = summarize(model, size), make()
    assert table.packed_bytes - (tmp_path / "model").stat().st_size in (0, 8)  # its test of outputs has fewer digits
    assert table.float_bytes == sum(tensor.nbytes for tensor in of_float.state_dict().values())
    assert table.parameters == sum(parameter.numel() for parameter in of_float.parameters())


def test_buffers_that_no_checkpoint_has_take_no_bytes() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    for module in model:
        module.register_buffer("grid", torch.zeros(100), persistent=False)
    table = summarize(model, (4,))
    assert table.float_bytes == 4 * sum(tensor.numel() for tensor in model.state_dict().values())
    assert table.compression < 1


# ResNet-18 with the 3×3 stem, by hand. Weights: the stem 3·64·9; stage 1 four times 64·64·9; each other stage of width
# c one c/2·c·9, three c·c·9, and the shortcut c/2·c; the classifier 512·10 and 10 biases.
STEM, STAGES, CLASSIFIER = 1_728, (147_456, 524_288, 2_097_152, 8_388_608), 5_120
# Batch norm: five layers a stage (four convolutions and the stem's or the shortcut's), 5 · (64 + 128 + 256 + 512).
NORMALIZED = 4_800
# Every weight of a stage meets every pixel of its output once: 32², 16², 8², 4².
STAGE_MACS = 147_456 * 1024 + 524_288 * 256 + 2_097_152 * 64 + 8_388_608 * 16
FIRST_AND_LAST_MACS = 1_728 * 1024 + 5_120


def test_resnet18_by_hand() -> None:
    table = summarize(resnet18(), (3, 32, 32))
    assert table.parameters == STEM + sum(STAGES) + 2 * NORMALIZED + CLASSIFIER + 10 == 11_173_962
    assert table.parameters_by_bits == {32: 11_173_962}
    assert table.macs == STAGE_MACS + FIRST_AND_LAST_MACS == 555_422_720
    assert table.macs_by_bits == {(32, 32): 555_422_720}
    assert table.bops == 555_422_720 * 32 * 32 == 568_752_865_280
    # Batch norm also stores mean and variance, and in each of its 20 layers an int64 that counts batches.
    assert table.float_bytes == 4 * 11_173_962 + 4 * 2 * NORMALIZED + 20 * 8 == 44_734_408
    assert table.packed_bytes == 44_734_408 - 20 * 8 + table.header_bytes
    assert table.compression == pytest.approx(1, abs=1e-3)
    # Autograd keeps the image, what enters each batch norm, what leaves each ReLU, and what enters the classifier.
    # A stage's map has 64·32², 128·16², 256·8², 512·4² values; five batch norms in each; five ReLUs in the first
    # (the stem's is of this size), four in the others. Batch norm keeps mean and deviation, too.
    maps = 65_536 + 32_768 + 16_384 + 8_192
    assert table.saved_bytes == 4 * (3_072 + 5 * maps + 4 * maps + 65_536 + 512 + 2 * NORMALIZED) == 4_738_560
    # If lean, there is a bit for each of ReLU's values; only the stem's convolution is computed again.
    assert 4 * (3_072 + 5 * maps - 65_536) < table.lean_bytes < table.saved_bytes


def test_binary_resnet18_by_hand() -> None:
    table = summarize(qconv.convert(resnet18(), schemes.bnn()), (3, 32, 32))
    binary = sum(STAGES)
    assert binary == 11_157_504
    assert table.parameters_by_bits == {1: 11_157_504, 32: 16_458}
    assert STEM + 2 * NORMALIZED + CLASSIFIER + 10 == 16_458
    assert table.macs_by_bits == {(1, 1): STAGE_MACS, (32, 32): FIRST_AND_LAST_MACS}
    assert (STAGE_MACS, FIRST_AND_LAST_MACS) == (553_648_128, 1_774_592)
    assert table.bops == 553_648_128 + 1024 * 1_774_592 == 2_370_830_336
    assert table.float_bytes == 44_734_408
    # 19 layers with one scale each; 32 bits become 1; the counters of batch norm are not stored.
    stored = 44_734_408 - 4 * 11_157_504 + 11_157_504 // 8 + 4 * 19 - 20 * 8
    assert table.packed_bytes == stored + table.header_bytes < 1.013 * stored
    assert table.compression == pytest.approx(44_734_408 / table.packed_bytes)
    assert table.compression > 29.4
    assert 0 < table.saved_bytes <= 4_738_560
    # A bit for each value that a ReLU leaves, of what enters a layer twice, and the floats that stay: the image, what
    # enters the classifier, statistics, and 32 values of each of 20 inputs that are computed again, to compare.
    assert table.lean_bytes < 4 * (3_072 + 512 + 2 * NORMALIZED + 20 * 32) + 200_000 < 0.07 * table.saved_bytes


def test_shared_weights_count_once_and_shared_calls_twice() -> None:
    conv = nn.Conv2d(2, 2, 1, bias=False)
    (row,) = summarize(nn.Sequential(conv, conv), (2, 3, 3)).rows
    assert (row.parameters, row.macs) == (4, 2 * 4 * 9)
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    table = summarize(nn.Sequential(first, second), (4,))
    assert (table.parameters, table.macs) == (16, 32)


def test_the_table_shows_every_row_and_the_totals() -> None:
    model = qconv.convert(small_cnn(1, 10, width=32), schemes.bnn())
    *lines, blank, parameters, macs, compression, kept = str(summarize(model, (1, 8, 8))).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert any("blocks.1.conv" in line and "bnn()" in line and "1/1" in line and "589,824" in line for line in lines)
    assert lines[-1].startswith("total")
    assert "2,378,368" in lines[-1]
    assert blank == ""
    # 32·32·9 + 32·64·9 + 64·64·9 signs; 32·9 of the first, 64·10 + 10 of the last layer, 2·(32+32+64+64) of batch norm
    assert parameters == "parameters by bits         1: 64,512; 32: 1,322"
    assert macs == "MACs by weight×input bits  1×1: 2,359,296; 32×32: 19,072"
    assert compression.startswith("compression                ")
    assert kept == "saved for the backward     96,256 bytes; if lean 6,016"


class Halves(qconv.Quantizer):
    """Says how many bits it has, and defines no codes."""

    bits = 3

    def quantize(self, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        return x.mul(2).round().clamp(-4, 3).div(2)


def test_a_quantizer_without_codes_is_stored_as_float() -> None:
    layer = qconv.QConv2d(4, 8, 3, bias=False, scheme=qconv.Scheme("halves", weight=Halves))
    assert row_of(layer, (4, 5, 5)).packed_bytes == 4 * 8 * 4 * 9


class Steps(qconv.Quantizer):
    """Has a learned step for each filter, or what else ``shape`` says, and a schedule that inference does not need."""

    bits = 2

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.full(shape, 0.5))
        self.register_buffer("progress", torch.zeros(3))

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.step,)

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return (x / tensors[0]).round().clamp(-2, 1) * tensors[0]

    def codes(self, x: Tensor, *tensors: Tensor) -> Codes:
        return Codes((x / tensors[0]).round().clamp(-2, 1).long(), tensors[0])


def test_learned_tensors_of_quantizers() -> None:
    def make(shape: tuple[int, ...]):
        return lambda: Steps(*shape)

    scheme = qconv.Scheme("steps", input=make((1, 5, 1, 1)), weight=make((7, 1, 1, 1)))
    row = row_of(qconv.QConv2d(5, 7, 3, bias=False, scheme=scheme), (5, 4, 4))
    assert (row.parameters, row.float_bytes) == (315, 4 * 315)
    assert row.parameters_by_bits == {2: 315}
    assert row.packed_bytes == math.ceil(2 * 315 / 8) + 4 * 7 + 4 * (
        5 + 3
    )  # codes, a scale a filter, a step an input channel and a buffer


def test_a_quantizer_of_its_own_is_a_row() -> None:
    table = summarize(nn.Sequential(Steps(1), nn.Linear(4, 4, bias=False)).requires_grad_(False), (4,))
    assert [(row.name, row.float_bytes, row.scheme) for row in table.rows] == [("0", 16, "float"), ("1", 64, "float")]


def test_a_fraction_of_a_bit() -> None:
    class Ternary(Halves):
        bits = math.log2(3)

    row = row_of(qconv.QLinear(10, 10, bias=False, scheme=qconv.Scheme("t", input=Ternary, weight=Ternary)), (10,))
    assert row.bops == 251  # 100 · log2(3)²
    assert row_of(qconv.QLinear(10, 10, bias=False, scheme=schemes.twn()), (10,)).packed_bytes == 20 + 40
    table = summarize(qconv.QLinear(10, 10, scheme=qconv.Scheme("t", input=Ternary, weight=Ternary)), (10,))
    assert table.totals()["macs_by_bits"] == {"1.58496x1.58496": 100}
    assert table.totals()["parameters_by_bits"] == {"1.58496": 100, "32": 10}


def saved(model: nn.Module, input_size: tuple[int, ...]) -> dict[str, int]:
    return {row.name: row.saved_bytes for row in summarize(model, input_size).rows if row.saved_bytes}


def tiny(**bn: bool) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3, **bn), nn.ReLU())


TINY = {"0": 128, "1": 216, "2": 192}
"""The convolution keeps its input, 2·4·4 floats; batch norm what enters, ReLU what leaves it, 3·4·4.
Batch norm also keeps a mean and a deviation for each of 3 channels."""


@pytest.mark.parametrize(
    ("model", "size", "expected"),
    [
        (tiny(), (2, 4, 4), TINY),
        (tiny().eval(), (2, 4, 4), TINY),  # the table is of training
        # What ReLU has kept the next layer reads, too.
        (nn.Sequential(tiny(), nn.Conv2d(3, 1, 1)), (2, 4, 4), {f"0.{name}": size for name, size in TINY.items()}),
        (tiny().double(), (2, 4, 4), {name: 2 * size for name, size in TINY.items()}),
        # In place ReLU writes where batch norm's output was. Pooling: the indices of 3·2·2 values are int64.
        (
            nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU(inplace=True), nn.MaxPool2d(2)),
            (2, 4, 4),
            {"0": 128, "1": 192, "2": 96},
        ),
        # Layer norm keeps its input, and a mean and a deviation for each of 5 rows; the linear layer what leaves it.
        (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 1)), (5, 4), {"0": 80, "1": 120, "2": 80}),
        # Dropout keeps what it multiplies with.
        (nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5)), (4,), {"0": 16, "1": 24}),
        # A batch norm that refuses a single sample: statistics are those of two.
        (nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), (4,), {"0": 16, "1": 24 + 2 * 24 // 2}),
        (tiny().requires_grad_(False), (2, 4, 4), {}),
    ],
)
def test_saved_bytes_by_hand(model: nn.Module, size: tuple[int, ...], expected: dict[str, int]) -> None:
    assert saved(model, size) == expected
    for context in (torch.no_grad, torch.inference_mode):  # the caller's decides nothing
        with context():
            assert saved(model, size) == expected


def test_saved_bytes_of_parts_in_another_state() -> None:
    model = tiny().requires_grad_(False)
    model[1].requires_grad_(True)
    assert saved(model, (2, 4, 4)) == {"1": 216, "2": 192}
    model = tiny()
    model[1].eval()
    assert saved(model, (2, 4, 4)) == {**TINY, "1": 192}


def test_saved_bytes_under_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        # Two bytes a value, and the weight's copy in this dtype.
        assert saved(nn.Conv2d(2, 3, 3, padding=1), (2, 4, 4)) == {"(model)": 2 * 32 + 2 * 54}


class Branches(nn.Module):
    """Throws away what the first call computes: its memory is free for the second."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1000, 1000)

    def forward(self, input: Tensor) -> Tensor:
        for _ in range(3):
            self.linear(input).relu()
        return self.linear(input).sigmoid()


def test_freed_memory_is_no_shared_memory() -> None:
    assert saved(Branches(), (1000,)) == {"(model)": 4 * 4000, "linear": 4000}


class Checkpointed(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, input: Tensor) -> Tensor:
        return checkpoint(self.body, input * 1, use_reentrant=False)  # pyright: ignore[reportReturnType]


def test_checkpointed_parts_keep_their_input() -> None:
    for model in (Checkpointed(tiny()), qconv.lean(Checkpointed(tiny()))):
        assert sum(saved(model, (2, 4, 4)).values()) == 128


NETWORKS = [
    (lambda: resnet20(activation=nn.Hardtanh), schemes.bnn(), 32, True),
    (lambda: resnet20(activation=nn.Identity, shortcut="per_conv"), schemes.bireal(), 32, False),
    (lambda: resnet20(), schemes.lsq(), 32, True),
    (lambda: qconv.models.reactnet_a(3, 10), schemes.reactnet(), 64, False),
]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("make", "scheme", "side", "starts_from_inputs"), NETWORKS, ids=lambda value: getattr(value, "name", "")
)
def test_bytes_if_lean_are_those_of_the_lean_model(make, scheme, side: int, starts_from_inputs: bool) -> None:
    model = qconv.convert(make(), scheme)
    qconv.calibrate(model, [torch.rand(2, 3, side, side)])  # what is fresh keeps copies of learned tensors
    table = summarize(model, (3, side, side))
    one, other = (summarize(qconv.lean(model, exact=exact), (3, side, side)) for exact in (False, True))
    expected = [(row.name, row.lean_bytes, row.keeps_float) for row in table.rows if row.lean_bytes]
    assert [(row.name, row.saved_bytes, row.keeps_float) for row in one.rows if row.saved_bytes] == expected
    assert one.lean_bytes == one.saved_bytes == table.lean_bytes < table.saved_bytes / 2
    assert other.lean_bytes == other.saved_bytes == pytest.approx(table.lean_bytes, rel=0.02)
    # Hooks count the same, but where a layer starts from a tensor that another one keeps.
    by_hooks: dict[int, int] = {}
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    alive = []

    def save(tensor: Tensor) -> Tensor:
        alive.append(tensor)
        by_hooks[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        qconv.lean(model).train()(torch.rand(1, 3, side, side))
    count = sum(size for address, size in by_hooks.items() if address not in own)
    assert one.lean_bytes <= count
    assert (one.lean_bytes == count) == starts_from_inputs


@pytest.mark.parametrize("lean", [False, True])
def test_the_model_stays_as_it_is(lean: bool) -> None:
    network = qconv.convert(small_cnn(1, 10, width=8), schemes.lsq())
    model = qconv.lean(nn.Sequential(network, nn.Dropout(0.5)), lean)  # which would take random numbers
    network.blocks[0].eval()
    calls = []
    network.blocks[1].register_forward_hook(lambda module, args, output: calls.append(module))

    def about() -> list[Any]:
        hooks = [list(module._forward_hooks.items()) for module in model.modules()]
        return [hooks, *((type(each), each.__dict__.get("lean"), each.training) for each in model.modules())]

    before, found, random = copy.deepcopy(model.state_dict()), about(), torch.get_rng_state()
    summarize(model, (1, 8, 8))
    assert torch.equal(torch.get_rng_state(), random)
    assert about() == found
    layers = [module for module in model.modules() if isinstance(module, qconv.QuantizedLayer)]
    assert not any(layer.input_quantizer.calibrated for layer in layers)
    assert network.blocks[1] not in calls  # those of the copy
    assert same(model.state_dict(), before)


class Norm(nn.BatchNorm2d):
    """May compute anything."""


class Reasons(nn.Module):
    """Layers that keep a float in a lean model, each for a reason of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.plain = nn.Conv2d(16, 8, 1)
        self.own = Norm(8)
        self.gelu = nn.GELU()
        self.slope = nn.LeakyReLU(inplace=True)

    def forward(self, input: Tensor) -> Tensor:
        x = self.norm(torch.cat([self.conv(input), input], 1))
        return self.slope(self.gelu(self.own(self.plain(x))) * 2)


def test_reasons_for_floats() -> None:
    model = qconv.convert(Reasons(), schemes.bnn(), skip=("plain",))
    reasons = {row.name: row.keeps_float for row in summarize(model, (8, 4, 4)).rows}
    expected = {"norm": "input from cat", "own": "a subclass", "gelu": "no lean form", "slope": "in place"}
    assert {name: why for name, why in reasons.items() if why} == expected
    model = qconv.convert(nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)), schemes.bwn(), skip=())
    table = summarize(model, (8, 4, 4))
    assert [row.keeps_float for row in table.rows] == ["no bits of its input", "input from quantized_op"]
    head, _, first, *_ = str(table).splitlines()
    assert head.endswith("if lean  a float, for")
    assert first.endswith("no bits of its input")
    model[1].eval()
    assert summarize(model, (8, 4, 4)).rows[1].keeps_float == "in evaluation"


class Positions(nn.Module):
    """Adds a table that depends on no input: the layer in it sees no batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(7, 4))
        self.project = nn.Linear(4, 6, bias=False)

    def forward(self, input: Tensor) -> Tensor:
        return input + self.project(self.table)


def test_a_layer_whose_input_has_no_batch() -> None:
    rows = {row.name: row for row in summarize(Positions(), (7, 6)).rows}
    assert (rows["project"].output_shape, rows["project"].macs) == ((7, 6), 7 * 6 * 4)
    assert (rows["(model)"].output_shape, rows["(model)"].parameters) == ((7, 6), 28)


def test_calls_by_keyword_and_failures_inside() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose1d(2, 3, 2, bias=False)
            self.unused = nn.Linear(2, 2, bias=False)

        def forward(self, input: Tensor) -> tuple[Tensor, str]:
            try:
                self.unused(input)
            except RuntimeError:
                return self.up(input=input).sigmoid(), "a tuple"
            raise AssertionError

    rows = {row.name: row for row in summarize(Odd(), (2, 5)).rows}
    assert (rows["up"].output_shape, rows["up"].macs) == ((3, 6), 2 * 5 * 3 * 2)
    assert rows["(model)"].saved_bytes == 4 * 3 * 6  # the sigmoid's, not any more the layer's that has failed
    assert (rows["unused"].output_shape, rows["unused"].macs, rows["unused"].parameters) == ((), 0, 4)


def test_shared_storages_and_weights_of_two_schemes() -> None:
    conv = nn.Conv2d(2, 2, 1, bias=False)
    assert saved(nn.Sequential(conv, conv), (2, 3, 3)) == {"0": 2 * 72}  # two calls, two inputs
    first, second = (qconv.QLinear(8, 8, bias=False, scheme=scheme) for scheme in (schemes.bnn(), schemes.identity()))
    second.weight = first.weight
    one, two = summarize(nn.Sequential(first, second), (8,)).rows
    assert (one.parameters_by_bits, one.packed_bytes, one.macs_by_bits) == ({1: 64}, 8 + 4, {(1, 1): 64})
    assert (two.parameters_by_bits, two.packed_bytes, two.macs_by_bits) == ({}, 4 * 64, {(32, 32): 64})


def mixed() -> Summary:
    overrides = {r"blocks\.1\.conv": schemes.shift_q(weight_bits=4)}
    return summarize(qconv.convert(small_cnn(1, 10, width=8), schemes.bnn(), overrides=overrides), (1, 8, 8))


def test_json_holds_everything(tmp_path: Path) -> None:
    table = mixed()
    path = tmp_path / "summary.json"
    text = table.to_json(path)
    assert path.read_text() == text == table.to_json()
    read = json.loads(text)
    names = {each.name for each in fields(Row)}
    rows = [{key: value for key, value in row.items() if key in names} for row in read["rows"]]
    assert tuple(Row(**{**row, "output_shape": tuple(row["output_shape"])}) for row in rows) == table.rows
    assert read["totals"] == table.totals()
    # 8·16 channels on 8² pixels and 16·16 on 4²; 8·8 on 8²; 1·8 on 8² and the last layer
    assert read["totals"]["macs_by_bits"] == {"1x1": 73_728 + 36_864, "4x32": 36_864, "32x32": 4_608 + 160}
    assert all(row["bops"] == row["macs"] * row["weight_bits"] * row["input_bits"] for row in read["rows"])
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_csv_holds_the_rows(tmp_path: Path) -> None:
    table = mixed()
    path = tmp_path / "summary.csv"
    path.write_text("an older one")
    text = table.to_csv(str(path))
    assert path.read_bytes().decode() == text == table.to_csv()
    lines = list(csv.DictReader(io.StringIO(text)))
    assert len(lines) == len(table.rows)
    for line, row in zip(lines, table.rows, strict=True):
        assert line["output_shape"] == "x".join(map(str, row.output_shape))
        for key, value in asdict(row).items():
            if key not in ("output_shape", "weights"):
                assert type(value)(line[key]) == value
        assert int(line["bops"]) == row.bops
    assert list(lines[0]) == [
        *("name", "type", "output_shape", "scheme", "weight_bits", "input_bits"),
        *("parameters", "parameters_1bit", "parameters_4bit", "parameters_32bit"),
        *("macs", "macs_1x1bit", "macs_4x32bit", "macs_32x32bit", "bops"),
        *("float_bytes", "packed_bytes", "saved_bytes", "lean_bytes", "keeps_float"),
    ]
    assert sum(int(line["parameters_4bit"]) for line in lines) == 8 * 8 * 9
    assert sum(int(line["macs_4x32bit"]) for line in lines) == 36_864
    assert [path.name for path in tmp_path.iterdir()] == ["summary.csv"]
    assert Summary(()).to_csv().strip() == ""


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    table = mixed()
    for write in (table.to_csv, table.to_json):
        with pytest.raises(
            FileNotFoundError, match=r"path \(='.*absent/table'\) must be in a folder that exists, .*absent"
        ):
            write(tmp_path / "absent" / "table")
        (tmp_path / "folder").mkdir(exist_ok=True)
        with pytest.raises(OSError, match="folder"):
            write(tmp_path / "folder")
        assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_it_prints_and_the_data_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny()
    data = summarize(model, (2, 4, 4))
    assert capsys.readouterr().out == ""
    table = summary(model, (2, 4, 4))
    assert capsys.readouterr().out == f"{table}\n"
    assert table == data
    assert repr(table) == "Summary(3 rows, 63 parameters, 864 MACs)"


def test_the_table_fits_the_screen_and_shows_every_layer() -> None:
    table = summarize(qconv.convert(resnet18(), schemes.lsq(4, 4)), (3, 32, 32))
    counted = [row for row in table.rows if row.macs]
    groups = list(repeated(counted))
    assert sum(times for *_, times in groups) == len(counted)
    for figure in ("parameters", "macs", "packed_bytes"):
        assert sum(getattr(row, figure) for row, *_ in groups) == sum(getattr(row, figure) for row in counted)
    for columns in (80, 100, 120):
        text = screen_text(table, columns, "a title").splitlines()
        assert max(map(len, text)) <= columns
        assert all(line == line.rstrip() for line in text)
        words = [word for line in text for word in line.split()]
        for row, last, times in groups:  # no name was broken
            assert {row.name, last} <= set(words)
            assert times == 1 or f"×{times}" in words
        (total,) = [line for line in text if line.startswith("all")]
        assert (format_int(table.macs) in total) == (columns == 120)
        assert short(table.macs) in total or columns == 120
        assert any(f"(44,734,408 bytes to {format_int(table.packed_bytes)})" in line for line in text)


@pytest.mark.parametrize(
    ("kinds", "places"),
    [
        ("", []),
        ("abc", [[0], [1], [2]]),
        ("aaab", [[0, 1, 2], [3]]),
        ("xababaab", [[0], [1, 3], [2, 4], [5, 6], [7]]),
        ("abcabc", [[0, 3], [1, 4], [2, 5]]),
    ],
)
def test_what_repeats(kinds: str, places: list[list[int]]) -> None:
    assert [list(group) for group in repeats(kinds)] == places


def test_words_are_broken_only_where_there_is_no_other_way() -> None:
    rows = [("blocks.0.conv …\N{NO-BREAK SPACE}blocks.3.conv ×4", "QConv2d lsq(weight_bits=4)", "1,234")]
    columns = Column("layer"), Column("becomes"), Column("a number", is_right=True)
    assert lines(rows, columns)[1].endswith("1,234")
    assert len(lines(rows, columns, 66)) == 3
    for width, whole in ((50, True), (31, False)):
        text = lines(rows, columns, width)
        assert max(map(len, text)) <= width
        assert ("lsq(weight_bits=4)" in " ".join(text)) == whole
        assert any("1,234" in line for line in text)
    assert least_width(rows, columns) <= 50


def test_short_numbers() -> None:
    given = (0, 7, 999, 999.6, 1_234, 999_499, 1_234_567, 568_752_865_280, 3e15, 2e19)
    shown = ["0", "7", "999", "1 k", "1.23 k", "999 k", "1.23 M", "569 G", "3 P", "20 E"]
    assert [short(value) for value in given] == shown


def test_the_result_has_the_totals() -> None:
    table = mixed()
    config = {"data": 1, "model": 2, "seed": 3, "run_dir": "4", "resume": None}
    about = about_run(config, "bnn()", table)
    assert about.items() >= table.totals().items()
    assert json.loads(json.dumps(about["parameters_by_bits"])) == about["parameters_by_bits"]


def linear_macs(model: nn.Module, images: torch.Tensor) -> int:
    """Counted by torch, of products of matrices and convolutions; those of attention are of batches of matrices."""
    counter = FlopCounterMode(display=False)
    with counter, sdpa_kernel(SDPBackend.MATH):  # with gradients, as attention has an operator of its own without
        model.eval()(images)
    of_all = counter.get_flop_counts()["Global"]
    return sum(flops for op, flops in of_all.items() if op.__name__ in ("mm", "addmm", "convolution")) // 2


@pytest.mark.parametrize("name", ["vit", "swin", "encoder"])
def test_linear_layers_that_attention_reads_count(name: str) -> None:
    vision = torchvision.models.vision_transformer.VisionTransformer
    swin = torchvision.models.SwinTransformer
    encoder = nn.TransformerEncoderLayer(12, 3, 20, batch_first=True)
    make: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
        "vit": (vision(32, 8, 2, 2, 24, 48, num_classes=5), (3, 32, 32)),
        "swin": (swin([2, 2], 8, [1, 1], [1, 2], [3, 3], num_classes=5), (3, 32, 28)),
        "encoder": (nn.Sequential(nn.Linear(6, 12), encoder), (7, 6)),
    }
    model, size = make[name]
    assert summarize(model, size).macs == linear_macs(model, torch.rand(1, *size)) > 0
    expected = sum(row.macs for row in summarize(model, size).rows)
    quantized = summarize(qconv.convert(model, schemes.lsq(4, 4), skip=()), size)
    assert sum(quantized.macs_by_bits.values()) == expected
    assert quantized.macs_by_bits[32, 32] > 0


def test_a_fast_path_of_a_float_model_hides_no_layer() -> None:
    sizes: dict[str, Any] = {"img_size": 32, "num_classes": 2, "embed_dim": 48, "depth": 1, "num_heads": 2}
    model: Any = timm.create_model("beit_base_patch16_224", **sizes)
    macs = {row.name: row.macs for row in summarize(model, (3, 32, 32)).rows}
    assert macs["blocks.0.attn.qkv"] == 5 * 48 * 3 * 48
    assert not model.blocks[0].attn.qkv_bias_separate
    assert summarize(qconv.convert(model, schemes.lsq(4, 4)), (3, 32, 32)).macs == sum(macs.values())


def test_an_attention_with_a_forward_of_its_own() -> None:
    class Own(nn.MultiheadAttention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().forward(x, x, x)[0]

    assert summarize(nn.Sequential(nn.Linear(6, 6), Own(6, 2)), (4, 6)).macs == 4 * 36


def test_attention_with_keys_and_values_of_other_sizes() -> None:
    attention = nn.MultiheadAttention(12, 3, kdim=5, vdim=7, batch_first=True)

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = attention

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, value=x[:, :4, :7], key=x[:, :4, :5])[0]

    assert summarize(Own(), (6, 12)).macs == 12 * (6 * 12 + 4 * 5 + 4 * 7 + 6 * 12)


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("how", ["pruned", "normalized", "weight norm"])
def test_a_computed_weight_counts_as_the_weight_that_it_will_be(how: str) -> None:
    def computed(layer: nn.Module) -> nn.Module:
        if how == "pruned":
            return prune.l1_unstructured(layer, "weight", 0.5)
        if how == "normalized":
            return nn.utils.parametrizations.weight_norm(layer)
        return nn.utils.weight_norm(layer)

    def model() -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(32, 2))

    scheme = schemes.minmax(4, 8) if how != "pruned" else schemes.twn()
    plain = qconv.convert(model(), scheme)
    expected = summarize(plain, (3, 6, 6))
    computed(plain[2])
    found = summarize(plain, (3, 6, 6))
    row, before = (next(row for row in table.rows if row.name == "2") for table in (found, expected))
    fields = ("parameters", "weights", "macs", "float_bytes", "packed_bytes", "weight_bits")
    assert [getattr(row, field) for field in fields] == [getattr(before, field) for field in fields]
    assert found.parameters_by_bits == expected.parameters_by_bits
    assert found.float_bytes == expected.float_bytes
    assert found.packed_bytes == pytest.approx(expected.packed_bytes, abs=100)  # the header names less of the input


def test_a_compiled_model_is_counted_as_it_is_written() -> None:
    model = small_cnn(1, 10, width=4)
    qconv.convert(model, schemes.bnn())
    compiled: Any = torch.compile(model, backend="aot_eager")
    found, plain = (summarize(each, (1, 8, 8)) for each in (compiled, model))
    assert [sum(getattr(row, name) for row in found.rows) for name in ("saved_bytes", "lean_bytes", "macs")] == [
        sum(getattr(row, name) for row in plain.rows) for name in ("saved_bytes", "lean_bytes", "macs")
    ]
