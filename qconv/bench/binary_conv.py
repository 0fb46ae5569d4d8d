"""Binary 3×3 convolutions of ResNet-18 against torch's float convolution."""

import re
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ground.checks import check_at_least_one
from ..ground.table import Column
from ..kernels.native import instruction_sets
from ..kernels.operators import pack_weight
from .rows import Row, quartiles, seconds_per_call

_LEAST = 0.02  # seconds that a side runs in one round


@dataclass(frozen=True)
class Result(Row):
    """Medians over the rounds, in microseconds, of a 3×3 convolution with as many output as input channels.

    The sides are torch's float32 convolution, contiguous and channels_last; ours, from floats to floats; and ours from
    signs that are packed already, as in a lean layer. `ratio` is the median of the ratios within a round, the faster
    float side to ours, `low` and `high` are its quartiles; `instruction_set` is the kernel's, "torch" if there is none.
    """

    columns = (
        Column("layer", width=8),
        Column("batch", is_right=True, width=5),
        *(Column(f"{side} µs", is_right=True, width=9) for side in ("float", "NHWC", "binary")),
        Column("bits µs", is_right=True, width=10),
        Column("ratio", is_right=True, width=18),
        Column("TMAC/s", is_right=True, width=7),
    )

    layer: str
    batch_size: int
    float_us: float
    channels_last_us: float
    binary_us: float
    bits_us: float
    ratio: float
    low: float
    high: float
    instruction_set: str

    def cells(self) -> tuple[str, ...]:
        channels, size = map(int, self.layer.split("@"))
        speed = self.batch_size * 9 * channels**2 * size**2 / self.binary_us / 1e6
        spread = f"{self.ratio:.1f} [{self.low:.1f}, {self.high:.1f}]"
        times = self.float_us, self.channels_last_us, self.binary_us, self.bits_us
        return self.layer, str(self.batch_size), *(f"{time:.0f}" for time in times), spread, f"{speed:.2f}"


@torch.inference_mode()
def measure(layer: str, batch_size: int, rounds: int) -> Result:
    """Check that both sides give the same result, or raise a RuntimeError; then time them in turn."""
    match = re.fullmatch(r"(\d+)@(\d+)", layer)
    if not match or 0 in (channels := int(match[1]), size := int(match[2])):
        raise ValueError(f"case (={layer!r}) must be CHANNELS@SIZE, such as 64@32")
    check_at_least_one(batch_size=batch_size, rounds=rounds)
    generator = torch.Generator().manual_seed(0)
    input = torch.randn(batch_size, channels, size, size, generator=generator)
    signs = torch.where(torch.randn(channels, channels, 3, 3, generator=generator) < 0, -1.0, 1.0)
    scale = torch.rand(channels, generator=generator)
    bias = torch.randn(channels, generator=generator)
    last_input, last_signs = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (input, signs))
    weight, tap_sums = pack_weight(signs.to(torch.int8))
    bits = torch.ops.qconv.pack_signs(input)
    geometry = channels, channels, (1, 1), (1, 1, 1, 1), (1, 1), 0

    def binary(signs: Tensor = last_input) -> Tensor:
        return torch.ops.qconv.binary_conv2d(signs, weight, tap_sums, *geometry, scale, bias)

    sums = F.conv2d(torch.where(input < 0, -1.0, 1.0), signs, padding=1)
    if not torch.equal(binary(), sums * scale.view(-1, 1, 1) + bias.view(-1, 1, 1)):
        raise RuntimeError(f"{layer}: the two sides differ; nothing was timed")
    sides: list[Callable[[], Tensor]] = [
        lambda: F.conv2d(input, signs, padding=1),
        lambda: F.conv2d(last_input, last_signs, padding=1),
        binary,
        lambda: binary(bits),
    ]
    loops = [max(1, round(_LEAST / seconds_per_call(side, 3))) for side in sides]
    times = [[seconds_per_call(side, count) for side, count in zip(sides, loops, strict=True)] for _ in range(rounds)]
    low, ratio, high = quartiles([min(row[0], row[1]) / row[2] for row in times])
    nchw, nhwc, ours, bits_us = (round(statistics.median(column) * 1e6, 1) for column in zip(*times, strict=True))
    ratios = round(ratio, 2), round(low, 2), round(high, 2)
    return Result(layer, batch_size, nchw, nhwc, ours, bits_us, *ratios, ("torch", *instruction_sets())[-1])
