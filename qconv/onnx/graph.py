"""A graph of ONNX nodes under construction, and its weights, which the file stores as integers."""

from typing import Any, NamedTuple

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

_LEAST = 512  # elements; for less, a tensor is stored as it is
_LARGEST = 256  # magnitude of whole numbers, of which 8 bits hold most
_NUDGES = sorted(range(-2, 3), key=abs)  # floats beside a quotient, among which a scale is searched


class Form(NamedTuple):
    """How a file is written: arguments of `export_onnx`."""

    opset: int
    four_bits: bool = False
    signed: bool = False
    clamp_by_saturation: bool = False


class Graph:
    """Nodes and constants, in order. The names of those that are added next begin with `origin`."""

    def __init__(self, form: Form) -> None:
        self.form, self.origin = form, ""
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def node(self, kind: str, *inputs: str, **attributes: Any) -> str:
        """Add a node; return the name of its output."""
        name = f"{self.origin}/{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name, **attributes))
        return name

    def reduced(self, kind: str, x: str, axes: list[int], keep: Any = True) -> str:
        """Add a reduction; before opset 18 its axes are an attribute, but of sums."""
        if self.form.opset < 18 and kind != "ReduceSum":
            return self.node(kind, x, axes=axes, keepdims=int(keep))
        return self.node(kind, x, self.constant(axes, "int64"), keepdims=int(keep))

    def constant(self, values: Any, dtype: Any = None, four_bits: int = 0) -> str:
        """Add a constant, float32 in place of float64; return its name."""
        array = np.asarray(values.detach().cpu().numpy() if isinstance(values, Tensor) else values, dtype, order="C")
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        name = f"{self.origin}/constant_{len(self.constants)}"
        as_four_bits = four_bits and helper.make_tensor(name, four_bits, array.shape, array.ravel())
        self.constants.append(as_four_bits or numpy_helper.from_array(array, name))
        return name

    def channels(self, values: Tensor) -> str:
        """Add a float for each channel; a single one if all are equal."""
        return self.constant(values[0].float() if (values == values[0]).all() else values.float().view(-1, 1, 1))

    def small(self, codes: Tensor) -> str:
        """Return whole numbers as int8, or as int16 if they need it, stored in 4 bits if that is asked and they fit."""
        needs_more = bool((codes != codes.to(torch.int8)).any())
        array = codes.to(torch.int16 if needs_more else torch.int8).numpy()
        factor = max(int(np.gcd.reduce(array, axis=None)), 1)
        if not self.form.four_bits or array.size < _LEAST or np.abs(array // factor * 2 + 1).max() > 15:
            return self.constant(array)
        whole = self.node("Cast", self.constant(array // factor, four_bits=TensorProto.INT4), to=TensorProto.INT32)
        return self.node("Cast", self.node("Mul", whole, self.constant(factor, np.int32)), to=TensorProto.INT8)

    def weight(self, weight: Tensor) -> str:
        """Return a float weight (C_out, …), stored as integers wherever they give its numbers exactly.

        These are whole numbers times a scale for each output channel, or places in a list of levels.
        """
        array = weight.detach().float().numpy()
        if array.size < _LEAST or array.ndim < 2:
            return self.constant(array)
        shape, rows = (-1, *[1] * (array.ndim - 1)), torch.from_numpy(array).flatten(1)
        scale = _scale(rows)
        whole = None if scale is None else (rows / scale).round()
        is_small = whole is not None and bool((whole == whole.to(torch.int8)).all())
        listed = None if is_small else _listed(array)
        if scale is not None and whole is not None and listed is None:
            floats = self.node("Cast", self.small(whole.view(weight.shape)), to=TensorProto.FLOAT)
            return floats if (scale == 1).all() else self.node("Mul", floats, self.constant(scale.view(shape)))
        if listed is None:
            return self.constant(array)
        places, levels = listed
        whole = self.node("Cast", self.constant(places, np.uint8), to=TensorProto.INT32)
        if len(levels) > 1:  # a list for each output channel
            firsts = levels.shape[1] * np.arange(len(levels), dtype=np.int32).reshape(shape)
            whole = self.node("Add", whole, self.constant(firsts))
        return self.node("Gather", self.constant(levels.ravel()), whole)


def _scale(rows: Tensor) -> Tensor | None:
    """Return a scale for each row of which all its numbers are multiples up to 256; None if there is none."""
    if (rows == rows.to(torch.int8)).all():
        return torch.ones(len(rows), 1)
    if len(rows[0].unique()) > 2 * _LARGEST or (len(rows) > 1 and _scale(rows[:1]) is None):  # which is soon known
        return None
    largest = rows.abs().amax(1)
    scale, missing = torch.ones(len(rows)), largest > 0
    for count in range(1, _LARGEST + 1):  # of steps in the largest
        for nudge in _NUDGES:
            step, pending = ((largest[missing] / count).view(torch.int32) + nudge).view(torch.float32), rows[missing]
            codes = (pending / step[:, None]).round().clamp(-_LARGEST, _LARGEST - 1)
            fits = (codes * step[:, None] == pending).all(1)
            places = missing.nonzero().flatten()[fits]
            scale[places], missing[places] = step[fits], False
            if not missing.any():
                return scale.view(-1, 1)
    return None


def _listed(array: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[Any]] | None:
    """Return places in a list of 256 levels, or in one of 16 for each channel; None if there are more levels."""
    if len(np.unique(array.ravel()[:4096])) <= 256:  # sorting does not pay off for float weights
        levels, places = np.unique(array, return_inverse=True)
        if len(levels) <= 256:
            return places.reshape(array.shape), levels[None]
    rows = [np.unique(row, return_inverse=True) for row in array] if len(np.unique(array[0])) <= 16 else []
    count = max((len(levels) for levels, _ in rows), default=17)
    if count > 16 or 2 * count > array[0].size:
        return None
    levels = np.stack([np.pad(levels, (0, count - len(levels))) for levels, _ in rows])
    return np.stack([places for _, places in rows]).reshape(array.shape), levels
