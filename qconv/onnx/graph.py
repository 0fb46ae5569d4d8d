"""A graph of ONNX nodes under construction, and its weights, which the file stores as integers."""

from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

_LEAST_SAVED = 256  # bytes; for less, a tensor is stored as it is
_LARGEST = 128  # magnitude of whole numbers of 8 bits
_NUDGES = 2  # floats on both sides of a quotient, among which a scale is searched
_FLOATS = TensorProto.FLOAT

Values = Tensor | NDArray[Any] | np.generic | list[Any] | float | int


class Form(NamedTuple):
    """How a file is written: arguments of `export_onnx`."""

    opset: int
    four_bits: bool = False
    signed: bool = False
    clamp_by_saturation: bool = False


class Graph:
    """Nodes and constants, in order.

    Args:
        form: how the file is written.

    Attributes:
        origin: the name of the module or function that the next nodes compute; their names begin with it.
    """

    def __init__(self, form: Form) -> None:
        self.form, self.origin = form, ""
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def node(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """Add a node; return the name of its last output."""
        name = f"{self.origin}/{kind}_{len(self.nodes)}"
        names = [f"{name}.{place}" for place in range(outputs - 1)]
        self.nodes.append(helper.make_node(kind, inputs, [*names, name], name, **attributes))
        return name

    def constant(self, values: Values, dtype: Any = None) -> str:
        """Add a constant, float32 unless `dtype` or the values say otherwise; return its name."""
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values, dtype)
        array = array.astype(dtype or (np.float32 if array.dtype == np.float64 else array.dtype))
        name = f"{self.origin}/constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array, order="C"), name))
        return name

    def channels(self, values: Tensor) -> str:
        """Add a float for each channel; a single one if all are equal."""
        is_one = bool((values == values[0]).all())
        return self.constant(values[0].float() if is_one else values.float().view(-1, 1, 1))

    def small(self, codes: Tensor) -> str:
        """Return whole numbers of up to 8 bits as int8, stored in 4 bits if that is asked for and they fit."""
        array = codes.to(torch.int8).numpy()
        factor = max(int(np.gcd.reduce(array, axis=None)), 1)
        reduced = array // factor
        fits = array.size >= 2 * _LEAST_SAVED and reduced.min() >= -8 and reduced.max() <= 7
        if not (self.form.four_bits and fits):
            return self.constant(array)
        name = self._four_bits(reduced, TensorProto.INT4)
        if factor > 1:
            whole = self.node("Cast", name, to=TensorProto.INT32)
            name = self.node("Mul", whole, self.constant(factor, np.int32))
        return self.node("Cast", name, to=TensorProto.INT8)

    def weight(self, weight: Tensor) -> str:
        """Return a float weight (C_out, …), stored as integers wherever they give its numbers exactly.

        These are whole numbers times a scale for each output channel, or places in a list of levels.
        """
        array = weight.detach().float().numpy()
        if array.size < _LEAST_SAVED or array.ndim < 2:
            return self.constant(array)
        if (scaled := _scaled(array)) is not None:
            codes, scale = scaled
            floats = self.node("Cast", self.small(torch.from_numpy(codes)), to=_FLOATS)
            return floats if (scale == 1).all() else self.node("Mul", floats, self.constant(scale))
        if (listed := _listed(array)) is None:
            return self.constant(array)
        places, levels = listed
        if self.form.four_bits and places.max() < 16:
            places = self._four_bits(places, TensorProto.UINT4)
        else:
            places = self.constant(places.astype(np.uint8))
        whole = self.node("Cast", places, to=TensorProto.INT32)
        if len(levels) > 1:  # a list for each output channel
            firsts = levels.shape[1] * np.arange(len(levels), dtype=np.int32)
            whole = self.node("Add", whole, self.constant(firsts.reshape(-1, *[1] * (array.ndim - 1))))
        return self.node("Gather", self.constant(levels.ravel()), whole)

    def _four_bits(self, array: NDArray[Any], kind: int) -> str:
        name = f"{self.origin}/constant_{len(self.constants)}"
        self.constants.append(helper.make_tensor(name, kind, array.shape, array.ravel()))
        return name


def _scaled(array: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]] | None:
    """Return whole numbers of 8 bits and a scale for each output channel that give the array; None if none do."""
    rows = torch.from_numpy(array.reshape(len(array), -1))
    if len(rows[0].unique()) > 256:
        return None
    largest, shape = rows.abs().amax(1), (-1, *[1] * (array.ndim - 1))
    scale, missing = torch.ones(len(rows)), largest > 0
    for count in range(1, _LARGEST + 1):  # of steps in the largest
        for nudge in sorted(range(-_NUDGES, _NUDGES + 1), key=abs):
            step = ((largest[missing] / count).view(torch.int32) + nudge).view(torch.float32)
            pending = rows[missing]
            codes = (pending / step[:, None]).round().clamp(-_LARGEST, _LARGEST - 1)
            fits = (codes * step[:, None] == pending).all(1)
            places = missing.nonzero().flatten()[fits]
            scale[places], missing[places] = step[fits], False
            if not missing.any():
                codes = (rows / scale[:, None]).round().view(array.shape)
                return codes.to(torch.int8).numpy(), scale.view(shape).numpy()
    return None


def _listed(array: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
    """Return places in a list of 256 levels, or in one of 16 for each channel; None if there are more levels."""
    if len(np.unique(array.ravel()[:4096])) <= 256:  # sorting does not pay off for float weights
        levels, places = np.unique(array, return_inverse=True)
        if len(levels) <= 256:
            return places.reshape(array.shape), levels[None]
    if len(np.unique(array[0])) > 16:
        return None
    rows = [np.unique(row, return_inverse=True) for row in array.reshape(len(array), -1)]
    count = max(len(levels) for levels, _ in rows)
    if count > 16 or 2 * count > array[0].size:
        return None
    levels = np.stack([np.pad(levels, (0, count - len(levels))) for levels, _ in rows])
    return np.stack([places for _, places in rows]).reshape(array.shape), levels
