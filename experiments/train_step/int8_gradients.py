"""Time the gradients of a 3×3 convolution of signs: as floats, looked up by bits, and as integers of 8-bit gradients.

``uv run experiments/train_step/int8_gradients.py [--rounds 15]`` prints, for batch 64 and one thread, milliseconds of
CPU time, medians over rounds in which all variants take turns, after it has checked that all give the same numbers.
The gradient's codes have one scale, ``Int8Stochastic(per_sample=False)``. What quantizes it is the last column.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from qconv.kernels import onednn, operators, sign_gradients  # noqa: F401
from qconv.kernels.window import Window
from qconv.quantizers import Int8Stochastic

CASES = (64, 32), (128, 16), (256, 8), (512, 4)
BATCH = 64
GEOMETRY = (1, 1), (1, 1), (1, 1)
WINDOW = Window.of((1, 1), (1, 1, 1, 1), (1, 1), 1, 0)
_ops = torch.ops.qconv


def by_floats(grad: Tensor, input: Tensor, weight: Tensor, mask: list[bool]) -> Tensor:
    """The gradient that `mask` asks for, by torch's float convolution."""
    grads = torch.ops.aten.convolution_backward(grad, input, weight, None, *GEOMETRY, False, (0, 0), 1, mask)
    return grads[mask.index(True)]


def patches(input: Tensor) -> Tensor:
    """Codes under the kernel at each place, ``(N · H · W, kh · kw · C)``."""
    padded = F.pad(input.permute(0, 2, 3, 1), (0, 0, 1, 1, 1, 1))
    return padded.unfold(1, 3, 1).unfold(2, 3, 1).permute(0, 1, 2, 4, 5, 3).reshape(-1, 9 * input.shape[1])


def by_product(codes: Tensor, input: Tensor) -> Tensor:
    """The gradient of the weight as a product of 8-bit matrices, int32."""
    rows = codes.permute(0, 2, 3, 1).flatten(0, 2).t()
    channels = input.shape[1]
    return torch.ops.aten._int_mm(rows, patches(input)).view(-1, 3, 3, channels).permute(0, 3, 1, 2)


def check(calls: dict[str, Callable[[], Tensor]]) -> None:
    """Raise unless all ways to compute a gradient are equal up to the rounding of a sum of floats."""
    for name, call in calls.items():
        exact = calls[f"{name.partition(',')[0]}, float"]()
        if (call() - exact).norm() > 1e-5 * exact.norm():
            raise ValueError(f"{name} gives other numbers than the float convolution")


def variants(channels: int, size: int) -> dict[str, Callable[[], Tensor]]:
    """What is timed: each takes what it needs in the form in which a lean layer would have it."""
    generator = torch.Generator().manual_seed(0)
    shape = BATCH, channels, size, size
    signs = torch.randn(shape, generator=generator).sign().contiguous(memory_format=torch.channels_last)
    filters = torch.randn(channels, channels, 3, 3, generator=generator).sign()
    grad = torch.randn(shape, generator=generator).contiguous(memory_format=torch.channels_last)
    quantizer = Int8Stochastic(per_sample=False)
    values, scale = quantizer.whole(grad, *quantizer.tensors())
    assert scale is not None
    quantized, factor = values * scale, scale.view(())
    bits, weight_bits = _ops.pack_signs(signs), _ops.pack_weight(filters, 1)[0]
    exchanged = filters.to(torch.int8).transpose(0, 1).flip(2, 3).contiguous()
    of_channels = factor.expand(channels).contiguous()

    places = (1, 1), (1, 1, 1, 1), (1, 1)

    def integers_of_input() -> Tensor:
        assert onednn.has_fast_integers(), "this machine has no fast integers"
        return onednn.conv2d_codes((values + 128).to(torch.uint8), 128, exchanged, WINDOW, of_channels)

    def integers_of_weight() -> Tensor:
        return by_product(values.to(torch.int8), _ops.unpack_signs(bits, channels, 1, torch.int8, True)) * factor

    calls = {
        "grad_input, float": lambda: by_floats(quantized, signs, filters, [True, False, False]),
        "grad_input, look-up": lambda: _ops.sign_grad_input(
            quantized, weight_bits, None, channels, (size, size), *places
        ),
        "grad_input, integers": integers_of_input,
        "grad_weight, float": lambda: by_floats(quantized, signs, filters, [False, True, False]),
        "grad_weight, look-up": lambda: _ops.sign_grad_weight(quantized, bits, channels, (3, 3), *places, 1, 0),
        "grad_weight, integers": integers_of_weight,
    }
    check(calls)
    return {**calls, "quantizer": lambda: quantizer.quantize(grad, *quantizer.tensors())}


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    for channels, size in CASES:
        calls = variants(channels, size)
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                start = time.process_time()
                call()
                times[name].append(1000 * (time.process_time() - start))
        print(f"{channels}@{size}: " + ", ".join(f"{n} {statistics.median(t):.1f}" for n, t in times.items()))


if __name__ == "__main__":
    main()
