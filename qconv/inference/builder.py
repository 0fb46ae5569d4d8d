"""Adding operations to a program, with the shape that each value has for the sample."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..program import operations as ops
from ..program.edges import NotMonotone, edges_of, first_floats, rises
from ..program.operations import Operation, Program, Size, Window

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Value:
    """A value in a network: the number of its operation, and the shape that the network gives it for the sample.

    An operation on images stores (N, C, H, W); for the network the same numbers may be rows, (N, C · H · W).

    Attributes:
        moved: of numbers that were only moved: the images that had them, and where each of this value's lies in these.
    """

    place: int
    shape: Shape
    moved: tuple[int, Tensor] | None = field(default=None, compare=False)


class Builder:
    """A program that grows.

    Attributes:
        program: the program.
        stored: the shape of each operation's value for the sample.
        origin: the name that operations get.
    """

    def __init__(self, shape: Shape) -> None:
        self.program = Program(shape[1] if len(shape) > 1 else 1)
        self.stored: list[Shape] = [shape]
        self._exact: dict[int, tuple[Tensor, Tensor]] = {}  # scales and biases, by number
        self._images: dict[Value, int] = {}  # by the values whose numbers they are, with channels last
        self.origin = ""

    def add(self, kind: type[Operation], *inputs: int, channels: int | None = None, **fields: Any) -> int:
        """Append an operation on images; return its number. It has the channels of its first input by default."""
        first = self.stored[inputs[0]]
        channels = first[1] if channels is None else channels
        operation = kind(inputs=inputs, channels=channels, origin=self.origin, **fields)
        self.stored.append((first[0], channels, *operation.size((first[2], first[3]))))
        return self.program.add(operation)

    def call(
        self,
        function: Callable[..., Any],
        shape: Shape,
        *inputs: int,
        arguments: tuple[Any, ...] = (ops.Given(0),),
        named: Mapping[str, Any] | None = None,
        result: int | None = None,
    ) -> int:
        """Append a `Function` with a value of this shape; return its number."""
        fields: Any = {"function": function, "arguments": arguments, "named": named or {}, "result": result}
        channels = shape[1] if len(shape) > 1 else 1
        self.stored.append(shape)
        return self.program.add(ops.Function(inputs=inputs, channels=channels, origin=self.origin, **fields))

    # Shapes

    def is_image(self, x: Value) -> bool:
        """Whether a value is stored as (N, C, H, W), and the network sees it so, or one row or pixel without H or W."""
        stored = self.stored[x.place]
        is_one = stored[2:] == (1, 1) and x.shape == stored[:2]
        return len(stored) == 4 and (x.shape == stored or is_one or self.is_signal(x))

    def has_images_first(self, x: Value) -> bool:
        """Whether only the first length of a value is that of the images, as an operation on images gives it."""
        return self.is_image(x) and not ops.needs_torch(self.program.operations[x.place])

    def is_signal(self, x: Value) -> bool:
        """Whether a value is stored as an image of one row, and the network sees (N, C, W)."""
        stored = self.stored[x.place]
        return stored[2:3] == (1,) and x.shape == (*stored[:2], *stored[3:])

    def is_flattened(self, x: Value) -> bool:
        """Whether a value is stored as (N, C, H, W), and the network sees rows of whole images."""
        stored = self.stored[x.place]
        return len(stored) == 4 and x.shape == (stored[0], stored[1] * stored[2] * stored[3])

    def raw(self, x: Value) -> int:
        """Return the number of a value that is stored in the shape that the network sees."""
        if self.is_signal(x):
            return self.call(torch.ops.aten.squeeze.dim, x.shape, x.place, arguments=(ops.Given(0), 2))
        return x.place if self.stored[x.place] == x.shape else self.reshaped(x.place, x.shape)

    def image(self, x: Value) -> int | None:
        """Return the number of a value stored as (N, C, H, W), of rows as one pixel; None if there is none."""
        if self.is_image(x):
            return x.place
        return self.reshaped(self.raw(x), (*x.shape, 1, 1)) if len(x.shape) == 2 else None

    def row(self, x: Value) -> int:
        """Return the number of a signal (N, C, W) that is stored as an image of one row."""
        shape = (*x.shape[:2], 1, *x.shape[2:])
        if self.stored[x.place] == shape:
            return x.place
        return self.call(torch.ops.aten.unsqueeze.default, shape, self.raw(x), arguments=(ops.Given(0), 2))

    def reshaped(self, place: int, shape: Shape, free: int = 0) -> int:
        """Return the number of a value in another shape, of which only the length `free` depends on the images."""
        sizes = [*shape[:free], -1, *shape[free + 1 :]]
        return self.call(torch.ops.aten.reshape.default, shape, place, arguments=(ops.Given(0), sizes))

    def moved(self, x: Value) -> tuple[int, Tensor] | None:
        """Return `Value.moved`; of pixels, their image, of images, they themselves."""
        if (place := self._images.get(x)) is not None:
            return place, self._every(place).movedim(1, -1).reshape(x.shape)
        if x.moved is None and (self.is_image(x) or self.is_flattened(x)):
            return x.place, torch.arange(torch.Size(x.shape).numel(), dtype=torch.int32).view(x.shape)
        return x.moved

    def image_of(self, x: Value) -> Value | None:
        """Return the image whose pixels a value is, one after another, with channels last; None of another value."""
        if (known := self._images.get(x)) is not None:
            return Value(known, self.stored[known])
        if x.moved is None:
            return None
        place, index = x.moved
        every = self._every(place).movedim(1, -1)
        is_so = index.shape[-1] == every.shape[-1] and torch.equal(index.flatten(), every.flatten())
        return Value(place, self.stored[place]) if is_so else None

    def image_from(self, x: Value) -> Value | None:
        """Return `image_of`; of others with channels last, (N, …, C), append an image of them. None of rows."""
        if (found := self.image_of(x)) is not None or len(x.shape) < 3:
            return found
        count, *sides, channels = x.shape
        shape = (count, 1, torch.Size(sides).numel(), channels) if len(sides) != 2 else x.shape
        number = self.raw(x) if shape == x.shape else self.reshaped(self.raw(x), shape)
        shape, arguments = (count, channels, *shape[1:3]), (ops.Given(0), [0, 3, 1, 2])
        self._images[x] = self.call(torch.ops.aten.permute.default, shape, number, arguments=arguments)
        return self.image_of(x)

    def pixels(self, place: int, shape: Shape) -> Value:
        """Append functions that give an image's pixels, channels last; operations go on behind the image itself."""
        count, channels, height, width = self.stored[place]
        pixels, arguments = (count, height, width, channels), (ops.Given(0), [0, 2, 3, 1])
        number = self.call(torch.ops.aten.permute.default, pixels, place, arguments=arguments)
        found = Value(number if shape == pixels else self.reshaped(number, shape), shape)
        self._images[found] = place
        return found

    def _every(self, place: int) -> Tensor:
        stored = self.stored[place]
        return torch.arange(torch.Size(stored).numel(), dtype=torch.int32).view(stored)

    def selected(self, place: int, index: Tensor) -> int | None:
        """Append operations for an image's numbers in other places: other channels, of every n-th row and column.

        ``index`` (N, C, H, W) are places among all numbers of `place`. None if they lie otherwise.
        """
        (_, channels, *size), (_, _, *out) = self.stored[place], index.shape
        stride = -(-size[0] // out[0]), -(-size[1] // out[1])
        taken = ops.Take(inputs=(place,), channels=channels, stride=stride)
        every = self._every(place)
        chosen = index[0, :, 0, 0] // (size[0] * size[1])
        if taken.size((size[0], size[1])) != tuple(out) or not torch.equal(taken.run(every)[:, chosen], index):
            return None
        place = place if stride == (1, 1) else self.add(ops.Take, place, stride=stride)
        if chosen.tolist() == [*range(channels)]:
            return place
        return self.add(ops.Select, place, channels=len(chosen), index=chosen.long())

    def fix_size(self) -> None:
        """Let the program take only images of the sample's size."""
        self.program.size = self.stored[0][2:]

    # Operations that are used in several places

    def affine(self, place: int, scale: Tensor | float, bias: Tensor | float) -> int:
        """Append a scale and a bias of channels; they are rounded to float32."""
        channels = self.stored[place][1]

        def of_channels(numbers: Tensor | float) -> Tensor:
            return torch.as_tensor(numbers, dtype=torch.float64).detach().flatten().expand(channels)

        exact = of_channels(scale), of_channels(bias)
        number = self.add(ops.Affine, place, scale=exact[0].float().clone(), bias=exact[1].float().clone())
        self._exact[number] = exact
        return number

    def norm(self, place: int, scale: Tensor, bias: Tensor) -> int:
        """Append a batch norm; right behind a convolution's scale and bias it becomes one with them."""
        operation = self.program.operations[place]
        exact = self._exact.get(place)
        if exact is None or place != len(self.program.operations) - 1:
            return self.affine(place, scale, bias)
        return self.affine(operation.inputs[0], exact[0] * scale, exact[1] * scale + bias)

    def padded(self, place: int, sides: Any, **how: Any) -> int:
        """Append torch's padding, by a `mode` or a `value`; `sides` are left, right, top, bottom."""
        return self.add(ops.Pad, place, arguments=(ops.Given(0), list(sides)), named=how)

    def floats(self, place: int, weight: Tensor, bias: Tensor | None, window: Window, groups: int) -> int:
        """Append a convolution of floats by a weight (C_out, C / groups, kh, kw)."""
        weight = weight.detach().contiguous().clone()
        sums = self.add(ops.ConvFloats, place, channels=len(weight), weight=weight, window=window, groups=groups)
        return sums if bias is None else self.affine(sums, 1.0, bias)

    def shuffled(self, place: int, times: int) -> int:
        """Append blocks of `times` pixels squared, of channels."""
        channels = self.stored[place][1] // times**2
        return place if times == 1 else self.add(ops.Shuffle, place, channels=channels, times=times)

    def on_pixels(self, weight: Tensor, x: Value) -> tuple[Tensor, Window]:
        """Return weight and window of a linear layer, (out, in, 1, 1): over the whole image for flattened images."""
        size = self.stored[x.place][2:]
        if not self.is_flattened(x) or size == (1, 1):
            return weight, Window()
        self.fix_size()
        return weight.reshape(len(weight), -1, *size), Window((size[0], size[1]))

    def signs(self, place: int, reaches: Callable[[Tensor], Tensor] | None) -> int | None:
        """Append the signs of a value: of 0, or of where ``reaches`` begins to hold in each channel of (1, C, 1, n).

        None if it does not begin once.
        """
        channels = self.stored[place][1]
        if reaches is None:
            return self.shared(ops.Sign, place, edge=torch.zeros(channels))
        edge = first_floats(lambda v: reaches(v.view(1, channels, 1, 1)).flatten(), (channels,))
        grid = torch.linspace(-8, 8, 257).expand(1, channels, 1, -1)
        if bool(edge.isnan().any()) or not rises(reaches(grid).int()):
            return None
        return self.shared(ops.Sign, place, edge=edge)

    def codes(self, place: int, codes: Callable[[Tensor], Tensor], low: int, high: int, step: float) -> int | None:
        """Append whole codes from low to high, of which 0 gets a code of at least 0; None if C could not hold them."""
        zero = max(0, -low)
        if high + zero > 255 or low > 0:
            return None
        try:
            edges = edges_of(codes, low, high, step)
        except NotMonotone:
            return None
        is_level = torch.cat([edges[1:] != edges[:-1], torch.ones(1, dtype=torch.bool)])  # uneven levels skip codes
        levels = torch.cat([torch.tensor([low]), torch.arange(low + 1, high + 1)[is_level]]) + zero
        fields = {"edges": edges[is_level], "codes": levels.to(torch.uint8), "zero": zero, "step": step}
        return self.shared(ops.Quantize, place, **fields)

    def shared(self, kind: type[Operation], place: int, **fields: Any) -> int:
        """Append an operation unless the program has it already."""
        new = kind(inputs=(place,), channels=self.stored[place][1], **fields)
        for number, other in enumerate(self.program.operations):
            if type(other) is kind and other.inputs == (place,) and is_same(other, new):
                return number
        return self.add(kind, place, **fields)


def blocks_of(weight: Tensor, stride: Any, padding: Any, dilation: Any, more: Any) -> tuple[Tensor, Window] | None:
    """Return a convolution whose channels, shuffled, are the output of a transposed one; None if none are.

    Output ``stride · q + r`` is the sum of ``in[q − t] · w[r + padding + stride · t]`` over all t that the weight has:
    each r is a channel of its own. The output must have a whole number of blocks of the stride for each input.

    Args:
        weight: (C_out, C / groups, kh, kw); that returned has C_out · stride² outputs.
        stride: as the others, of the transposed convolution.
        padding: which crops.
        dilation: 1.
        more: the output padding.
    """
    block, kernel = stride[0], weight.shape[2:]
    if len({*stride}) > 1 or {*dilation} != {1}:
        return None
    places, sides = list[Tensor](), list[int]()
    for length, pad, added in zip(kernel, padding, more, strict=True):
        beyond = length - block - 2 * pad + added  # a block for each input
        first, last = -((block - 1 + pad) // block), (length - 1 - pad) // block  # t
        sides = [last, beyond // block - first, *sides]
        if beyond % block or min(sides) < 0:
            return None
        taps = torch.arange(block)[:, None] + pad + block * torch.arange(last, first - 1, -1)
        places.append(taps.where((taps >= 0) & (taps < length), length))  # where zeros are
    rows, columns = places
    of_blocks = F.pad(weight, (0, 1, 0, 1))[..., rows[..., None, None], columns].permute(0, 2, 4, 1, 3, 5).flatten(0, 2)
    return of_blocks, Window((rows.shape[1], columns.shape[1]), padding=(sides[0], sides[1], sides[2], sides[3]))


def is_same(one: Operation, other: Operation) -> bool:
    """Whether two operations of a class compute the same from their inputs."""
    return all(is_equal(value, getattr(other, name)) for name, value in vars(one).items() if name != "origin")


def is_equal(one: Any, other: Any) -> bool:
    """Whether two arguments of operations are the same: tensors, numbers, modules by their class, or lists of them."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    if isinstance(one, nn.Module):
        return type(one) is type(other)
    return one == other or (one != one and other != other)  # both are NaN


def pair(value: Any) -> Size:
    """Return two numbers, of one or two."""
    both = (value, value) if isinstance(value, int) else tuple(value)
    return (both[0], both[0]) if len(both) == 1 else both
