"""A program run by torch's operators and libraries: on any device, with functions that C does not have."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..kernels import onednn, operators
from ..kernels.window import Window as Geometry
from .operations import (
    GELU,
    Affine,
    Average,
    ConvBits,
    ConvCodes,
    ConvFloats,
    Function,
    Given,
    Images,
    Maximum,
    Mean,
    Operation,
    PReLU,
    Program,
    Quantize,
    Select,
    Sigmoid,
    Sign,
    SiLU,
    Window,
)
from .plan import form_of
from .signs import sign_conv

_Steps = ConvBits, ConvCodes, ConvFloats


class Library(nn.Module):
    """A program as modules: convolutions take in the scale and bias behind them, and floats are added in any order.

    Args:
        program: the program.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.put_together = program.put_together
        operations, readers = program.operations, program.readers()
        self.taken: dict[
            int, int
        ] = {}  # numbers of values that no step makes: signs of others, and what a step takes in
        self.steps = nn.ModuleList()
        self.places: list[tuple[int, tuple[int, ...]]] = []  # of each step: its value's number, and its inputs'
        for number, operation in enumerate(operations):
            if number in self.taken or not operation.inputs:
                continue
            affine, stored = None, number
            if isinstance(operation, _Steps) and len(readers[number]) == 1:
                following = operations[readers[number][0]]
                if isinstance(following, Affine) and number not in program.outputs:
                    affine, stored = following, readers[number][0]
                    self.taken[stored] = stored
            if isinstance(operation, Sign) and _feeds_bits(operation, operations, readers[number]):
                self.taken[number] = operation.inputs[0]  # whose signs the convolution takes
                continue
            self.steps.append(_step(operation, affine))
            self.places.append((stored, tuple(self.taken.get(given, given) for given in operation.inputs)))
        self.outputs = program.outputs
        last = {place: index for index, (_, inputs) in enumerate(self.places) for place in inputs}
        self.over = [[place for place, at in last.items() if at == index] for index in range(len(self.places))]

    def values(self, input: Tensor) -> dict[int, Tensor]:
        """Return the stored values for images, by the numbers of their operations."""
        found = self._run(input, keep=True)
        for number, place in self.taken.items():
            if number != place:
                found[number] = torch.where(found[place] < 0, -1.0, 1.0)
        return found

    def forward(self, input: Tensor) -> Any:
        """Return the output for images."""
        values = self._run(input, keep=False)
        return self.put_together([values[place] for place in self.outputs])

    def _run(self, input: Tensor, keep: bool) -> dict[int, Tensor]:
        if input.ndim == 4:  # the format of the operators on codes
            input = input.contiguous(memory_format=torch.channels_last)
        values = {0: input}
        for step, (number, inputs), over in zip(self.steps, self.places, self.over, strict=True):
            values[number] = step(*[values[place] for place in inputs])
            for place in () if keep else over:
                if place not in self.outputs:
                    del values[place]
        return values


def _feeds_bits(sign: Sign, operations: list[Operation], readers: list[int]) -> bool:
    """Whether a sign is that of a number, and only convolutions of signs take it."""
    return not bool(sign.edge.any()) and all(isinstance(operations[reader], ConvBits) for reader in readers)


def _step(operation: Any, affine: Affine | None) -> nn.Module:
    if isinstance(operation, ConvBits):
        return _Bits(operation, affine)
    if isinstance(operation, ConvCodes):
        return _Codes(operation, affine)
    if isinstance(operation, ConvFloats):
        return _floats(operation, affine)
    if isinstance(operation, Function):
        return _Call(operation)
    if isinstance(operation, Quantize):
        return _Round(operation)
    if isinstance(operation, Affine | PReLU | Select | Sign):
        return _WithTensors(operation)
    if isinstance(operation, Average | Maximum) and _is_symmetric(operation.window):
        return _Pool(operation)
    return _Defined(_LIBRARIES.get(type(operation), operation.run))


class _Defined(nn.Module):
    """An operation without tensors."""

    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, *values: Tensor) -> Tensor:
        return self.run(*values)


def _mean(x: Tensor) -> Tensor:
    return x.mean((2, 3), keepdim=True)


_LIBRARIES: dict[type[Operation], Callable[..., Tensor]] = {
    Mean: _mean,
    Sigmoid: torch.sigmoid,
    SiLU: F.silu,
    GELU: F.gelu,
}


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


class _Conv(nn.Module):
    """A convolution of signs or codes, with the scale and bias behind it."""

    scale: Tensor | None
    bias: Tensor | None

    def __init__(self, conv: ConvBits | ConvCodes, affine: Affine | None) -> None:
        super().__init__()
        window = conv.window
        self.channels = conv.weight.shape[1] * conv.groups, conv.channels
        self.geometry = list(window.stride), list(window.padding), list(window.dilation)
        self.register_buffer("scale", None if affine is None else affine.scale)
        self.register_buffer("bias", None if affine is None else affine.bias)


class _Bits(_Conv):
    weight: Tensor
    tap_sums: Tensor

    def __init__(self, conv: ConvBits, affine: Affine | None) -> None:
        super().__init__(conv, affine)
        self.pad_value = conv.pad_value
        weight, tap_sums = operators.pack_weight(conv.weight, conv.groups)
        self.register_buffer("weight", weight)
        self.register_buffer("tap_sums", tap_sums)

    def forward(self, input: Tensor) -> Tensor:
        operands = input, self.weight, self.tap_sums, *self.channels, *self.geometry, self.pad_value
        return torch.ops.qconv.binary_conv2d(*operands, self.scale, self.bias).float()


class _Codes(_Conv):
    """Weights beyond 8 bits are sums of several: their input channels are taken that many times."""

    weight: Tensor
    taken: Tensor | None

    def __init__(self, conv: ConvCodes, affine: Affine | None) -> None:
        super().__init__(conv, affine)
        self.groups, self.zero = conv.groups, conv.zero
        weight, taken = operators.of_8_bits(conv.weight, conv.groups)
        if taken is not None and not onednn.has_fast_integers():
            weight, taken = conv.weight, None
        self.register_buffer("weight", weight)
        self.register_buffer("taken", taken)

    def forward(self, codes: Tensor) -> Tensor:
        codes = codes if self.taken is None else codes.index_select(1, self.taken)
        operands = codes, self.weight, *self.geometry, self.groups, 0, self.scale, self.bias
        return torch.ops.qconv.integer_conv2d(*operands, zero=self.zero).float()


def _floats(conv: ConvFloats, affine: Affine | None) -> nn.Module:
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

    def __init__(self, quantize: Quantize) -> None:
        super().__init__()
        self.low, self.high = quantize.ends
        self.zero = quantize.zero
        self.form, self.number = form_of(quantize, self.low, self.high)
        self.register_buffer("edges", quantize.edges)
        self.register_buffer("codes", quantize.codes)

    def forward(self, x: Tensor) -> Tensor:
        if self.form > 1:
            return self.codes[torch.searchsorted(self.edges, x.contiguous(), right=True)]
        x = x * self.number if self.form == 0 else x / self.number
        return x.clamp_(self.low, self.high).round_().add_(self.zero).to(torch.uint8)


class _Pool(nn.Module):
    def __init__(self, pool: Average | Maximum) -> None:
        super().__init__()
        self.is_average, self.window = isinstance(pool, Average), pool.window

    def forward(self, x: Tensor) -> Tensor:
        kernel, stride, (left, _, top, _), _, ceil = self.window
        if self.is_average:
            return F.avg_pool2d(x, kernel, stride, (top, left), ceil, count_include_pad=False)
        return F.max_pool2d(x, kernel, stride, (top, left), ceil_mode=ceil)


class _Call(nn.Module):
    """A function, whose tensors are buffers."""

    def __init__(self, function: Function) -> None:
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
