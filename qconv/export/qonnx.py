"""QONNX: a program as an ONNX file with the operators Quant and BipolarQuant, as FINN and hls4ml read it.

Scales stand in nodes of their own, in the program's order of rounding: each Quant has the scale 1, so convolutions add
whole numbers, which is exact. What FINN asks for: each Quant without negative codes has a ReLU of its
own, which FINN takes away with it; a clamp that no code of a quantizer depends on is left out, so that batch norm folds
into thresholds; pooling says its pads.
"""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..ground.extras import needed
from ..ground.files import write_file
from ..program import operations as ops
from ..program.operations import Clamp, Operation, Program, Quantize, Sign, Size
from ..program.plan import EDGES, QUOTIENT, form_of

_DOMAIN = "qonnx.custom_op.general"
_OPSET, _IR = 17, 9  # which FINN and hls4ml read
_FLAT = "flat"  # in the metadata: whether the output loses its height and width, which hls4ml can't stream


def write(program: Program, path: Path, images: Tensor) -> None:
    """Write a program as a QONNX file for one image, as FINN and hls4ml take it: (1, C, H, W), outputs, too.

    Args:
        program: the program.
        path: of the file.
        images: some of the size that the file takes.

    Raises:
        ImportError: onnx is missing: ``pip install "qconv[qonnx]"``.
        ValueError: a quantizer's levels are uneven, or QONNX has no operator for an operation.
    """
    with needed("export to QONNX"):
        import onnx  # noqa: F401
    write_file(path, _Writer(program, (images.shape[2], images.shape[3])).model().SerializeToString())


def run(path: Path, images: Any) -> dict[str, Any]:
    """Run a file in QONNX's own executor.

    `images` is a numpy array; its codes are as `targets.run` returns them.
    """
    with needed("running a QONNX file"):
        import numpy
        import onnx
        from qonnx.core.modelwrapper import ModelWrapper
        from qonnx.core.onnx_exec import execute_onnx
        from qonnx.transformation.infer_shapes import InferShapes
    content = onnx.load(path)
    inner = {entry.key: entry.value for entry in content.metadata_props}
    is_flat = inner.pop(_FLAT) == str(True)
    model: Any = ModelWrapper(content).transform(InferShapes())
    found: dict[str, list[Any]] = {name: [] for name in ("", *inner)}
    for image in images:
        values = execute_onnx(model, {"input": image[None]}, return_full_exec_context=True)
        for name, of_images in found.items():
            of_images.append(values[inner[name] if name else "output"])
    values = {name: numpy.concatenate(of_images) for name, of_images in found.items()}
    return values | {"": values[""].reshape(len(images), -1) if is_flat else values[""]}


def _without_idle_clamps(program: Program) -> list[Operation]:
    """Return the operations, where quantizers read what is before a clamp that none of their codes depends on."""
    found: list[Operation] = []
    for operation in program.operations:
        if isinstance(operation, Quantize | Sign):
            edges = operation.edges if isinstance(operation, Quantize) else operation.edge
            while isinstance(clamp := found[operation.inputs[0]], Clamp):
                if not bool(((clamp.low < edges) & (edges <= clamp.high)).all()):
                    break
                operation = replace(operation, inputs=clamp.inputs)
        found.append(operation)
    return found


class _Writer:
    def __init__(self, program: Program, size: Size) -> None:
        from onnx import helper, numpy_helper

        self.helper, self.numpy_helper = helper, numpy_helper
        self.program, self.sizes = program, program.sizes(size)
        self.operations = _without_idle_clamps(program)
        self.nodes: list[Any] = []
        self.constants: list[Any] = []
        self.inner: dict[str, str] = {}
        self.origin = ""

    def model(self) -> Any:
        needed_ones = {self.program.output}
        for number in range(self.program.output, 0, -1):
            needed_ones |= {*self.operations[number].inputs} if number in needed_ones else set()
        for number in sorted(needed_ones - {0}):
            operation = self.operations[number]
            self.origin = operation.origin
            given = [self._name(place) for place in operation.inputs]
            self._written(operation, self._name(number), given)
            if isinstance(operation, Quantize | Sign):
                self.inner |= {f"{number}.input": given[0], f"{number}.codes": self._name(number)}
        last = self.program.output
        helper = self.helper
        ends = [
            [helper.make_tensor_value_info(name, 1, of)]
            for name, of in (("input", self._shape(0)), ("output", self._shape(last)))
        ]
        graph = helper.make_graph(self.nodes, "qconv", *ends, self.constants)
        domains = [helper.make_opsetid("", _OPSET), helper.make_opsetid(_DOMAIN, 1)]
        model = helper.make_model(graph, opset_imports=domains, producer_name="qconv", ir_version=_IR)
        helper.set_model_props(model, self.inner | {_FLAT: str(self.program.ranks[0] == 2)})
        return model

    def _written(self, operation: Operation, name: str, given: list[str]) -> None:
        """Add the nodes of an operation; the last gives the value `name`."""
        match operation:
            case ops.ConvBits() | ops.ConvCodes() | ops.ConvFloats():
                self._conv(operation, name, given)
            case ops.Affine():
                self._affine(given[0], name, operation.scale, operation.bias)
            case ops.Add():
                self._add("Add", given, name)
            case ops.Multiply():
                self._add("Mul", given, name)
            case ops.PReLU():
                self._add("PRelu", [*given, self._constant(f"{name}_slope", operation.slope.view(-1, 1, 1))], name)
            case Clamp() if (operation.low, operation.high) == (0, torch.inf):
                self._add("Relu", given, name)
            case Clamp():
                self._clip(given[0], name, operation.low, operation.high)
            case Quantize():
                self._quantize(operation, name, given[0])
            case Sign():
                # FINN wants a node of numbers before it, and folds it into the threshold.
                shifted = self._affine(given[0], f"{name}_shifted", torch.ones_like(operation.edge), -operation.edge)
                self._bipolar(shifted, name)
            case ops.Take():
                self._take(operation, name, given[0])
            case ops.Select():
                self._add("Gather", [*given, self._whole(f"{name}_index", operation.index.tolist())], name, axis=1)
            case ops.Repeat():
                scales = self._constant(f"{name}_scales", torch.tensor([1.0, 1.0, *operation.times]))
                self._add("Resize", [*given, "", scales], name, **operation.resize)
            case ops.Shuffle():
                self._add("DepthToSpace", given, name, blocksize=operation.times, mode="CRD")
            case ops.GELU():
                root = self._constant(f"{name}_root", torch.tensor(math.sqrt(0.5)))
                half = self._constant(f"{name}_half", torch.tensor(0.5))
                erf = self._add("Erf", [self._add("Mul", [*given, root], f"{name}_inner")], f"{name}_erf")
                shifted = self._add("Add", [self._add("Mul", [erf, half], f"{name}_scaled"), half], f"{name}_gate")
                self._add("Mul", [*given, shifted], name)
            case ops.SiLU():
                self._add("Mul", [*given, self._add("Sigmoid", given, f"{name}_sigmoid")], name)
            case ops.Sigmoid():
                self._add("Sigmoid", given, name)
            case ops.Average() | ops.Maximum():
                self._pool(operation, name, given)
            case ops.LayerNorm():
                (x,), eps = given, self._constant(f"{name}_eps", torch.tensor(operation.eps))
                rest = self._add("Sub", [x, self._add("ReduceMean", [x], f"{name}_mean", axes=[1])], f"{name}_rest")
                square = self._add("Mul", [rest, rest], f"{name}_square")
                variance = self._add("ReduceMean", [square], f"{name}_variance", axes=[1])
                root = self._add("Sqrt", [self._add("Add", [variance, eps], f"{name}_shifted")], f"{name}_root")
                self._add("Div", [rest, root], name)
            case ops.Mean():
                self._add("GlobalAveragePool", given, name)
            case _:
                what = getattr(operation, "function", type(operation).__name__)
                raise ValueError(f"'{operation.origin}': {what} can't be written for QONNX")

    def _conv(self, conv: Any, name: str, given: list[str]) -> None:
        (x,), weight = given, self._constant(f"{name}_weight", conv.weight)
        left, right, top, bottom = conv.window.padding
        if isinstance(conv, ops.ConvBits):
            weight = self._bipolar(weight, f"{name}_weight_q")
            if conv.pad_value and any(conv.window.padding):
                x = self._padded(x, f"{name}_padded", [0, 0, top, left, 0, 0, bottom, right], conv.pad_value)
                left = right = top = bottom = 0
        elif isinstance(conv, ops.ConvCodes):
            if bool((conv.weight.abs() == 1).all()):
                weight = self._bipolar(weight, f"{name}_weight_q")
            else:
                low, high = int(conv.weight.min()), int(conv.weight.max())
                weight = self._quant(weight, f"{name}_weight_q", min(low, -1), max(high, 1))
        window: dict[str, Any] = {"kernel_shape": conv.window.kernel, "strides": conv.window.stride}
        window |= {"dilations": conv.window.dilation, "pads": [top, left, bottom, right], "group": conv.groups}
        self._add("Conv", [x, weight], name, **window)

    def _affine(self, x: str, name: str, scale: Tensor, bias: Tensor) -> str:
        """Batch norm, because hls4ml refuses a product with a number for each channel."""
        zeros, ones = torch.zeros_like(scale), torch.ones_like(scale)
        numbers = {"scale": scale, "bias": bias, "mean": zeros, "variance": ones}
        given = [x, *(self._constant(f"{name}_{key}", of_channels) for key, of_channels in numbers.items())]
        return self._add("BatchNormalization", given, name, epsilon=0.0)

    def _quantize(self, quantize: Quantize, name: str, x: str) -> None:
        low, high = quantize.ends
        form, factor = form_of(quantize, low, high)
        if form == EDGES:
            raise ValueError(f"'{quantize.origin}': its levels are uneven, and QONNX's Quant has even ones alone")
        if factor != 1:
            factor = self._constant(f"{name}_step", torch.tensor(factor))
            x = self._add("Div" if form == QUOTIENT else "Mul", [x, factor], f"{name}_scaled")
        half, bits = _half_and_bits(low, high)
        if (low, high) not in ((0, (1 << bits) - 1), (-half, half - 1), (1 - half, half - 1)):
            x = self._clip(x, f"{name}_clipped", low, high)
        if low == 0:
            x = self._add("Relu", [x], f"{name}_relu")
        self._quant(x, name, low, high)

    def _quant(self, x: str, name: str, low: int, high: int) -> str:
        """Whole numbers in the fewest bits, without a zero point: QONNX would add it before it rounds."""
        half, bits = _half_and_bits(low, high)
        given = [x]
        for key, number in (("one", 1.0), ("zero", 0.0), ("bits", bits)):
            given.append(self._constant(f"{name}_{key}", torch.tensor(float(number))))
        how = {"signed": int(low < 0), "narrow": int(0 < -low < half), "rounding_mode": "ROUND"}
        return self._add("Quant", given, name, _DOMAIN, **how)

    def _bipolar(self, x: str, name: str) -> str:
        return self._add("BipolarQuant", [x, self._constant(f"{name}_one", torch.tensor(1.0))], name, _DOMAIN)

    def _take(self, take: ops.Take, name: str, x: str) -> None:
        rest = take.channels - take.first - self.operations[take.inputs[0]].channels
        if take.stride != (1, 1):
            numbers = {"starts": (0, 0), "ends": (2**31 - 1,) * 2, "axes": (2, 3), "steps": take.stride}
            given = [x, *(self._whole(f"{name}_{key}", number) for key, number in numbers.items())]
            x = self._add("Slice", given, f"{name}_strided")
        self._padded(x, name, [0, take.first, 0, 0, 0, rest, 0, 0], 0.0)

    def _pool(self, pool: Any, name: str, given: list[str]) -> None:
        left, right, top, bottom = pool.window.reached(self.sizes[pool.inputs[0]])
        window = {"kernel_shape": pool.window.kernel, "strides": pool.window.stride, "pads": [top, left, bottom, right]}
        if isinstance(pool, ops.Average):
            self._add("AveragePool", given, name, **window, ceil_mode=0, count_include_pad=0)
        else:
            self._add("MaxPool", given, name, **window, ceil_mode=0, dilations=[1, 1])

    def _padded(self, x: str, name: str, pads: list[int], value: float) -> str:
        numbers = self._whole(f"{name}_pads", pads), self._constant(f"{name}_value", torch.tensor(float(value)))
        return self._add("Pad", [x, *numbers], name)

    def _clip(self, x: str, name: str, low: float, high: float) -> str:
        ends = {"low": low, "high": high}
        given = [self._constant(f"{name}_{key}", torch.tensor(float(end))) for key, end in ends.items()]
        return self._add("Clip", [x, *given], name)

    def _add(self, kind: str, given: list[str], output: str, domain: str = "", **how: Any) -> str:
        """Add a node; return the name of its value."""
        node = self.helper.make_node(kind, given, [output], f"{output}_{kind}", self.origin, domain, **how)
        self.nodes.append(node)
        return output

    def _whole(self, name: str, values: Any) -> str:
        return self._held(name, torch.tensor(values, dtype=torch.int64))

    def _constant(self, name: str, values: Tensor) -> str:
        return self._held(name, values.float())

    def _held(self, name: str, values: Tensor) -> str:
        self.constants.append(self.numpy_helper.from_array(values.detach().contiguous().numpy(), name))
        return name

    def _name(self, number: int) -> str:
        return "output" if number == self.program.output else f"v{number}" if number else "input"

    def _shape(self, number: int) -> list[int]:
        return [1, self.operations[number].channels, *self.sizes[number]]


def _half_and_bits(low: int, high: int) -> tuple[int, int]:
    """Return the bits of whole numbers from low to high, and one more than the largest with a sign, or 0."""
    half = 1 << max((-low - 1).bit_length(), high.bit_length()) if low < 0 else 0
    return half, half.bit_length() if low < 0 else high.bit_length()
