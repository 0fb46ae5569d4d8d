"""A program run by torch's operators: on any device, and where tables for signs are faster than a plan."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..kernels.operators import pack_weight
from ..kernels.window import Window as Geometry
from . import operations as ops
from .operations import Given, Images, Operation, Program, Window
from .plan import form_of
from .signs import sign_conv


class Library(nn.Module):
    """A program as modules: its definition, but for floats, which torch's own functions compute, with gradients.

    A convolution of floats or signs takes in the scale and bias behind it.

    Args:
        program: the program.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.put_together, self.outputs = program.put_together, program.outputs
        operations, readers = program.operations, program.readers()
        self.steps = nn.ModuleList()
        self.places: list[tuple[int, tuple[int, ...]]] = []  # of each step: its value's number, and its inputs'
        is_open = [bool(operation.inputs) for operation in operations]
        for number, operation in enumerate(operations):
            if not is_open[number]:
                continue
            behind = readers[number][0] if len(readers[number]) == 1 and number not in program.outputs else number
            affine = operations[behind]
            takes_in = isinstance(operation, ops.ConvFloats | ops.ConvBits) and isinstance(affine, ops.Affine)
            is_open[behind] = not takes_in
            self.steps.append(_step(operation, affine if takes_in else None))
            self.places.append((behind if takes_in else number, operation.inputs))
        last = {place: index for index, (_, inputs) in enumerate(self.places) for place in inputs}
        self.over = [[place for place, at in last.items() if at == index] for index in range(len(self.places))]

    def values(self, input: Tensor) -> dict[int, Tensor]:
        """Return the values for images, by the numbers of their operations, but for what a convolution takes in."""
        return self._run(input, keep=True)

    def forward(self, input: Tensor) -> Any:
        """Return the output for images."""
        values = self._run(input, keep=False)
        return self.put_together([values[place] for place in self.outputs])

    def _run(self, input: Tensor, keep: bool) -> dict[int, Tensor]:
        if input.ndim == 4:  # the format of convolutions of signs
            input = input.contiguous(memory_format=torch.channels_last)
        values = {0: input}
        for step, (number, inputs), over in zip(self.steps, self.places, self.over, strict=True):
            values[number] = step(*[values[place] for place in inputs])
            for place in () if keep else over:
                if place not in self.outputs:
                    del values[place]
        return values


def _step(operation: Operation, affine: Any) -> nn.Module:
    if isinstance(operation, ops.ConvFloats):
        return _floats(operation, affine)
    if isinstance(operation, ops.ConvBits):
        return _Bits(operation, affine)
    if isinstance(operation, ops.ConvCodes):
        return _Codes(operation)
    if isinstance(operation, ops.Function):
        return _Call(operation)
    if isinstance(operation, ops.Quantize):
        return _Round(operation)
    if isinstance(operation, ops.Affine | ops.PReLU | ops.Select | ops.Sign):
        return _WithTensors(operation)
    if isinstance(operation, ops.Average | ops.Maximum) and _is_symmetric(operation.window):
        return _Pool(operation)
    return Called(_LIBRARIES.get(type(operation), operation.run))


def _mean(x: Tensor) -> Tensor:
    return x.mean((2, 3), keepdim=True)


_LIBRARIES: dict[type[Operation], Callable[..., Tensor]] = {
    ops.Mean: _mean,
    ops.Sigmoid: torch.sigmoid,
    ops.SiLU: F.silu,
    ops.GELU: F.gelu,
}


class Called(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *values: Tensor) -> Tensor:
        return self.function(*values)


class _WithTensors(nn.Module):
    """An operation whose tensors are buffers; its definition finds them by their names."""

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.kind: Any = type(operation)
        for name, value in vars(operation).items():
            if isinstance(value, Tensor):
                self.register_buffer(name, value)

    def forward(self, *values: Tensor) -> Tensor:
        return self.kind.run(self, *values)


class _Bits(nn.Module):
    """Sums of signs, with the scale and bias behind them."""

    weight: Tensor
    tap_sums: Tensor
    scale: Tensor | None
    bias: Tensor | None

    def __init__(self, conv: ops.ConvBits, affine: ops.Affine | None) -> None:
        super().__init__()
        window, (channels, inputs) = conv.window, conv.weight.shape[:2]
        geometry = list(window.stride), list(window.padding), list(window.dilation)
        self.arguments = inputs * conv.groups, channels, *geometry, conv.pad_value
        weight, tap_sums = pack_weight(conv.weight, conv.groups)
        self.register_buffer("weight", weight)
        self.register_buffer("tap_sums", tap_sums)
        self.register_buffer("scale", None if affine is None else affine.scale)
        self.register_buffer("bias", None if affine is None else affine.bias)

    def forward(self, signs: Tensor) -> Tensor:
        operands = signs, self.weight, self.tap_sums, *self.arguments
        return torch.ops.qconv.binary_conv2d(*operands, self.scale, self.bias).float()


class _Codes(nn.Module):
    """Sums of codes, exact: on a CPU in float32 if none can reach 2^24, else in float64.

    A GPU's library may choose a convolution by transforms, which rounds.
    """

    weight: Tensor

    def __init__(self, conv: ops.ConvCodes) -> None:
        super().__init__()
        self.zero, self.padding = conv.zero, conv.window.padding
        self.geometry = conv.window.stride, 0, conv.window.dilation, conv.groups
        most = max(conv.zero, 255 - conv.zero) * conv.weight.long().abs().flatten(1).sum(1)
        self.is_small = bool((most < 2**24).all())
        self.register_buffer("weight", conv.weight)

    def forward(self, codes: Tensor) -> Tensor:
        dtype = torch.float32 if self.is_small and codes.is_cpu else torch.float64
        padded = F.pad(codes.to(dtype) - self.zero, self.padding)
        with torch.autocast(codes.device.type, enabled=False):
            return F.conv2d(padded, self.weight.to(dtype), None, *self.geometry).float()


def _floats(conv: ops.ConvFloats, affine: ops.Affine | None) -> nn.Module:
    """Return a convolution of torch's, or one that looks sums up where a weight has one magnitude in each filter."""
    weight, bias, window = conv.weight, None, conv.window
    if affine is not None:
        weight = (weight.double() * affine.scale.double().view(-1, 1, 1, 1)).float()
        bias = affine.bias if bool(affine.bias.any()) else None
    geometry = Geometry(window.stride, window.padding, window.dilation, conv.groups)
    if (signs := sign_conv(weight, geometry, bias)) is not None:
        return signs
    left, right, top, bottom = window.padding
    padding = (top, left) if geometry.is_symmetric else (0, 0)
    channels, options = (weight.shape[1] * conv.groups, conv.channels), (window.dilation, conv.groups, bias is not None)
    made = nn.utils.skip_init(nn.Conv2d, *channels, window.kernel, window.stride, padding, *options)
    made.weight = nn.Parameter(weight.contiguous(memory_format=torch.channels_last), requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made if geometry.is_symmetric else nn.Sequential(nn.ZeroPad2d((left, right, top, bottom)), made)


class _Round(nn.Module):
    """A quantizer; even codes are rounded instead of searched."""

    edges: Tensor
    codes: Tensor

    def __init__(self, quantize: ops.Quantize) -> None:
        super().__init__()
        self.low, self.high = quantize.ends
        self.zero = quantize.zero
        self.form, self.number = form_of(quantize)
        self.register_buffer("edges", quantize.edges)
        self.register_buffer("codes", quantize.codes)

    def forward(self, x: Tensor) -> Tensor:
        if self.form > 1:
            return self.codes[torch.searchsorted(self.edges, x.contiguous(), right=True)]
        x = x * self.number if self.form == 0 else x / self.number
        return x.clamp_(self.low, self.high).round_().add_(self.zero).to(torch.uint8)


class _Pool(nn.Module):
    def __init__(self, pool: ops.Average | ops.Maximum) -> None:
        super().__init__()
        self.is_average, self.window = isinstance(pool, ops.Average), pool.window

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride, (left, _, top, _), _, ceil = self.window
        if self.is_average:
            return F.avg_pool2d(x, kernel, stride, (top, left), ceil, count_include_pad=False)
        return F.max_pool2d(x, kernel, stride, (top, left), ceil_mode=ceil)


class _Call(nn.Module):
    """A function, whose tensors are buffers."""

    def __init__(self, function: ops.Function) -> None:
        super().__init__()

        def kept(argument: Any) -> Any:
            if not isinstance(argument, Tensor):
                return argument
            place = len(function.inputs) + len(self._buffers)
            self.register_buffer(f"tensor_{place}", argument)
            return Given(place)

        arguments, named = tree_map(kept, (function.arguments, dict(function.named)), is_leaf=_is_leaf)
        self.call = replace(function, arguments=arguments, named=named)  # which can be pickled

    def forward(self, *values: Tensor) -> Tensor:
        held: Any = self._buffers.values()
        return self.call.run(*values, *held)


def _is_leaf(argument: Any) -> bool:
    return isinstance(argument, Given | Images)


def _is_symmetric(window: Window) -> bool:
    left, right, top, bottom = window.padding
    return left == right and top == bottom
