"""QONNX: a program as an ONNX file with the operators Quant and BipolarQuant, as FINN and hls4ml read it.

Scales stand in nodes of their own, in the program's order of rounding: each Quant has the scale 1, so convolutions add
whole numbers, which is exact. What FINN asks for: each Quant without negative codes has a ReLU of its
own, which FINN takes away with it; a clamp that no code of a quantizer depends on is left out, so that batch norm folds
into thresholds; pooling says its pads.
"""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..ground.extras import needed
from ..ground.files import write_file
from ..onnx.shapes import shapes_of
from ..program import operations as ops
from ..program.operations import Clamp, Operation, Program, Quantize, Sign
from ..program.plan import EDGES, QUOTIENT, form_of

with needed("export to QONNX"):
    from onnx import helper

    from ..onnx.floats import attributes, padded, write_floats
    from ..onnx.functions import write_function
    from ..onnx.graph import Form, Graph

_DOMAIN = "qonnx.custom_op.general"
_OPSET, _IR = 17, 9  # which FINN and hls4ml read


def write(program: Program, path: Path, images: Tensor) -> None:
    """Write a program as a QONNX file for one image, as FINN and hls4ml take it: (1, C, H, W).

    Outputs have these dimensions, too: hls4ml can't stream what loses its height and width.

    Args:
        program: the program.
        path: of the file.
        images: some of the size that the file takes.

    Raises:
        ImportError: onnx is missing: ``pip install "qconv[qonnx]"``.
        ValueError: a quantizer's codes are uneven or have an offset, or QONNX has no operator for an operation.
    """
    write_file(path, _Writer(program, images).model().SerializeToString())


def run(path: Path, images: Any) -> tuple[list[Any], dict[str, Any]]:
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
    outputs = {output.name: output.name for output in content.graph.output}
    shown = outputs | {entry.key: entry.value for entry in content.metadata_props if entry.key[:1].isdigit()}
    model: Any = ModelWrapper(content).transform(InferShapes())
    found: dict[str, list[Any]] = {name: [] for name in shown}
    for image in images:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Output shapes disagree")  # QONNX (1.0) infers none behind a Shape
            values = execute_onnx(model, {"input": image[None]}, return_full_exec_context=True)
        for name, of_images in found.items():
            of_images.append(values[shown[name]])
    values = {name: numpy.concatenate(of_images) for name, of_images in found.items()}
    return [values.pop(name) for name in outputs], values


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
    def __init__(self, program: Program, images: Tensor) -> None:
        self.program, self.graph = program, Graph(Form(_OPSET))
        self.shapes = shapes_of(program, images)
        self.operations = _without_idle_clamps(program)
        self.names = {0: "input"}
        self.inner: dict[str, str] = {}

    def model(self) -> Any:
        needed_ones = {*self.program.outputs}
        for number in range(max(needed_ones), 0, -1):
            needed_ones |= {*self.operations[number].inputs} if number in needed_ones else set()
        for number in sorted(needed_ones - {0}):
            operation = self.operations[number]
            self.graph.origin = operation.origin
            given = [self.names[place] for place in operation.inputs]
            self.names[number] = self._written(operation, given)
            if isinstance(operation, Quantize | Sign):
                self.inner |= {f"{number}.input": given[0], f"{number}.codes": self.names[number]}
        places = dict(zip(self.program.names(), self.program.outputs, strict=True))
        last = {self.names[place]: name for name, place in places.items() if place}
        for name, place in places.items():  # another output has this value, or it is the input
            if last.get(self.names[place]) != name:
                self.graph.nodes.append(helper.make_node("Identity", [self.names[place]], [name]))
        for node in self.graph.nodes:
            for names in (node.input, node.output):
                names[:] = [last.get(name, name) for name in names]
        self.inner = {key: last.get(name, name) for key, name in self.inner.items()}
        inputs, *outputs = (
            helper.make_tensor_value_info(name, 1, self.shapes[place].of(1))
            for name, place in [("input", 0), *places.items()]
        )
        graph = helper.make_graph(self.graph.nodes, "qconv", [inputs], outputs, self.graph.constants)
        domains = [helper.make_opsetid("", _OPSET), helper.make_opsetid(_DOMAIN, 1)]
        model = helper.make_model(graph, opset_imports=domains, producer_name="qconv", ir_version=_IR)
        helper.set_model_props(model, self.inner)
        return model

    def _written(self, operation: Any, given: list[str]) -> str:
        """Add the nodes of an operation; return the name of its value."""
        match operation:
            case ops.ConvBits() | ops.ConvCodes() | ops.ConvFloats():
                return self._conv(operation, *given)
            case ops.Affine():
                return self._affine(given[0], operation.scale, operation.bias)
            case Quantize():
                return self._quantize(operation, *given)
            case Sign():  # FINN wants a node of numbers before it, and folds it into the threshold
                return self._bipolar(self._affine(given[0], torch.ones_like(operation.edge), -operation.edge))
            case ops.Average() | ops.Maximum():
                return self._pool(operation, *given)
            case ops.SiLU():  # without Exp, which hls4ml (1.3) does not read
                return self.graph.node("Mul", *given, self.graph.node("Sigmoid", *given))
            case _:
                shapes = [self.shapes[place] for place in operation.inputs]
                written = write_floats(self.graph, operation, given, shapes)
                return written or write_function(self.graph, operation, given, shapes)

    def _conv(self, conv: Any, x: str) -> str:
        weight, window = self.graph.constant(conv.weight.float()), conv.window
        if isinstance(conv, ops.ConvBits):
            weight = self._bipolar(weight)
            border = self.graph.constant(float(conv.pad_value)) if conv.pad_value else ""
            x, window = padded(self.graph, x, window, border)
        elif isinstance(conv, ops.ConvCodes):
            low, high = min(int(conv.weight.min()), -1), max(int(conv.weight.max()), 1)
            is_signs = bool((conv.weight.abs() == 1).all())
            weight = self._bipolar(weight) if is_signs else self._quant(weight, low, high)
        how = attributes(window) | {"dilations": window.dilation}  # which qonnx (1.0) requires
        return self.graph.node("Conv", x, weight, group=conv.groups, **how)

    def _affine(self, x: str, scale: Tensor, bias: Tensor) -> str:
        """Batch norm, because hls4ml refuses a product with a number for each channel."""
        numbers = scale, bias, torch.zeros_like(scale), torch.ones_like(scale)
        constants = (self.graph.constant(of_channels.float()) for of_channels in numbers)
        return self.graph.node("BatchNormalization", x, *constants, epsilon=0.0)

    def _quantize(self, quantize: Quantize, x: str) -> str:
        node, constant, (low, high) = self.graph.node, self.graph.constant, quantize.ends
        form, factor = form_of(quantize)
        if form == EDGES:
            what = "its codes are uneven or have an offset, and QONNX's Quant rounds multiples of a step"
            raise ValueError(f"'{quantize.origin}': {what}")
        if factor != 1:
            x = node("Div" if form == QUOTIENT else "Mul", x, constant(factor))
        half, bits = _half_and_bits(low, high)
        if (low, high) not in ((0, (1 << bits) - 1), (-half, half - 1), (1 - half, half - 1)):
            x = node("Clip", x, constant(float(low)), constant(float(high)))
        return self._quant(node("Relu", x) if low == 0 else x, low, high)

    def _quant(self, x: str, low: int, high: int) -> str:
        """Whole numbers in the fewest bits, without a zero point: QONNX would add it before it rounds."""
        half, bits = _half_and_bits(low, high)
        numbers = map(self.graph.constant, (1.0, 0.0, float(bits)))
        how = {"signed": int(low < 0), "narrow": int(0 < -low < half), "rounding_mode": "ROUND"}
        return self.graph.node("Quant", x, *numbers, domain=_DOMAIN, **how)

    def _bipolar(self, x: str) -> str:
        return self.graph.node("BipolarQuant", x, self.graph.constant(1.0), domain=_DOMAIN)

    def _pool(self, pool: Any, x: str) -> str:
        window = pool.window._replace(padding=pool.window.reached(self.shapes[pool.inputs[0]][2:]), dilation=(1, 1))
        if isinstance(pool, ops.Average):
            return self.graph.node("AveragePool", x, **attributes(window), ceil_mode=0, count_include_pad=0)
        return self.graph.node("MaxPool", x, **attributes(window), ceil_mode=0, dilations=[1, 1])


def _half_and_bits(low: int, high: int) -> tuple[int, int]:
    """Return the bits of whole numbers from low to high, and one more than the largest with a sign, or 0."""
    half = 1 << max((-low - 1).bit_length(), high.bit_length()) if low < 0 else 0
    return half, half.bit_length() if low < 0 else high.bit_length()
