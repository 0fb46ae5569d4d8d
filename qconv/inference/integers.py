"""Quantized layers on integers: which arithmetic computes one, and its operations in a program."""

import copy
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers import QConv1d, QConv2d, QConv3d, QConvTranspose2d, QLinear, QuantizedLayer
from ..program import operations as ops
from ..program.operations import Window
from ..quantizers import Identity, Quantizer, input_scale
from ..quantizers.levels import Levels
from .builder import Builder, Value, blocks_of

LARGEST_SUM = 2**31 - 1
LARGEST_WEIGHT = 255
LARGEST_EXACT = 2**53  # sums of shifted numbers, in float64


class Arithmetic(NamedTuple):
    """The arithmetic of a quantized layer.

    Attributes:
        kind: "binary", "offset" (codes with an offset, or signs around a centre), "integer", "shift" or "float".
        reason: why it is float.
        weight: the codes, output channels first; of a `QConv2d` whose input is not quantized, the quantized weight.
        scale: the value of 1 in a sum of products of codes, float64 for each output channel.
        levels: the levels of the input.
        zero: added to codes to make them 8-bit numbers.
        bound: the bound of the magnitude of sums.
        centre: the value of 1 in a sum of the input's codes, as `scale`: the offset of "offset" weights.
    """

    kind: str
    reason: str = ""
    weight: Tensor = torch.zeros(0, device="cpu")
    scale: Tensor = torch.zeros(0, device="cpu")
    levels: Levels = Levels(0, 0, torch.ones((), device="cpu"))
    zero: int = 0
    bound: int = 0
    centre: Tensor = torch.zeros(0, device="cpu")


def arithmetic(layer: QuantizedLayer) -> Arithmetic:
    """Choose the arithmetic of a layer, or return why it can't be computed on integers."""
    if isinstance(layer.input_quantizer, Identity):
        how = Arithmetic("float", "its input is not quantized")
        is_plain = isinstance(layer, QConv1d | QConv2d) and type(layer).forward is QConv2d.forward
        return how._replace(weight=layer.quantized_weight()) if is_plain else how
    is_transposed = isinstance(layer, QConvTranspose2d)
    if not isinstance(layer, QConv1d | QConv2d | QConvTranspose2d | QLinear):
        return Arithmetic("float", f"{type(layer).__name__} has no integer operator")
    if type(layer).forward not in (QConv2d.forward, QConvTranspose2d.forward, QLinear.forward):
        return Arithmetic("float", f"{type(layer).__name__} has a forward of its own")
    blocks = _blocks(layer, torch.ones_like(layer.filters())) if is_transposed else None
    if is_transposed and blocks is None:
        return Arithmetic("float", "its output is no whole number of blocks of its stride")
    quantizer = layer.input_quantizer
    levels = quantizer.levels(*quantizer.tensors())
    if levels is None:
        return Arithmetic("float", f"the levels of its input are not fixed: {type(quantizer).__name__} states none")
    if not quantizer.at_work.is_elementwise and isinstance(layer, QLinear):  # which is frozen as a layer of its rows
        return Arithmetic("float", f"{type(quantizer).__name__} quantizes a sample as a whole")
    try:
        weight = layer.weight_codes()
    except TypeError as error:
        return Arithmetic("float", str(error))
    is_plain = weight.offset is None and levels.offset is None
    is_around = quantizer.bits == 1 and levels[:2] == (-1, 1) and bool((weight.values.abs() == 1).all())
    if weight.negative_scale is not None or weight.zero != 0 or not (weight.offset is None or is_around):
        return Arithmetic("float", "the codes of its weight have an offset, or two scales")
    for what, numbers in (("scales", levels.scale), ("offsets", levels.offset)):
        if numbers is not None and numbers.numel() != 1:
            return Arithmetic("float", f"its input channels have {what} of their own")
    by_filter = len(weight.values), *[1] * (weight.values.ndim - 1)
    for what, numbers in (("scales", weight.scale), ("offsets", weight.offset)):
        if numbers is not None and numbers.numel() != 1 and numbers.shape != by_filter:
            return Arithmetic("float", f"its weight has {what} {tuple(numbers.shape)}, not one for each filter")
    levels = from_zero(levels)
    low, high = levels.low, levels.high
    unit = levels.scale.detach().double().flatten()

    def of_filters(numbers: Tensor) -> Tensor:
        return numbers.double().expand(by_filter).flatten() * unit

    scale = of_filters(weight.scale)
    magnitudes = weight.values.abs().double()  # shifts of 7 and 8 bits are powers of two beyond 64-bit numbers
    largest = int(magnitudes.max()) if magnitudes.numel() else 0
    bound = max(abs(low), abs(high)) * int(magnitudes.flatten(1).sum(1).max()) if magnitudes.numel() else 0
    if largest >= LARGEST_EXACT:
        return Arithmetic("float", f"its weights, of up to {largest:.3g}, are not exact in float64 sums")
    values = weight.values.long()
    is_int8 = low >= -128 and high <= 127
    zero = 0 if is_int8 or low >= 0 else -low
    integer = Arithmetic("integer", "", values, scale, levels, zero, bound)
    is_sign = bool((magnitudes == 1).all()) and (blocks is None or bool(blocks[0].all()))  # no zeros between signs
    if not is_plain and is_transposed:
        return Arithmetic("float", "a transposed convolution of values with an offset has no integer operator")
    if is_around and not is_plain:
        centre = torch.zeros_like(scale) if weight.offset is None else of_filters(weight.offset)
        return integer._replace(kind="offset", centre=centre)
    if quantizer.signs and is_sign:
        return integer._replace(kind="binary")
    if (not is_int8 and high + zero > 255) or largest > LARGEST_WEIGHT:
        is_shift = (
            is_plain
            and not isinstance(layer, QConv1d | QConvTranspose2d)
            and bool(((magnitudes == 0) | (magnitudes.log2() % 1 == 0)).all())
        )
        if is_shift and bound < LARGEST_EXACT:
            return integer._replace(kind="shift")
        return Arithmetic("float", f"its codes, {low} to {high} and weights of up to {largest}, are not 8-bit numbers")
    if bound > LARGEST_SUM:
        return Arithmetic("float", f"its sums, of up to {bound}, are not 32-bit numbers")
    return integer if is_plain else integer._replace(kind="offset", centre=torch.zeros_like(scale))


def code_near_zero(levels: Levels | None) -> int:
    """Return the code from which those with an offset are counted: the nearest to 0; 0 for others, and for signs."""
    if levels is None or levels.offset is None or levels.offset.numel() != 1 or levels[:2] == (-1, 1):
        return 0
    return int((-levels.offset.double() / levels.scale.double()).round().clamp(levels.low, levels.high))


def from_zero(levels: Levels) -> Levels:
    """Return the same levels, of codes that are counted from `code_near_zero`: what is left of the offset is small."""
    if (code := code_near_zero(levels)) == 0:
        return levels
    offset = cast(Tensor, levels.offset).double() + code * levels.scale.double()
    return levels._replace(low=levels.low - code, high=levels.high - code, offset=offset)


class Quantized(nn.Module):
    """A trained layer on floats: its own forward, without hooks, and the parts of it that are compared.

    Attributes:
        weight: the quantized weight; None of a layer of another kind, or with a map of input magnitudes.
    """

    weight: Tensor | None

    def __init__(self, layer: Any) -> None:
        super().__init__()
        forwards = QConv1d.forward, QConv2d.forward, QConv3d.forward, QConvTranspose2d.forward, QLinear.forward
        self.is_known = type(layer).forward in forwards and not layer.has_scale_map
        self.layer = copy.deepcopy(layer)
        with layer.as_evaluated() as (quantizer, filters):
            weight = quantizer.quantize(filters, *quantizer.tensors()) if self.is_known else None
        self.register_buffer("weight", weight)

    def forward(self, input: Tensor) -> Tensor:
        """The layer's output."""
        return self.layer.forward(input)  # pyright: ignore

    def input(self, input: Tensor) -> Tensor:
        """Return the quantized input."""
        quantizer: Any = self.layer.input_quantizer  # pyright: ignore
        return quantizer.quantize(self.padded(input), *quantizer.tensors())

    def codes(self, input: Tensor) -> Tensor:
        """Return the codes of the input, with padding, as `from_zero` counts them."""
        quantizer: Any = self.layer.input_quantizer  # pyright: ignore
        tensors = quantizer.tensors()
        return quantizer.codes(self.padded(input), *tensors).values - code_near_zero(quantizer.levels(*tensors))

    def padded(self, input: Tensor) -> Tensor:
        """Return the input with what other padding modes than zeros put around it."""
        layer: Any = self.layer
        if layer.weight.ndim > 2 and layer.padding_mode != "zeros":
            return F.pad(input, layer.padding_sides, mode=layer.padding_mode)
        return input

    def product(self, input_q: Tensor, weight: Any, bias: Tensor | None, input: Tensor) -> Tensor:
        """Apply the layer's operation to a quantized input and weight, of any dtype."""
        if isinstance(self.layer, QLinear):
            return F.linear(input_q, weight, bias)
        layer: Any = self.layer
        return layer.operation(input).forward(input_q, weight, bias)


class Encode(nn.Module):
    """The codes of a float input, by the layer's trained quantizer, where no list of edges gives them."""

    def __init__(self, quantizer: Quantizer, dtype: torch.dtype, zero: int = 0) -> None:
        super().__init__()
        self.quantizer = copy.deepcopy(quantizer).eval().requires_grad_(False)
        self.dtype, self.zero = dtype, zero

    def forward(self, input: Tensor) -> Tensor:
        """Whole numbers of the shape of `input`."""
        values = self.quantizer.codes(input, *self.quantizer.tensors()).values
        return (values + self.zero if self.zero else values).to(self.dtype)


class Shifts(Quantized):
    """A trained layer of powers of two on fixed-point numbers: sums in float64, rounded once.

    They are exact if the scales are powers of two, as those of fixed-point numbers.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__(layer)
        self.weight = cast(Tensor, self.weight).double()

    def forward(self, input: Tensor) -> Tensor:
        """The layer's output."""
        return self._added(input, torch.float64).float()

    def on_floats(self, input: Tensor) -> Tensor:
        """The same with sums of float32, for runtimes without float64."""
        return self._added(input, torch.float32)

    def _added(self, input: Tensor, dtype: torch.dtype) -> Tensor:
        layer: Any = self.layer
        images = input.unsqueeze(0) if input.ndim == layer.weight.ndim - 1 != 1 else input
        bias = None if layer.bias is None else layer.bias.to(dtype)
        output = self.product(self.input(images).to(dtype), cast(Tensor, self.weight).to(dtype), bias, images)
        return output if images is input else output.squeeze(0)


def scale_map(
    input: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], repeats: list[int]
) -> Tensor:
    """Return XNOR-Net's map K of input magnitudes, for each output channel; `repeats` are groups, and outputs in one.

    It is padded with 0, whatever the signs are.
    """
    groups, outputs = repeats
    scale = input_scale(F.pad(input, padding), tuple(kernel), tuple(stride), (0, 0), tuple(dilation), groups)
    return scale.repeat_interleave(outputs, 1)


def lower_layer(build: Builder, layer: Any, how: Arithmetic, x: Value, name: str, free: int) -> Value:
    """Append the operations of a layer that computes on integers, or is a convolution of floats; return its output.

    `free` is the dimension of `x` that depends on the number of images.
    """
    lowered = _Layer(build, layer, how)
    output = lowered.lower(x, free)
    build.program.layers.append(ops.LayerCall(name, lowered.input, lowered.codes, lowered.is_last))
    return output


def _blocks(layer: QConvTranspose2d, filters: Tensor) -> tuple[Tensor, Window] | None:
    return blocks_of(filters.detach(), layer.stride, layer.padding, layer.dilation, layer.output_padding)


class _Layer:
    """A layer, as a convolution of images: a linear one has a window of one pixel, or of the whole image."""

    def __init__(self, build: Builder, layer: Any, how: Arithmetic) -> None:
        self.build, self.layer, self.how = build, layer, how
        self.is_conv, self.is_signal = isinstance(layer, QConv1d | QConv2d), isinstance(layer, QConv1d)
        self.groups = 1 if isinstance(layer, QLinear) else layer.groups
        self.bias = torch.zeros(len(how.scale)) if layer.bias is None else layer.bias.detach()
        self.first_bias = torch.zeros(len(how.scale)) if layer.has_scale_map else self.bias  # the map comes before it
        self.quantizer = layer.input_quantizer
        self.sides: list[int] = []
        self.input = 0
        self.codes: int | None = None
        self.is_last = False  # whether it takes the input's pixels, with channels last
        self.times = layer.stride[0] if isinstance(layer, QConvTranspose2d) else 1
        self.first_bias = self.first_bias.repeat_interleave(self.times**2)
        weight = how.weight.unsqueeze(2) if self.is_signal else how.weight
        self.how = how._replace(scale=how.scale.repeat_interleave(self.times**2), weight=weight)

    def lower(self, x: Value, free: int) -> Value:
        build, how = self.build, self.how
        self.sides = self.layer.sides_for(x.shape[-len(self.layer.kernel_size) :]) if self.is_conv else []
        shape, self.input = self._shape(x.shape), x.place
        image = build.image_from(x) if isinstance(self.layer, QLinear) and how.kind != "shift" and free == 0 else None
        if image is not None:
            self.input, self.is_last = image.place, True
        if self.is_conv and self.layer.pads_by_size:
            build.fix_size()
        if how.kind == "shift":
            return Value(build.call(Shifts(self.layer), shape, build.raw(x)), shape)
        if image is not None:
            place, weight, window = image.place, how.weight[..., None, None], Window()
        else:
            place, weight, window = self._of_rows(x) if isinstance(self.layer, QLinear) else self._of_image(x)
        if how.kind == "float":
            output = build.floats(place, weight, self.layer.bias, window, self.groups)
        else:
            output = self._offset(place, weight, window) if how.kind == "offset" else self._sums(place, weight, window)
        if self.layer.has_scale_map:
            output = self._mapped(output, place, window)
        if isinstance(self.layer, QConvTranspose2d):
            output = build.shuffled(output, self.times)
            shape = *x.shape[:-3], *build.stored[output][1:]
        if self.is_last:
            return build.pixels(output, shape)
        seen = Value(output, shape)
        return seen if len(shape) == 2 or build.is_image(seen) else Value(build.reshaped(output, shape, free), shape)

    def _shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the output."""
        if not self.is_conv:  # that of a transposed convolution is known from its blocks
            return (*shape[:-1], len(self.how.weight))
        rank = 1 if self.is_signal else 2
        sizes = self._window(self._sides()).size((shape[-2] if rank == 2 else 1, shape[-1]))
        return (*shape[: -rank - 1], len(self.how.weight), *sizes[-rank:])

    def _sides(self) -> Any:
        return tuple(self.sides) + ((0, 0) if self.is_signal else ())

    def _window(self, sides: Any) -> Window:
        geometry = self.layer.kernel_size, self.layer.stride, self.layer.dilation
        kernel, stride, dilation = (((1, *each) if self.is_signal else each) for each in geometry)
        return Window(kernel, stride, sides, dilation)

    def _of_image(self, x: Value) -> tuple[int, Tensor, Window]:
        """Return a convolution's input, weight and window."""
        layer, build = self.layer, self.build
        rows, sides = (1,) if self.is_signal else (), self._sides()
        if len(x.shape) + len(rows) == 3:  # an image without a batch
            place = build.reshaped(build.raw(x), (1, *x.shape[:1], *rows, *x.shape[1:]))
        else:
            place = build.row(x) if self.is_signal else build.raw(x)
        if isinstance(layer, QConvTranspose2d):
            return place, *cast(tuple[Tensor, Window], _blocks(layer, self.how.weight))
        border = layer.border_value if self.how.kind != "binary" else 0
        if layer.padding_mode != "zeros" or border:  # a large number gets the code of the border
            how = {"mode": layer.padding_mode} if layer.padding_mode != "zeros" else {"value": border * 1e30}
            place, sides = build.padded(place, sides, **how), (0, 0, 0, 0)
        return place, self.how.weight, self._window(sides)

    def _of_rows(self, x: Value) -> tuple[int, Tensor, Window]:
        """Return a linear layer's input, weight and window."""
        build, rows = self.build, x
        # A threshold for each feature is none for each channel of images.
        of_features = any(tensor.numel() == x.shape[-1] for tensor in self.quantizer.tensors())
        if len(x.shape) != 2 or (of_features and build.is_flattened(x) and not build.is_image(x)):
            shape = torch.Size(x.shape[:-1]).numel(), x.shape[-1]
            rows = Value(build.reshaped(build.raw(x), shape), shape)
        weight, window = build.on_pixels(self.how.weight[..., None, None], rows)
        if build.is_image(rows) or build.is_flattened(rows):
            return rows.place, weight, window
        return build.reshaped(rows.place, (*rows.shape, 1, 1)), weight, window

    def _sums(self, place: int, weight: Tensor, window: Window) -> int:
        """Append the scaled sums of signs or codes."""
        fields: Any = {"channels": len(weight), "window": window, "groups": self.groups}
        if self.how.kind == "binary":
            signs, value = self._signs(place), self.layer.border_value if self.is_conv else 0
            self.codes = signs
            sums = self.build.add(ops.ConvBits, signs, weight=weight.to(torch.int8), pad_value=value, **fields)
        else:
            codes, zero = self._codes(place)
            self.codes = codes
            sums = self.build.add(ops.ConvCodes, codes, weight=weight.to(torch.int16), zero=zero, **fields)
        return self.build.affine(sums, self.how.scale, self.first_bias)

    def _offset(self, place: int, weight: Tensor, window: Window) -> int:
        """Append the convolution of codes with an offset (LSQ+), or of two values around a centre for both (AdaBin).

        With r the offset (`from_zero`) or the centre of the input in units of its codes, and outside of the image no
        value but 0, it is ``scale_c · acc + (centre_c · box + (r · (scale_c · W + centre_c · n) + bias_c))``: ``acc``
        is the sum of products of codes, ``box`` that of the input's codes in the group, ``W`` that of the weight's
        codes whose taps lie inside, and ``n`` their number. Box and the bracket are computed for one channel of a
        group, and of ones; without a border, the bracket is a number for each filter.
        """
        build, (scale, centre), groups = self.build, (self.how.scale, self.how.centre), self.groups
        levels = self.how.levels
        is_binary = levels[:2] == (-1, 1) and bool((weight.abs() == 1).all())
        codes, zero = (self._signs(place), 0) if is_binary else self._codes(place)
        self.codes = codes

        def convolved(weight: Tensor, window: Window, groups: int) -> int:
            fields: Any = {"channels": len(weight), "window": window, "groups": groups}
            if is_binary:
                return build.add(ops.ConvBits, codes, weight=weight.to(torch.int8), **fields)
            return build.add(ops.ConvCodes, codes, weight=weight.to(torch.int16), zero=zero, **fields)

        offset = 0.0 if levels.offset is None else float(levels.offset.double() / levels.scale.double())
        taps = offset * (weight.double() * scale.view(-1, 1, 1, 1) + centre.view(-1, 1, 1, 1)).sum(1, keepdim=True)
        sums, is_centred = convolved(weight, window, groups), bool(centre.any())
        if not any(window.padding) and not is_centred:
            return build.affine(sums, scale, taps.flatten(1).sum(1) + self.first_bias.double())
        ones = convolved(torch.ones(1, build.stored[codes][1], 1, 1), Window(), 1)
        ones = build.add(ops.Clamp, ones, low=1.0, high=1.0)
        rest = build.floats(ones, taps.float(), self.first_bias, window, 1)
        if is_centred:
            box = convolved(torch.ones(groups, *weight.shape[1:]), window, groups)
            rest = build.add(ops.Add, build.floats(box, centre.float().view(-1, 1, 1, 1), None, Window(), groups), rest)
        return build.add(ops.Add, build.affine(sums, scale, 0.0), rest)

    def _mapped(self, output: int, place: int, window: Window) -> int:
        """Multiply by the map of input magnitudes, and add the bias."""
        repeats = [self.groups, len(self.how.weight) // self.groups]
        parts = map(list, (window.kernel, window.stride, window.padding, window.dilation))
        factor = self.build.call(scale_map, self.build.stored[output], place, arguments=(ops.Given(0), *parts, repeats))
        return self.build.affine(self.build.add(ops.Multiply, output, factor), 1.0, self.bias)

    def _signs(self, place: int) -> int:
        if self.how.levels.rounding == "sign":
            return cast(int, self.build.signs(place, None))
        signs = self.build.signs(place, self._reaches) if self.quantizer.at_work.is_elementwise else None
        if signs is None:
            return self.build.call(Encode(self.quantizer, torch.float32), self.build.stored[place], place)
        return signs

    def _reaches(self, values: Tensor) -> Tensor:
        """Whether values (1, C, 1, n) get +1."""
        given = values[:, :, 0] if self.is_signal else values if self.is_conv else values[0, :, 0].mT
        found = self.quantizer.codes(given, *self.quantizer.tensors()).values >= 0
        return (found if self.is_conv else found.mT).reshape(values.shape)

    def _codes(self, place: int) -> tuple[int, int]:
        """Return codes, and the code of 0."""
        quantizer, (low, high, step, *_) = self.quantizer, self.how.levels
        first = code_near_zero(quantizer.levels(*quantizer.tensors()))

        def codes(values: Tensor) -> Tensor:
            return quantizer.codes(values.view(1, 1, 1, -1), *quantizer.tensors()).values.flatten().long() - first

        found = self.build.codes(place, codes, low, high, float(step)) if quantizer.at_work.is_elementwise else None
        if found is not None:
            return found, max(0, -low)
        zero = self.how.zero
        encode = Encode(quantizer, torch.int8 if low + zero < 0 else torch.uint8, zero - first)
        return self.build.call(encode, self.build.stored[place], place), zero
