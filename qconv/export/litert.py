"""LiteRT (TensorFlow Lite): a program as a .tflite file.

A convolution between codes runs in bytes where LiteRT's kernels give the program's codes (`requantization`). Else codes
are whole floats, convolved with whole weights of 8 bits that LiteRT makes floats when it loads the file: sums are
exact, and kernels that round or clamp otherwise than the program have no part in them. All but uneven levels, padded
pooling and strides of shortcuts are operators of XNNPACK, which runs a file by default; all but uneven levels and
weights of 4 bits, of LiteRT for Microcontrollers. Where outputs are rounded, the network is one of bytes, as LiteRT's
own tools make it.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..ground.checks import check_flags
from ..ground.extras import needed
from ..ground.files import write_file
from ..onnx.integers import Chains, Integers, roundings
from ..onnx.shapes import Shape, shapes_of
from ..program import operations as ops
from ..program.operations import Operation, Program, Quantize, Size, Window
from ..program.plan import EDGES, PRODUCT, form_of
from .requantization import at_once, left_as_floats, requantized

SETTINGS: dict[str, str] = {}
"""What a user must set: nothing."""
_LARGEST, _SMALLEST = torch.finfo(torch.float32).max, torch.finfo(torch.float32).tiny
_METADATA = "qconv"
_NONE, _RELU, _BY_ONE, _RELU6 = range(4)  # activations inside of an operator; by one: from -1 to 1
_How = tuple[float, int]
"""The step and the zero point of a tensor in bytes."""
_CLAMPS = {(0.0, torch.inf): "RELU", (0.0, 6.0): "RELU6"}


def write(
    program: Program, path: Path, images: Tensor, *, four_bits: bool = False, round_outputs: bool = False
) -> list[str]:
    """Write a program as a .tflite file, which takes images (N, H, W, C) of one size; N is 1 until it is resized.

    Args:
        program: the program.
        path: of the file.
        images: typical ones (N, C, H, W), of the size that the file takes; a few hundred with `round_outputs`.
        four_bits: store weights that fit in 4 bits so. LiteRT (2.3.0) convolves by them without XNNPACK: several times
            slower.
        round_outputs: compute the float outputs of layers of codes, and values added to them, in bytes, too, rounded to
            256 numbers over their range with `images`, and convolve in bytes where a code may be off by one. That is
            faster, and can change decisions.

    Returns:
        The layers of codes or signs that multiply floats.

    Raises:
        ImportError: LiteRT is missing: ``pip install "qconv[litert]"``.
        ValueError: the program has a function for which LiteRT has no operator; options that exclude each other.
    """
    check_flags(four_bits=four_bits, round_outputs=round_outputs)
    if four_bits and round_outputs:
        raise ValueError("four_bits and round_outputs exclude each other: convolutions by 4 bits are of floats")
    with needed("export to LiteRT"):
        import flatbuffers
        from ai_edge_litert import schema_py_generated  # noqa: F401
    builder, writer = flatbuffers.Builder(1024), _Writer(program, images, four_bits, round_outputs)
    builder.Finish(writer.model().Pack(builder), b"TFL3")
    write_file(path, bytes(builder.Output()))
    return left_as_floats(program, writer.in_bytes)


def run(path: Path, images: Any, interpreter: str = "xnnpack") -> tuple[list[Any], dict[str, Any]]:
    """Run a file as it ships; then once more for the codes inside of it.

    Args:
        path: of the file.
        images: a numpy array; its codes are as `targets.run` returns them.
        interpreter: LiteRT's with "xnnpack", its default; with the "builtin" kernels alone; or "micro", LiteRT for
            Microcontrollers.
    """
    with needed("running a LiteRT file"):
        import flatbuffers
        from ai_edge_litert import schema_py_generated as schema
    content = path.read_bytes()
    model: Any = schema.ModelT.InitFromPackedBuf(content, 0)
    inner = next((entry.buffer for entry in model.metadata or () if entry.name == _METADATA.encode()), None)
    found, own = {}, _outputs(content, images, interpreter)
    if inner is not None:
        places: dict[str, int] = json.loads(bytes(model.buffers[inner].data))
        model.subgraphs[0].outputs = list(dict.fromkeys([*model.subgraphs[0].outputs, *places.values()]))
        builder = flatbuffers.Builder(1024)
        builder.Finish(model.Pack(builder), b"TFL3")
        shown = _outputs(bytes(builder.Output()), images, interpreter)
        values = dict(zip(model.subgraphs[0].outputs, shown, strict=True))
        for name, place in places.items():
            tensor, value = model.subgraphs[0].tensors[place], values[place]
            in_bytes = tensor.type == schema.TensorType.INT8
            found[name] = value.astype("float32") - tensor.quantization.zeroPoint[0] if in_bytes else value
    return own, found


def _outputs(content: bytes, images: Any, interpreter: str) -> list[Any]:
    """Return the outputs of a file, channels first."""
    images = images.transpose(0, 2, 3, 1)
    outputs = _in_micro(content, images) if interpreter == "micro" else _in_litert(content, images, interpreter)
    return [output.transpose(0, 3, 1, 2) if output.ndim == 4 else output for output in outputs]


def _in_litert(content: bytes, images: Any, interpreter: str) -> list[Any]:
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    kernels = OpResolverType.AUTO if interpreter == "xnnpack" else OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    threads = torch.get_num_threads()
    runner = Interpreter(model_content=content, num_threads=threads, experimental_op_resolver_type=kernels)
    (given,) = runner.get_input_details()
    runner.resize_tensor_input(given["index"], images.shape)
    runner.allocate_tensors()
    runner.set_tensor(given["index"], images)
    runner.invoke()
    return [runner.get_tensor(detail["index"]) for detail in runner.get_output_details()]


def _in_micro(content: bytes, images: Any) -> list[Any]:
    """Image by image: its tensors have the sizes of the file."""
    import numpy as np
    from ai_edge_litert import schema_py_generated as schema

    with needed("LiteRT for Microcontrollers"):
        from tflite_micro import runtime
    model: Any = schema.ModelT.InitFromPackedBuf(content, 0)
    (graph,) = model.subgraphs
    wanted = tuple(map(int, graph.tensors[graph.inputs[0]].shape[1:]))
    if images.shape[1:] != wanted:
        raise ValueError(f"the file takes images (height, width, channels) of {wanted}, not {images.shape[1:]}")
    most = sum(4 * math.prod(tensor.shape) + 1024 for tensor in graph.tensors)  # bytes, with what describes them
    try:
        runner = runtime.Interpreter.from_bytes(content, arena_size=most)
    except RuntimeError as error:
        raise ValueError(
            f"LiteRT for Microcontrollers can't run the file; its lines above name the operator: {error}"
        ) from error
    rows = []
    for image in images:
        runner.set_input(np.ascontiguousarray(image[None]), 0)
        runner.invoke()
        rows.append([runner.get_output(place) for place in range(len(graph.outputs))])
    return [np.concatenate(values) for values in zip(*rows, strict=True)]


class _Writer:
    def __init__(self, program: Program, images: Tensor, four_bits: bool = False, round_outputs: bool = False) -> None:
        from ai_edge_litert import schema_py_generated as schema

        self.schema: Any = schema
        self.program, self.four_bits = program, four_bits
        self.shapes = shapes_of(program, images)
        self.chains, self.rounded = Chains(program), dict[int, _How]()
        self.in_bytes, self.quantized = dict[int, Integers](), dict[int, _How]()
        if round_outputs:
            found = roundings(program, images, self.chains, signed=False)
            self.rounded = {place: (step, zero - 128) for place, (step, zero) in found.items()}
            self.in_bytes = requantized(program, found)
            self.quantized = at_once(program, self.in_bytes)
        elif not four_bits:
            self.in_bytes = requantized(program)
        self.buffers: list[Any] = [schema.BufferT()]
        self.tensors: list[Any] = []
        self.operators: list[Any] = []
        self.kinds: dict[tuple[str, int], int] = {}
        self.values: list[int] = []
        self.bytes, self.in_floats = dict[int, int](), dict[int, int]()
        self.moved = dict[tuple[int, tuple[int, ...]], int]()
        self.origin = ""

    def model(self) -> Any:
        schema, inner, in_bytes = self.schema, {}, self.in_bytes
        sums = {place: at for place in self.rounded if (at := self._sum(place)) is not None}
        inside = {place for found in in_bytes.values() for place in found.chain}
        inside |= {at for place, at in sums.items() if at != place}
        for number, operation in enumerate(self.program.operations):
            self.origin = operation.origin
            if number in in_bytes:
                self.values.append(self._conv_in_bytes(in_bytes[number], self.rounded.get(number)))
            elif number in inside:
                self.values.append(-1)
            elif number in sums:
                terms = [self.values[place] for place in self.program.operations[sums[number]].inputs]
                options, how = schema.AddOptionsT(), self.rounded[number]
                self.values.append(self.add("ADD", terms, self._size(number), options, version=2, how=how))
            elif isinstance(operation, ops.Take) and self._keeps_step(operation, number):
                self.values.append(self._take(operation, self._size(number), self.values[operation.inputs[0]]))
            else:
                given = [self._as_floats(self.values[place]) for place in operation.inputs]
                if number in self.quantized:
                    value = self._cut(operation, *given)
                else:
                    value = self._written(operation, self._size(number), *given)
                how = self.quantized.get(number) or self.rounded.get(number)
                self.values.append(self._rounded(value, how) if how else value)
                if isinstance(operation, Quantize | ops.Sign):
                    inner[f"{number}.input"] = given[0]
            if isinstance(operation, Quantize | ops.Sign):
                inner[f"{number}.codes"] = self.values[-1]
        of_outputs = zip(self.program.names(), self.program.outputs, self.program.ranks, strict=True)
        outputs = [self._output(*each) for each in of_outputs]
        read = {*outputs, *inner.values()}
        for operator in reversed(self.operators):
            read |= {*operator.inputs} if operator.outputs[0] in read else set()
        operators = [each for each in self.operators if each.outputs[0] in read]
        graph, model, told = schema.SubGraphT(), schema.ModelT(), schema.MetadataT()
        graph.name, graph.tensors, graph.operators = "main", self.tensors, operators
        graph.inputs, graph.outputs = [0], outputs  # the first tensor, before it is rounded
        told.name, told.buffer = _METADATA, self._buffer(json.dumps(inner).encode())
        model.version, model.description, model.metadata = 3, "qconv", [told]
        model.subgraphs, model.buffers, model.operatorCodes = [graph], self.buffers, [*map(self._code, self.kinds)]
        return model

    def _output(self, name: str, place: int, rank: int) -> int:
        """Return the tensor of an output, which gets its name; one of two dimensions loses height and width."""
        output = self._as_floats(self.values[place])
        if rank == 2:
            shape, options = [-1, self.program.operations[place].channels], self.schema.ReshapeOptionsT()
            options.newShape = shape
            output = self.add("RESHAPE", [output, self.whole(shape)], [1, shape[1]], options)
        self.tensors[output].name = name
        return output

    def _code(self, kind: tuple[str, int]) -> Any:
        code = self.schema.OperatorCodeT()
        code.builtinCode, code.version = getattr(self.schema.BuiltinOperator, kind[0]), kind[1]
        code.deprecatedBuiltinCode = min(code.builtinCode, 127)
        return code

    def _keeps_step(self, take: ops.Take, place: int) -> bool:
        return self.rounded.get(place, 0) == self.rounded.get(take.inputs[0])

    def _sum(self, place: int) -> int | None:
        """Return the place of a sum of rounded values that alone becomes the value of a place, its ReLU or the same."""
        operations = self.program.operations
        operation: Any = operations[place]
        if isinstance(operation, ops.Clamp) and (operation.low, operation.high) == (0, math.inf):
            place = place if self.chains.next(operation.inputs[0], ops.Clamp) != place else operation.inputs[0]
        is_sum = isinstance(operations[place], ops.Add) and {*operations[place].inputs} <= self.rounded.keys()
        return place if is_sum else None

    def _cut(self, quantize: Any, x: int) -> int:
        """Floats that the smallest byte or this clamp cuts below: of bytes, XNNPACK rounds the ratio of both steps."""
        low, high = quantize.ends
        return self.clamped(x, low * quantize.step, math.inf) if high - low < 255 else x

    def _rounded(self, x: int, how: _How) -> int:
        """The numbers of a tensor in bytes, with a step and a zero point."""
        return self.add("QUANTIZE", [x], self.shape(x), self.schema.QuantizeOptionsT(), how=how)

    def _size(self, place: int) -> list[int]:
        return [1, *self.shapes[place][2:], self.program.operations[place].channels]

    def _written(self, operation: Operation, shape: list[int], *given: int) -> int:
        """Add the operators of an operation; return the tensor of its value. Codes are less their zero."""
        x, *others = (*given, -1)
        match operation:
            case ops.Input():
                return self._tensor(shape)
            case ops.ConvBits() | ops.ConvCodes() | ops.ConvFloats():
                return self._conv(operation, x)
            case ops.Affine():
                scaled = x if bool((operation.scale == 1).all()) else self._binary("MUL", x, operation.scale)
                return scaled if not bool(operation.bias.any()) else self._binary("ADD", scaled, operation.bias)
            case ops.Add():
                return self._binary("ADD", x, others[0])
            case ops.Multiply():
                return self._binary("MUL", x, others[0])
            case ops.PReLU():
                return self.add("PRELU", [x, self.floats(operation.slope.view(1, 1, -1))], shape)
            case ops.Clamp():
                return self.clamped(x, operation.low, operation.high)
            case Quantize():
                return self._quantize(operation, x)
            case ops.Sign():
                return self._sign(operation.edge, x)
            case ops.Take():
                return self._take(operation, shape, x)
            case ops.Select():
                options = self.schema.GatherOptionsT()
                options.axis = 3
                return self.add("GATHER", [x, self.whole(operation.index.tolist())], shape, options)
            case ops.Bilinear():
                options = self.schema.ResizeBilinearOptionsT()
                options.alignCorners, options.halfPixelCenters = operation.align_corners, not operation.align_corners
                return self.add("RESIZE_BILINEAR", [x, self.whole(shape[1:3])], shape, options)
            case ops.Repeat():
                options = self.schema.ResizeNearestNeighborOptionsT()
                return self.add("RESIZE_NEAREST_NEIGHBOR", [x, self.whole(shape[1:3])], shape, options)
            case ops.Shuffle():  # LiteRT has the places in a block before the channels
                order = torch.arange(self.shape(x)[3]).view(-1, operation.times**2).t().flatten().tolist()
                options, gather = self.schema.DepthToSpaceOptionsT(), self.schema.GatherOptionsT()
                options.blockSize, gather.axis = operation.times, 3
                return self.add(
                    "DEPTH_TO_SPACE",
                    [self.add("GATHER", [x, self.whole(order)], self.shape(x), gather)],
                    shape,
                    options,
                )
            case ops.GELU():
                return self.add("GELU", [x], shape, self.schema.GeluOptionsT())
            case ops.Sigmoid():
                curve = self.add("LOGISTIC", [x], shape)
                return self._binary("MUL", x, curve) if isinstance(operation, ops.SiLU) else curve
            case ops.Average() | ops.Maximum():
                return self._pool(operation, shape, x)
            case ops.Mean():
                return self._mean(x, [1, 2], shape)
            case ops.LayerNorm():
                one = [*shape[:3], 1]
                rest = self._binary("SUB", x, self._mean(x, [3], one))
                variance = self._mean(self._binary("MUL", rest, rest), [3], one)
                root = self.add("SQRT", [self._binary("ADD", variance, torch.tensor([operation.eps]))], one)
                return self._binary("DIV", rest, root)
            case ops.Function():
                return self._function(operation, given)
        raise ValueError(f"'{operation.origin}': {type(operation).__name__} can't be written for LiteRT")

    def _function(self, function: ops.Function, given: Sequence[int]) -> int:
        """A function of torch, which takes images with channels first unless it computes number by number."""
        with needed("export of other functions to LiteRT"):
            from .litert_functions import write_function
        shapes = [self.shapes[place] for place in function.inputs]
        constants = [each for each in tree_leaves((function.arguments, function.named)) if isinstance(each, Tensor)]
        is_pointwise = torch.Tag.pointwise in getattr(function.function, "tags", ())
        if is_pointwise and not any(each.ndim for each in constants) and all(len(shape) == 4 for shape in shapes):
            shapes = [Shape(*([each[0], *each[2:], each[1]] for each in (shape, shape.of_three))) for shape in shapes]
            return write_function(self, function, given, shapes, self.shapes[0])
        given = [self.turned(x, (0, 3, 1, 2)) for x in given]
        return self.turned(write_function(self, function, given, shapes, self.shapes[0]), (0, 2, 3, 1))

    def turned(self, x: int, order: tuple[int, ...]) -> int:
        """Move the dimensions of images; back again is the tensor before, and what nobody reads is not written."""
        if len(self.shape(x)) != 4:
            return x
        if (x, order) not in self.moved:
            shape = [self.shape(x)[place] for place in order]
            turned = self.add("TRANSPOSE", [x, self.whole(order)], shape, self.schema.TransposeOptionsT())
            self.moved[x, order], self.moved[turned, tuple(map(order.index, range(4)))] = turned, x
        return self.moved[x, order]

    def _conv(self, conv: Any, x: int) -> int:
        coder: Any = self.program.operations[conv.inputs[0]]
        if isinstance(conv, ops.ConvCodes) and conv.zero != coder.zero:
            x = self._binary("ADD", x, torch.tensor(float(coder.zero - conv.zero)))
        filters, steps = self._weight(conv)
        bias = self.floats(torch.zeros(conv.channels))
        sums = self._convolved(conv, x, filters, bias, float(getattr(conv, "pad_value", 0)))
        return sums if bool((steps == 1).all()) else self._binary("MUL", sums, steps)

    def _conv_in_bytes(self, found: Integers, how: _How | None) -> int:
        """A convolution of bytes with what follows it, up to codes or signs and a maximum of these, or to numbers."""
        conv: Any = self.program.operations[found.chain[0]]
        low, high = ops.Sign.ends if found.ends is None else found.ends
        activation = _NONE if how else _BY_ONE if found.ends is None else _RELU if low == 0 else _NONE
        step, zero = how or (1.0, 0 if found.ends is None else 127 - high)
        x = self._as_bytes(conv.inputs[0])
        weight, axis = found.weight.to(torch.int8).permute(self._order(conv)), 3 if self._is_depthwise(conv) else 0
        scales = (found.scale * step / self._how(x)[0]).tolist()
        filters = self._scaled(self._tensor(weight.shape, "INT8", weight), scales, axis=axis)
        of_bias = (found.scale * step).tolist()
        bias = self._scaled(self._tensor(found.bias.shape, "INT32", found.bias.int()), of_bias)
        codes = self._convolved(conv, x, filters, bias, 0.0, activation, (step, zero))
        pool: Any = self.program.operations[found.chain[-1]]
        if not isinstance(pool, ops.Maximum):
            return codes
        height, width = self.shape(codes)[1:3]
        is_below = low < 0 and any(pool.window.reached((height, width)))  # bytes are padded by the code 0
        shape = self._size(found.chain[-1])
        return self._pool(pool, shape, self._as_floats(codes) if is_below else codes)

    def _convolved(
        self,
        conv: Any,
        x: int,
        filters: int,
        bias: int,
        pad_value: float,
        activation: int = _NONE,
        how: _How | None = None,
    ) -> int:
        """Sums as floats, or as bytes."""
        window, is_depthwise = conv.window, self._is_depthwise(conv)
        height, width = self.shape(x)[1:3]
        is_same = _is_same(window, (height, width)) and not pad_value
        shape = [1, *conv.size((height, width)), conv.channels]
        if not is_same:
            x = self._padded(x, window.padding, pad_value)
        options: Any = self.schema.DepthwiseConv2DOptionsT() if is_depthwise else self.schema.Conv2DOptionsT()
        self._windowed(options, window, is_same)
        options.dilationHFactor, options.dilationWFactor = window.dilation
        options.fusedActivationFunction = activation
        if is_depthwise:
            options.depthMultiplier = conv.channels // self.shape(x)[3]
        name = "DEPTHWISE_CONV_2D" if is_depthwise else "CONV_2D"
        return self.add(name, [x, filters, bias], shape, options, version=1 if how is None else 3, how=how)

    def _is_depthwise(self, conv: Any) -> bool:
        return conv.groups == self.program.operations[conv.inputs[0]].channels > 1

    def _order(self, conv: Any) -> tuple[int, ...]:
        return (1, 2, 3, 0) if self._is_depthwise(conv) else (0, 2, 3, 1)

    def _as_bytes(self, place: int) -> int:
        """The codes of a place as bytes, with a zero by which the largest byte is the highest code."""
        x = self.values[place]
        if self._how(x) is None and x not in self.bytes:
            coder: Any = self.program.operations[place]
            low, high = coder.ends
            self.bytes[x] = self._rounded(x, (1.0, 127 - high if low + high else 0))
        return self.bytes.get(x, x)

    def _as_floats(self, x: int) -> int:
        if self._how(x) is not None and x not in self.in_floats:
            options = self.schema.DequantizeOptionsT()
            self.in_floats[x] = self.add("DEQUANTIZE", [x], self.shape(x), options, version=2)
        return self.in_floats.get(x, x)

    def _how(self, x: int) -> Any:
        """The step and the zero point of a tensor in bytes."""
        told = self.tensors[x].quantization
        return (told.scale[0], told.zeroPoint[0]) if self.tensors[x].type == self.schema.TensorType.INT8 else None

    def _scaled(self, tensor: int, scales: list[float], zero: int = 0, axis: int = 0) -> int:
        quantization = self.schema.QuantizationParametersT()
        quantization.scale, quantization.zeroPoint = scales, [zero] * len(scales)
        quantization.quantizedDimension = axis
        self.tensors[tensor].quantization = quantization
        return tensor

    def _windowed(self, options: Any, window: Window, is_same: bool) -> None:
        padding = self.schema.Padding
        options.padding = padding.SAME if is_same else padding.VALID
        options.strideH, options.strideW = window.stride

    def _weight(self, conv: Any) -> tuple[int, Tensor]:
        """Weights of 8 or 4 bits, which LiteRT makes floats, and the step of each filter; else floats, and ones.

        The steps follow the convolution, since microcontrollers take the first filter's for all.
        """
        steps, order = torch.ones(len(conv.weight), 1), self._order(conv)
        weight = conv.weight.flatten(1).float()
        if isinstance(conv, ops.ConvFloats):
            steps = weight.abs().where(weight != 0, torch.inf).amin(1, keepdim=True)
            steps = steps.where(steps.isfinite(), 1.0)
        codes = (weight / steps).round()
        if int(codes.min()) < -128 or int(codes.max()) > 127 or not torch.equal(codes * steps, weight):
            return self.floats(conv.weight.permute(order)), torch.ones(1)
        is_small = self.four_bits and int(codes.min()) >= -8 and int(codes.max()) <= 7
        shape = [conv.weight.shape[place] for place in order]
        codes = codes.view(conv.weight.shape).permute(order).flatten().to(torch.int8)
        if is_small:
            pairs = torch.cat([codes, codes.new_zeros(len(codes) % 2)]).view(-1, 2) & 15
            codes = (pairs[:, 0] | (pairs[:, 1] << 4)).to(torch.uint8)
        stored = self._scaled(self._tensor(shape, "INT4" if is_small else "INT8", codes), [1.0])
        weight = self.add("DEQUANTIZE", [stored], shape, self.schema.DequantizeOptionsT(), version=2)
        return weight, steps.flatten()

    def clamped(self, x: int, low: float, high: float) -> int:
        if (low, high) in _CLAMPS:
            return self.add(_CLAMPS[low, high], [x], self.shape(x))
        if (low, high) == (-1, 1):
            return self._binary("MUL", x, torch.tensor(1.0), _BY_ONE)
        for name, end in (("MAXIMUM", low), ("MINIMUM", high)):
            if abs(end) <= _LARGEST:
                given = [x, self.floats(torch.tensor(end))]
                x = self.add(name, given, self.shape(x), self.schema.MaximumMinimumOptionsT())
        return x

    def _quantize(self, quantize: Quantize, x: int) -> int:
        low, high = quantize.ends
        form, factor = form_of(quantize)
        if form == EDGES:
            options = self.schema.BucketizeOptionsT()
            options.boundaries = quantize.edges.tolist()
            places = self.add("BUCKETIZE", [x], self.shape(x), options, kind="INT32")
            codes = self.floats(quantize.codes.float() - quantize.zero)
            return self.add("GATHER", [codes, places], self.shape(x), self.schema.GatherOptionsT())
        activation = _RELU if low == 0 else _NONE
        scaled = self._binary("MUL" if form == PRODUCT else "DIV", x, torch.tensor(factor), activation)
        within = self.clamped(scaled, -torch.inf if low == 0 else float(low), float(high))
        return self.add("ROUND", [within], self.shape(x))

    def _sign(self, edge: Tensor, x: int) -> int:
        """The sign of a difference, which is exact: huge or 0 by a product, between -1 and 1, and half a step on."""
        edge = torch.where(edge.abs() < _SMALLEST, (edge > 0) * _SMALLEST, edge)  # XNNPACK takes denormals as 0
        if bool(edge.any()):
            x = self._binary("ADD", x, -edge)
        x = self._binary("MUL", x, torch.tensor(_LARGEST), _BY_ONE)
        return self._binary("MUL", self._binary("ADD", x, torch.tensor(0.5)), torch.tensor(4.0), _BY_ONE)

    def _take(self, take: ops.Take, shape: list[int], x: int) -> int:
        if take.stride != (1, 1):
            options, how = self.schema.StridedSliceOptionsT(), self._how(x)
            options.beginMask = options.endMask = 15
            whole = [self.whole(ends) for ends in ([0] * 4, [0] * 4, [1, *take.stride, 1])]
            version = 2 if how else 1
            x = self.add(
                "STRIDED_SLICE", [x, *whole], [*shape[:3], self.shape(x)[3]], options, version=version, how=how
            )
        return self._padded(x, channels=(take.first, take.channels - take.first - self.shape(x)[3]))

    def _pool(self, pool: Any, shape: list[int], x: int) -> int:
        size = self.shape(x)[1], self.shape(x)[2]
        padding, is_average = pool.window.reached(size), isinstance(pool, ops.Average)
        options = self.schema.Pool2DOptionsT()
        self._windowed(options, pool.window, False)
        options.filterHeight, options.filterWidth = pool.window.kernel
        how = self._how(x)
        x = self._padded(x, padding, 0.0 if is_average or how else -_LARGEST)
        name, version = "AVERAGE_POOL_2D" if is_average else "MAX_POOL_2D", 2 if how else 1
        pooled = self.add(name, [x], shape, options, version=version, how=how)
        if not is_average or not any(padding):
            return pooled
        inside = ops.Average(inputs=(0,), channels=1, window=pool.window._replace(padding=(0, 0, 0, 0), ceil=False))
        ones = torch.nn.functional.pad(torch.ones(1, 1, *size), padding)
        return self._binary("DIV", pooled, inside.run(ones).view(1, shape[1], shape[2], 1))

    def _padded(
        self, x: int, sides: tuple[int, ...] = (0, 0, 0, 0), value: float = 0.0, channels: tuple[int, int] = (0, 0)
    ) -> int:
        """Pad by a value: XNNPACK pads by 0."""
        left, right, top, bottom = sides
        pads = [(0, 0), (top, bottom), (left, right), channels]
        if not any(map(any, pads)):
            return x
        shape = [side + sum(ends) for side, ends in zip(self.shape(x), pads, strict=True)]
        if abs(value) == 1:  # of a sign
            zeros = self.add("PAD", [self._binary("ADD", x, torch.tensor(-value)), self.whole(pads)], shape)
            return self._binary("ADD", zeros, torch.tensor(value))
        more, how = [self.floats(torch.tensor(value))] if value else [], self._how(x)
        version = 2 if how else 1
        return self.add("PADV2" if value else "PAD", [x, self.whole(pads), *more], shape, version=version, how=how)

    def _mean(self, x: int, axes: list[int], shape: list[int]) -> int:
        options = self.schema.ReducerOptionsT()
        options.keepDims = True
        return self.add("MEAN", [x, self.whole(axes)], shape, options)

    def _binary(self, name: str, x: int, other: int | Tensor, activation: int = _NONE) -> int:
        options = getattr(self.schema, f"{name.title()}OptionsT")()
        options.fusedActivationFunction = activation
        other = self.floats(other) if isinstance(other, Tensor) else other
        return self.add(name, [x, other], self.shape(x), options)

    def add(
        self,
        name: str,
        given: list[int],
        shape: Any,
        options: Any = None,
        kind: str = "FLOAT32",
        version: int = 1,
        how: _How | None = None,
    ) -> int:
        """Add an operator; return the tensor of its result: bytes, if they have a step and a zero point."""
        operator, result = self.schema.OperatorT(), self._tensor(shape, "INT8" if how else kind)
        if how:
            self._scaled(result, [how[0]], how[1])
        operator.opcodeIndex = self.kinds.setdefault((name, version), len(self.kinds))
        operator.inputs, operator.outputs = given, [result]
        if options is not None:
            kind_of_options = type(options).__name__.removesuffix("T")
            operator.builtinOptions = options
            operator.builtinOptionsType = getattr(self.schema.BuiltinOptions, kind_of_options)
        self.operators.append(operator)
        return result

    def shape(self, tensor: int) -> list[int]:
        return self.tensors[tensor].shape

    def floats(self, values: Tensor) -> int:
        return self._tensor(values.shape, "FLOAT32", values.float())

    def whole(self, values: Any) -> int:
        numbers = torch.tensor(values, dtype=torch.int32)
        return self._tensor(numbers.shape, "INT32", numbers)

    def _tensor(self, shape: Any, kind: str = "FLOAT32", values: Tensor | None = None) -> int:
        """Add a tensor, which is constant if it has values; return its number."""
        tensor = self.schema.TensorT()
        tensor.shape, tensor.type = [int(side) for side in shape], getattr(self.schema.TensorType, kind)
        tensor.name = f"{len(self.tensors)} {self.origin}"
        tensor.buffer = 0 if values is None else self._buffer(values.detach().contiguous().numpy().tobytes())
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def _buffer(self, content: bytes) -> int:
        import numpy as np

        buffer = self.schema.BufferT()
        buffer.data = np.frombuffer(content, np.uint8)
        self.buffers.append(buffer)
        return len(self.buffers) - 1


def _is_same(window: Window, size: Size) -> bool:
    """Whether TensorFlow's own padding for this size is that of the window."""
    left, right, top, bottom = window.padding
    for axis, ends in ((0, (top, bottom)), (1, (left, right))):
        stride, reach = window.stride[axis], window.dilation[axis] * (window.kernel[axis] - 1) + 1
        total = max((-(-size[axis] // stride) - 1) * stride + reach - size[axis], 0)
        if ends != (total // 2, total - total // 2):
            return False
    return True
