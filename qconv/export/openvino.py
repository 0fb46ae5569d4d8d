"""OpenVINO: a program as an OpenVINO model, an .xml file and its weights in a .bin file beside it.

Codes are whole numbers before a FakeQuantize of 256 levels that changes none of them: behind it OpenVINO convolves in 8
bits. Whatever its passes do with scales before it, a rounding lies between, and they can't move a code's edge.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..ground.extras import needed
from ..onnx.shapes import shapes_of
from ..program import operations as ops
from ..program.edges import float_at, place_of
from ..program.operations import Operation, Program, Quantize
from ..program.plan import PRODUCT, QUOTIENT, form_of

SETTINGS = {"INFERENCE_PRECISION_HINT": "f32"}
"""What a user must set; the file says so, too. By default OpenVINO multiplies floats in bfloat16 where it can."""
_LEVELS = 256
_LARGEST = torch.finfo(torch.float32).max  # in place of inf, which an attribute of the file can't be


def write(program: Program, path: Path, images: Tensor) -> None:
    """Write a program as an OpenVINO model for batches of images of one size.

    Args:
        program: the program.
        path: of the .xml file.
        images: some of the size that the file takes.

    Raises:
        ImportError: OpenVINO is missing: ``pip install "qconv[openvino]"``.
        ValueError: `path` does not end in .xml; a function of the program has no form in ONNX.
    """
    with needed("export to OpenVINO"):
        import openvino
    if path.suffix != ".xml":
        raise ValueError(f"path (={path}) must end in .xml: OpenVINO writes the weights to a .bin file beside it")
    model = _Writer(program, images).model()
    for name, value in SETTINGS.items():
        model.set_rt_info(value, ["qconv", name])
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        openvino.save_model(model, Path(folder) / path.name, compress_to_fp16=False)
        for name in (path.with_suffix(".bin").name, path.name):
            (Path(folder) / name).replace(path.with_name(name))


def run(path: Path, images: Any) -> tuple[list[Any], dict[str, Any]]:
    """Run a file as it ships, with the settings that it asks for; then once more for the codes inside of it.

    `images` is a numpy array; its codes are as `targets.run` returns them.
    """
    with needed("running an OpenVINO model"):
        import openvino
    core = openvino.Core()
    model = core.read_model(path)
    settings = {name: model.get_rt_info(["qconv", name]).astype(str) for name in SETTINGS}
    found, outputs = {}, [*core.compile_model(model, "CPU", settings)(images).values()]
    inner = sorted({name for output in _outputs(model) for name in output.get_names() if name[:1].isdigit()})
    if inner:
        model.add_outputs(inner)
        values = core.compile_model(model, "CPU", settings)(images)
        found = {name: values[name] for name in inner}
    return outputs, found


def _outputs(model: Any) -> list[Any]:
    return [output for node in model.get_ops() for output in node.outputs()]


class _Writer:
    def __init__(self, program: Program, images: Tensor) -> None:
        with needed("export to OpenVINO"):
            import openvino
            from openvino import opset14

            from ..onnx.floats import as_model
        self.openvino, self.core = openvino, openvino.Core()
        self.nodes, self.as_model = cast(Any, opset14), as_model
        self.program, self.values = program, list[Any]()
        self.shapes = shapes_of(program, images)

    def model(self) -> Any:
        for number, operation in enumerate(self.program.operations):
            given = [self.values[place] for place in operation.inputs]
            node = self._node(operation, self.shapes[number][2:], *given)
            self.values.append(node if isinstance(node, self.openvino.Output) else node.output(0))
            if isinstance(operation, Quantize | ops.Sign):
                given[0].add_names({f"{number}.input"})
                self.values[-1].add_names({f"{number}.codes"})
        results = []
        for name, place, rank in zip(self.program.names(), self.program.outputs, self.program.ranks, strict=True):
            output = self.values[place]
            if rank == 2:
                output = self.nodes.reshape(output, self._whole([0, -1]), True).output(0)
            output.add_names({name})
            results.append(self.nodes.result(output))
        return self.openvino.Model(results, [self.values[0].get_node()], "qconv")

    def _node(self, operation: Operation, size: Sequence[int], *given: Any) -> Any:
        """Return the node of an operation; codes are less their zero. OpenVINO reads other operations as ONNX nodes."""
        nodes, (x, *_) = self.nodes, (*given, None)
        match operation:
            case ops.Input():
                return nodes.parameter([-1, operation.channels, *size], self.openvino.Type.f32, "input")
            case ops.ConvBits() | ops.ConvCodes() | ops.ConvFloats():
                return self._conv(operation, x)
            case ops.Affine():
                x = nodes.multiply(x, self._floats(operation.scale.view(1, -1, 1, 1)))
                if operation.bias.any():
                    return nodes.add(x, self._floats(operation.bias.view(1, -1, 1, 1)))
                # OpenVINO 2026.4.1 fuses the product of a quantizer, too, although others read what comes before it;
                # and it moves a product behind a normalization, whose eps stays.
                return self._barred(x)
            case Quantize():
                return self._quantize(operation, x)
            case ops.Sign():
                return self._at_least(x, operation.edge.view(1, -1, 1, 1), -1.0, 1.0)
            case ops.Average() | ops.Maximum():
                return self._pool(operation, self.shapes[operation.inputs[0]][2:], x)
        content = self.as_model(operation, [self.shapes[place] for place in operation.inputs], self.shapes[0])
        for node in content.graph.node:
            own = {each.name: each.ints or each.i for each in node.attribute}
            if own.get("ceil_mode") and own.get("count_include_pad") and any(own["pads"]):
                what = "an average of pixels beyond the padding, which OpenVINO (2026.4.1) counts,"
                raise ValueError(f"'{operation.origin}': {what} can't be written for OpenVINO")
        part = self.core.read_model(content.SerializeToString())
        for node in part.get_ordered_ops():
            # Behind these, OpenVINO (2026.4.1) gives a quantizer other levels.
            if node.get_type_name() in ("ReduceMax", "ReduceMin"):
                readers = node.output(0).get_target_inputs()
                behind = self._barred(node).output(0)
                for reader in readers:
                    reader.replace_source_output(behind)
        for parameter in part.get_parameters():
            name = parameter.friendly_name
            for reader in parameter.output(0).get_target_inputs():
                reader.replace_source_output(self.values[0] if name == "input" else given[int(name)])
        return part.get_results()[0].input_value(0)

    def _conv(self, conv: Any, x: Any) -> Any:
        """A convolution; one of signs and codes in 8 bits, with padding that isn't 0 in front of the codes."""
        left, right, top, bottom = conv.window.padding
        value, stride = float(getattr(conv, "pad_value", 0)), conv.window.stride
        # OpenVINO (2026.4.1) moves the stride of a window of one pixel before all padding that it meets.
        is_point = conv.window.kernel == (1, 1) and stride != (1, 1)
        if any(conv.window.padding) and (value or is_point):
            ends = self._whole([0, 0, top, left]), self._whole([0, 0, bottom, right])
            x = self.nodes.pad(x, *ends, "constant", self._floats(torch.tensor(value)))
            left, right, top, bottom = 0, 0, 0, 0
        if is_point:
            ends = self._whole([0, 0]), self._whole([2**31 - 1] * 2)
            x, stride = self.nodes.slice(x, *ends, self._whole(stride), self._whole([2, 3])), (1, 1)
        weight, convolution = conv.weight, self.nodes.convolution
        if conv.groups > 1:
            weight, convolution = weight.unflatten(0, (conv.groups, -1)), self.nodes.group_convolution
        if isinstance(conv, ops.ConvFloats):
            filters = self._floats(weight)
        else:
            x = self._eight_bits(x, conv.zero if isinstance(conv, ops.ConvCodes) else _LEVELS // 2)
            ones = torch.ones(*weight.shape[:-3], 1, 1, 1)  # without a scale it convolves in floats
            filters = self.nodes.convert(self._constant(weight.to(torch.int8)), "f32")
            filters = self.nodes.multiply(filters, self._floats(ones))
        return convolution(x, filters, stride, [top, left], [bottom, right], conv.window.dilation)

    def _barred(self, x: Any) -> Any:
        """The same values, behind a maximum, past which OpenVINO moves no product."""
        return self.nodes.maximum(x, self._floats(torch.tensor(-_LARGEST)))

    def _eight_bits(self, x: Any, zero: int) -> Any:
        """Whole numbers from -zero to 255 - zero, as they are."""
        ends = self._floats(torch.tensor(-float(zero))), self._floats(torch.tensor(float(_LEVELS - 1 - zero)))
        return self.nodes.fake_quantize(x, *ends, *ends, _LEVELS)

    def _quantize(self, quantize: Quantize, x: Any) -> Any:
        low, high = quantize.ends
        nodes, (form, factor) = self.nodes, form_of(quantize)
        product = nodes.multiply(x, self._floats(torch.tensor(factor)))
        if form == PRODUCT:
            return nodes.clamp(nodes.round(product, "half_to_even"), float(low), float(high))
        if form == QUOTIENT:
            return self._corrected(quantize, x, low, high)
        codes = self._floats(torch.tensor(float(low)))
        for edge, more in zip(quantize.edges, quantize.codes.diff(), strict=True):
            codes = nodes.add(codes, self._at_least(x, edge, 0.0, float(more)))
        return codes

    def _corrected(self, quantize: Quantize, x: Any, low: int, high: int) -> Any:
        """Codes by a product and one comparison: OpenVINO divides by a constant as it multiplies by its inverse.

        Rounded down, the product is the code or one less, also where its own rounding errs: the edge says which.
        """
        nodes, inverse = self.nodes, self._floats(torch.tensor(1 / quantize.step))
        down = nodes.clamp(nodes.floor(nodes.multiply(x, inverse)), float(low), float(high))
        before = float_at(place_of(quantize.edges) - 1)  # the largest floats that stay below
        places = nodes.convert(nodes.subtract(down, self._floats(torch.tensor(float(low)))), "i32")
        table = self._floats(torch.cat([before, torch.tensor([torch.inf])]))
        is_more = nodes.greater(x, nodes.gather(table, places, self._whole(0)))
        return nodes.add(down, nodes.convert(is_more, "f32"))

    def _at_least(self, x: Any, edge: Tensor, below: float, above: float) -> Any:
        is_above = self.nodes.greater_equal(x, self._floats(edge))
        return self.nodes.select(is_above, self._floats(torch.tensor(above)), self._floats(torch.tensor(below)))

    def _pool(self, pool: Any, size: Any, x: Any) -> Any:
        left, right, top, bottom = pool.window.reached(size)
        begin, end, (kernel, stride) = [top, left], [bottom, right], pool.window[:2]
        if isinstance(pool, ops.Average):
            return self.nodes.avg_pool(x, stride, begin, end, kernel, exclude_pad=True)
        return self.nodes.max_pool(x, stride, [1, 1], begin, end, kernel)

    def _floats(self, values: Tensor) -> Any:
        return self._constant(values.float())

    def _whole(self, values: Any) -> Any:
        return self._constant(torch.tensor(values, dtype=torch.int64))

    def _constant(self, values: Tensor) -> Any:
        return self.nodes.constant(values.detach().contiguous().numpy(), shared_memory=False)
