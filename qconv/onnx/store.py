"""Weights in the file as the integers that they are; a runtime makes floats of them when it loads the file."""

from typing import Any, cast

import numpy as np
import onnx_ir as ir
from ml_dtypes import int4
from numpy.typing import NDArray

_SMALL = 256  # bytes: smaller tensors are not worth the nodes


def store_integers(model: ir.Model) -> None:
    """Replace the initializers of a model by integers of 4 or 8 bits wherever the same numbers come back.

    These are integers; numbers of one magnitude, or 0, for each output channel; and powers of two times a scale for
    each, as signs and exponents.
    """
    graph = model.graph
    for value in list(graph.initializers.values()):
        tensor = value.const_value
        if tensor is None or tensor.nbytes < _SMALL:
            continue
        array = tensor.numpy()
        if array.dtype == np.int8:
            _store_int8(graph, value, array)
        elif array.dtype == np.float32 and array.ndim >= 2:
            _store_float(graph, value, array)


def _store_int8(graph: ir.Graph, value: ir.Value, array: NDArray[np.int8]) -> None:
    """What is a multiple of integers of 4 bits."""
    factor = max(int(np.gcd.reduce(array, axis=None)), 1)
    if not _fits_4_bits(array // factor):
        return
    build = _Builder(graph, value)
    integers = build.constant((array // factor).astype(int4), "codes")
    if factor > 1:
        whole = build.cast(integers, ir.DataType.INT32)
        integers = build.node("Mul", whole, build.constant(np.int32(factor), "factor"), dtype=ir.DataType.INT32)
    _replace(graph, value, build.cast(integers, ir.DataType.INT8))


def _store_float(graph: ir.Graph, value: ir.Value, array: NDArray[np.float32]) -> None:
    build = _Builder(graph, value)
    if (
        (np.abs(array) <= 127).all()
        and (np.trunc(array) == array).all()
        and not (np.signbit(array) & (array == 0)).any()
    ):
        _replace(graph, value, build.cast(build.integers(array.astype(np.int8), "codes"), ir.DataType.FLOAT))
        return
    rows = array.reshape(len(array), -1)
    scale = np.abs(rows).max(1, initial=0).astype(np.float32)
    scale[scale == 0] = 1
    shape = (-1, *[1] * (array.ndim - 1))
    signs = np.sign(array)
    if np.array_equal(signs * scale.reshape(shape), array):
        floats = build.cast(build.integers(signs.astype(np.int8), "codes"), ir.DataType.FLOAT)
        _replace(graph, value, build.node("Mul", floats, build.constant(scale.reshape(shape), "scale")))
        return
    with np.errstate(divide="ignore", invalid="ignore"):
        exponents = np.log2(scale.reshape(shape) / np.abs(array))
    exponents = np.where(array == 0, 0, np.round(exponents))
    if not np.isfinite(exponents).all() or exponents.max(initial=0) > 127:
        return
    if np.array_equal((signs * np.exp2(-exponents).astype(np.float32)) * scale.reshape(shape), array):
        exponents = -exponents.astype(np.int8)
        two = build.constant(np.float32(2), "two")
        powers = build.node("Pow", two, build.cast(build.integers(exponents, "exponents"), ir.DataType.FLOAT))
        floats = build.cast(build.integers(signs.astype(np.int8), "signs"), ir.DataType.FLOAT)
        scaled = build.node("Mul", build.node("Mul", floats, powers), build.constant(scale.reshape(shape), "scale"))
        _replace(graph, value, scaled)


def _fits_4_bits(array: NDArray[np.int8]) -> bool:
    return bool((array >= -8).all() and (array <= 7).all())


def _replace(graph: ir.Graph, value: ir.Value, new: ir.Value) -> None:
    name = value.name
    value.replace_all_uses_with(new)
    if name is not None:
        graph.initializers.pop(name)


class _Builder:
    """Adds what makes a value of its integers to the beginning of a graph."""

    def __init__(self, graph: ir.Graph, value: ir.Value) -> None:
        self.graph, self.shape = graph, cast(Any, value.shape)
        self.name = value.name or "weight"
        self.first = graph[0]

    def constant(self, array: NDArray[np.generic] | np.generic, what: str) -> ir.Value:
        tensor = ir.tensor(array, name=f"{self.name}.{what}")
        value = ir.Value(
            name=tensor.name, shape=cast(Any, tensor.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
        )
        self.graph.initializers.add(value)
        return value

    def integers(self, array: NDArray[np.int8], what: str) -> ir.Value:
        """As int8, in 4 bits where they fit."""
        if not _fits_4_bits(array):
            return self.constant(array, what)
        return self.cast(self.constant(array.astype(int4), what), ir.DataType.INT8)

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        return self.node("Cast", value, dtype=dtype, to=int(dtype))

    def node(
        self, operator: str, *inputs: ir.Value, dtype: ir.DataType = ir.DataType.FLOAT, **attributes: int
    ) -> ir.Value:
        node = ir.node(operator, inputs, attributes, name=f"{self.name}.{operator}.{len(self.graph)}")
        output = node.outputs[0]
        output.name, output.type = f"{node.name}.output", ir.TensorType(dtype)
        output.shape = self.shape if len(inputs) != 2 or inputs[0].shape else inputs[1].shape
        self.graph.insert_before(self.first, node)
        return output
