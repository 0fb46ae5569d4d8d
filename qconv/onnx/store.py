"""Storing weights as integers in the file; a runtime converts them to floats when it loads the file."""

from typing import Any, cast

import numpy as np
import onnx_ir as ir
from ml_dtypes import int4, uint4
from numpy.typing import NDArray

_SMALL = 256  # bytes; for smaller tensors the nodes do not pay off


def store_integers(model: ir.Model, four_bits: bool) -> None:
    """Replace a model's initializers by integers of 8 or 16 bits wherever that reproduces the numbers exactly.

    These are whole numbers; or indices into a list of at most 256 levels, times a scale for each output channel; or
    indices into a list of at most 16 levels for each channel. With ``four_bits``, those that fit have 4 bits.
    """
    graph = model.graph
    for value in list(graph.initializers.values()):
        tensor = value.const_value
        if tensor is None or tensor.nbytes < _SMALL:
            continue
        array = tensor.numpy()
        if array.dtype == np.int8 and four_bits:
            _store_int8(graph, value, array)
        elif array.dtype == np.float32 and array.ndim >= 2:
            _store_float(graph, value, array, four_bits)


def own_weights(model: ir.Model) -> None:
    """Give each layer its own weight and zero point; the exporter merges equal ones.

    In its precise mode ONNX Runtime moves both to uint8, and fails at a tensor that it has moved before.
    """
    graph, seen = model.graph, set[ir.Value]()
    for node in graph:
        if node.op_type != "DequantizeLinear":
            continue
        for place, value in enumerate(node.inputs):
            if value is None or value.const_value is None or value.dtype != ir.DataType.INT8:
                continue
            if value in seen:
                name = f"{node.outputs[0].name}.{('weight', 'scale', 'zero')[place]}"
                own = ir.val(name, const_value=ir.tensor(value.const_value.numpy(), name=name))
                graph.register_initializer(own)
                node.replace_input_with(place, own)
            seen.add(value)


def _store_int8(graph: ir.Graph, value: ir.Value, array: NDArray[np.int8]) -> None:
    """Store multiples of 4-bit integers."""
    factor = max(int(np.gcd.reduce(array, axis=None)), 1)
    if not _fits_4_bits(array // factor):
        return
    build = _Builder(graph, value)
    integers = build.constant((array // factor).astype(int4), "codes")
    if factor > 1:
        whole = build.cast(integers, ir.DataType.INT32)
        integers = build.node("Mul", whole, build.constant(np.int32(factor), "factor"), dtype=ir.DataType.INT32)
    _replace(graph, value, build.cast(integers, ir.DataType.INT8))


def _store_float(graph: ir.Graph, value: ir.Value, array: NDArray[np.float32], four_bits: bool) -> None:
    small = uint4 if four_bits else np.uint8
    largest = np.abs(array).reshape(len(array), -1).max(1, initial=0)
    is_whole = bool((largest <= 32767).all() and (np.trunc(array) == array).all())
    if is_whole and (largest <= 127).all():
        codes = array.astype(np.int8)
        _store_whole(graph, value, codes.astype(int4) if four_bits and _fits_4_bits(codes) else codes)
        return
    scale = np.where(largest == 0, 1, largest).astype(np.float32).reshape(-1, *[1] * (array.ndim - 1))
    alone, scaled = _levels(array), _levels(array / scale)
    if scaled is not None and not np.array_equal(scaled[0][scaled[1]] * scale, array):
        scaled = None
    fewest = min((len(coded[0]) for coded in (alone, scaled) if coded is not None), default=257)
    if fewest > 16 and _store_rows(graph, value, array, small):
        return
    if fewest > 256:
        if is_whole:
            _store_whole(graph, value, array.astype(np.int16))
        return
    is_scaled = alone is None or (scaled is not None and len(scaled[0]) < len(alone[0]))
    levels, places = cast(Any, scaled if is_scaled else alone)
    indices = places.astype(small if len(levels) <= 16 else np.uint8)
    build = _Builder(graph, value)
    whole = build.cast(build.constant(indices, "places"), ir.DataType.INT32)
    floats = build.node("Gather", build.constant(levels, "levels"), whole)
    if is_scaled:
        floats = build.node("Mul", floats, build.constant(scale, "scale"))
    _replace(graph, value, floats)


def _store_whole(graph: ir.Graph, value: ir.Value, codes: NDArray[Any]) -> None:
    """Store whole numbers."""
    build = _Builder(graph, value)
    _replace(graph, value, build.cast(build.constant(codes, "codes"), ir.DataType.FLOAT))


def _store_rows(graph: ir.Graph, value: ir.Value, array: NDArray[np.float32], small: Any) -> bool:
    """Store up to 16 levels per output channel and indices of dtype ``small``, if they reproduce all numbers."""
    if not array.size or len(np.unique(array[0])) > 16:
        return False
    rows = [np.unique(row, return_inverse=True) for row in array.reshape(len(array), -1)]
    count = max(len(levels) for levels, _ in rows)
    if count > 16 or 2 * count > array[0].size:
        return False
    table = np.stack([np.pad(levels, (0, count - len(levels))) for levels, _ in rows]).ravel()
    places = np.stack([places for _, places in rows]).reshape(array.shape).astype(small)
    firsts = count * np.arange(len(array), dtype=np.int32).reshape(-1, *[1] * (array.ndim - 1))
    build = _Builder(graph, value)
    whole = build.cast(build.constant(places, "places"), ir.DataType.INT32)
    indices = build.node("Add", whole, build.constant(firsts, "firsts"), dtype=ir.DataType.INT32)
    _replace(graph, value, build.node("Gather", build.constant(table, "levels"), indices))
    return True


def _levels(array: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int64]] | None:
    """The distinct numbers of an array, and the index of each element in them; None if there are more than 256."""
    if len(np.unique(array.ravel()[:4096])) > 256:  # sorting does not pay off for float weights
        return None
    levels, places = np.unique(array, return_inverse=True)
    return (levels, places.reshape(array.shape)) if len(levels) <= 256 else None


def _fits_4_bits(array: NDArray[np.int8]) -> bool:
    return bool((array >= -8).all() and (array <= 7).all())


def _replace(graph: ir.Graph, value: ir.Value, new: ir.Value) -> None:
    name = value.name
    value.replace_all_uses_with(new)
    if name is not None:
        graph.initializers.pop(name)


class _Builder:
    """Adds nodes to the start of a graph that compute a value from its integers."""

    def __init__(self, graph: ir.Graph, value: ir.Value) -> None:
        self.graph, self.shape = graph, cast(Any, value.shape)
        self.name = value.name or "weight"
        self.first, self.nodes = graph[0], 0

    def constant(self, array: NDArray[np.generic] | np.generic, what: str) -> ir.Value:
        tensor = ir.tensor(array, name=f"{self.name}.{what}")
        value = ir.Value(
            name=tensor.name, shape=cast(Any, tensor.shape), type=ir.TensorType(tensor.dtype), const_value=tensor
        )
        self.graph.initializers.add(value)
        return value

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        return self.node("Cast", value, dtype=dtype, to=int(dtype))

    def node(
        self, operator: str, *inputs: ir.Value, dtype: ir.DataType = ir.DataType.FLOAT, **attributes: int
    ) -> ir.Value:
        """Add a node whose output has the shape of the replaced value."""
        self.nodes += 1
        node = ir.node(operator, inputs, attributes, name=f"{self.name}.{self.nodes}")
        output = node.outputs[0]
        output.name, output.shape, output.type = f"{node.name}.output", self.shape, ir.TensorType(dtype)
        self.graph.insert_before(self.first, node)
        return output
