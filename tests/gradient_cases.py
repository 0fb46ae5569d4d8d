"""Random calls of convolutions with signs and of their gradients, and what they are by torch and autograd."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from qconv.kernels.operators import pack_weight
from qconv.kernels.sizes import Sizes
from qconv.kernels.window import Window

ops = torch.ops.qconv


@dataclass
class Case:
    """Operands of one convolution: of its gradients, and of its forward on numbers."""

    sizes: Sizes
    grad_output: Tensor
    signs: Tensor  # of the input
    filters: Tensor  # signs of the weight
    scale: Tensor | None
    passing: Tensor | None
    numbers: Tensor  # of the input
    bias: Tensor | None

    @classmethod
    def of(cls, sizes: Sizes, scaled: bool = False, masked: bool = False) -> "Case":
        last = torch.channels_last
        return cls(
            sizes,
            torch.randn(sizes.output).contiguous(memory_format=last),
            torch.where(torch.randn(sizes.input) < 0, -1.0, 1.0),
            torch.where(torch.randn(sizes.weight) < 0, -1.0, 1.0),
            torch.rand(sizes.channels[1]) if scaled else None,
            torch.rand(sizes.input) < 0.5 if masked else None,
            torch.randn(sizes.input).contiguous(memory_format=last),
            torch.randn(sizes.channels[1]) if masked else None,
        )

    def of_forward(self) -> tuple[Any, ...]:
        """What `sign_conv.sign_conv2d` takes."""
        return self.numbers, self.sizes, pack_weight(self.filters, self.sizes.window.groups)[0], self.scale, self.bias

    def of_input(self) -> tuple[Any, ...]:
        """What `sign_gradients.sign_grad_input` takes."""
        groups = self.sizes.window.groups
        passes = None if self.passing is None else ops.pack_signs(torch.where(self.passing, -1.0, 1.0), groups)
        return self.grad_output, self.sizes, pack_weight(self.filters, groups)[0], self.scale, passes

    def of_weight(self) -> tuple[Any, ...]:
        """What `sign_gradients.sign_grad_weight` takes."""
        return self.grad_output, self.sizes, ops.pack_signs(self.signs, self.sizes.window.groups)

    def input_arguments(self) -> tuple[Any, ...]:
        """What the operator `sign_grad_input` takes."""
        grad_output, sizes, weight, scale, passes = self.of_input()
        geometry = sizes.window[:3]
        return grad_output, weight, scale, sizes.channels[0], sizes.input_size, *geometry, passes

    def weight_arguments(self) -> tuple[Any, ...]:
        """What the operator `sign_grad_weight` takes."""
        grad_output, sizes, input = self.of_weight()
        return grad_output, input, sizes.channels[0], sizes.kernel_size, *sizes.window

    def forward_arguments(self) -> tuple[Any, ...]:
        """What the operator `sign_conv2d` takes."""
        input, sizes, *others = self.of_forward()
        *geometry, _, value = sizes.window
        return input, *others, sizes.channels[1], *geometry, value

    def output(self, dtype: torch.dtype, magnitudes: bool = False) -> Tensor:
        """The forward by torch; with `magnitudes` the sums of what is added up to it, without signs."""
        window, scale = self.sizes.window, 1 if self.scale is None else self.scale.to(dtype).view(-1, 1, 1, 1)
        input, weight = self.numbers.to(dtype), self.filters.to(dtype) * scale
        bias = None if self.bias is None else self.bias.to(dtype)
        value = window.padding_value
        if magnitudes:
            input, weight, value = input.abs(), weight.abs(), abs(value)
            bias = None if bias is None else bias.abs()
        padded = F.pad(input, window.padding, value=value)
        return F.conv2d(padded, weight, bias, window.stride, 0, window.dilation, window.groups)

    def expected(self, dtype: torch.dtype, magnitudes: bool = False) -> tuple[Tensor, Tensor]:
        """Both gradients by autograd; with `magnitudes` the sums of what is added up to them, without signs."""
        window, scale = self.sizes.window, 1 if self.scale is None else self.scale.to(dtype).view(-1, 1, 1)
        input, weight, grad = (
            self.signs.to(dtype, copy=True),
            self.filters.to(dtype, copy=True),
            self.grad_output.to(dtype),
        )
        if magnitudes:
            input, weight, grad = input.abs(), weight.abs(), grad.abs()
        input.requires_grad_()
        weight.requires_grad_()
        value = abs(window.padding_value) if magnitudes else window.padding_value
        padded = F.pad(input, window.padding, value=value)
        output = F.conv2d(padded, weight, None, window.stride, 0, window.dilation, window.groups)
        (of_input,) = torch.autograd.grad(output, input, grad * scale, retain_graph=True)
        (of_weight,) = torch.autograd.grad(output, weight, grad)
        passing = torch.ones(()).bool() if self.passing is None else self.passing
        return torch.where(passing, of_input, 0), of_weight

    def wanted(self, dtype: torch.dtype, magnitudes: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """The forward and both gradients."""
        return self.output(dtype, magnitudes), *self.expected(dtype, magnitudes)

    def errors(self, *found: Tensor) -> list[float]:
        """Largest errors as a share of what is allowed: twice that of float32, or four roundings of the magnitudes."""
        exact, single = self.wanted(torch.float64), self.wanted(torch.float32)
        return list(map(_share, found, exact, single, self.wanted(torch.float64, magnitudes=True)))

    def change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Other numbers, and another gradient."""
        self.numbers, self.grad_output = function(self.numbers), function(self.grad_output)


def _share(got: Tensor, wanted: Tensor, plain: Tensor, sums: Tensor) -> float:
    allowed = max(2 * float((plain - wanted).abs().max()), 2.0**-22 * float(sums.abs().max()), 1e-30)
    return float((got - wanted).abs().max()) / allowed


def cases(count: int, seed: int = 0, most: int = 70) -> Iterator[Case]:
    """Small convolutions of all geometries."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    while count:
        groups = draw.choice([1, 1, 1, 2, 3])
        of_group = [size for size in (1, 2, 3, 5, 8, 12, 13, 16, 17, 33, 40, 64, 70) if size <= most]
        channels = groups * draw.choice(of_group), groups * draw.choice(of_group)
        kernel = draw.choice([(1, 1), (3, 3), (2, 3), (5, 1), (draw.randint(1, 7), draw.randint(1, 7))])
        window = Window(
            stride=(draw.randint(1, 3), draw.randint(1, 3)),
            padding=(draw.randint(0, 3), draw.randint(0, 3), draw.randint(0, 3), draw.randint(0, 3)),
            dilation=(draw.choice([1, 1, 2]), draw.choice([1, 1, 2, 3])),
            groups=groups,
            padding_value=draw.choice([0, 0, 1, -1]),
        )
        sizes = Sizes(draw.randint(1, 11), channels, (draw.randint(1, 12), draw.randint(1, 14)), kernel, window)
        try:
            _ = sizes.output
        except ValueError:
            continue
        # Here torch's own gradient of the weight (oneDNN in torch 2.15) writes beyond its memory without AVX-512.
        narrow = kernel == (1, 1) and window.stride[1] > 1 and channels[0] // groups < 8
        if narrow and "AVX512" not in torch.backends.cpu.get_cpu_capability():
            continue
        count -= 1
        yield Case.of(sizes, scaled=draw.random() < 0.5, masked=draw.random() < 0.5)
