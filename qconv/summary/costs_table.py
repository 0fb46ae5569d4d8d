"""The table of a model's contents: rows, totals, and their text forms."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ..ground.files import write_file
from ..ground.table import Column, cost_text, csv_text, lines, most_costly

FLOAT_BITS = 32
NUMBERS = ("bits w/in", "parameters", "MACs", "BOPs", "float bytes", "packed bytes", "saved bytes", "if lean")
COLUMNS = (*map(Column, ("layer", "type", "output", "scheme")), *(Column(head, is_right=True) for head in NUMBERS))
WHY = Column("a float, for")

Key = TypeVar("Key", float, tuple[float, float])


def row_name(module_name: str) -> str:
    """Return the name of a module's row; the model itself, without a name, gets one."""
    return module_name or "(model)"


@dataclass(frozen=True)
class Row:
    """One module that has its own parameters or buffers, multiplies, or saves something for the backward.

    Attributes:
        name: the module's name in the model, see `row_name`.
        type: its class.
        output_shape: the output's shape for one sample, without the batch; complete if dimension 0 is not the batch.
        scheme: the scheme of a quantized layer; "float" for any other.
        weight_bits: information per weight; 32 if it is not quantized, whatever the dtype.
        input_bits: information per input value; 32 if it is not quantized, whatever the dtype, and in deformable
            layers, which multiply the weight by values between the quantized input's.
        parameters: parameters of the float layer, weight and bias, without the learned tensors of its quantizers.
        weights: the number of parameters that are a quantized layer's weights, of `weight_bits`; the others have 32.
        macs: multiply-accumulates for one sample, in convolutions and linear layers; 0 for others.
        float_bytes: parameters and buffers as the float layer stores them.
        packed_bytes: bytes of its tensors in the file of `qconv.save_packed`: a quantized weight in its bits, its
            scales, and the learned tensors of the input quantizer; all others unchanged, except batch norm's count of
            batches.
        saved_bytes: bytes that autograd keeps of one sample for the backward: see `summarize`.
        lean_bytes: `saved_bytes` after `qconv.lean`.
        keeps_float: why `lean_bytes` includes a float of the size of the input, see `qconv.lean.why_float`; else empty.
    """

    name: str
    type: str
    output_shape: tuple[int, ...]
    scheme: str
    weight_bits: float
    input_bits: float
    parameters: int
    weights: int
    macs: int
    float_bytes: int
    packed_bytes: int
    saved_bytes: int
    lean_bytes: int
    keeps_float: str

    @property
    def parameters_by_bits(self) -> dict[float, int]:
        """The number of parameters of each bit width."""
        counts = Counter({self.weight_bits: self.weights})
        counts[FLOAT_BITS] += self.parameters - self.weights
        return _without_zeros(counts)

    @property
    def macs_by_bits(self) -> dict[tuple[float, float], int]:
        """The multiply-accumulates of each pair (weight bits, input bits)."""
        return _without_zeros({(self.weight_bits, self.input_bits): self.macs})

    @property
    def bops(self) -> int:
        """Bit operations, ``macs · weight_bits · input_bits``, rounded if the bits are fractional.

        This is the count of Bayesian Bits (arXiv:2005.07093); float counts as 32 bits, 1024 operations per
        multiply-accumulate. Papers on binary networks often give ``OPs = binary macs / 64 + float macs`` instead: use
        `macs_by_bits`.
        """
        return round(self.macs * self.weight_bits * self.input_bits)


@dataclass(frozen=True, repr=False)
class Summary:
    """The rows of a model in the order of its modules, and their totals; prints as a table.

    Attributes:
        rows: the modules.
        header_bytes: bytes of the packed file's header: names, shapes, storage of each weight, a test of outputs.
        costs: the cost of quantizing each layer, by its name.
    """

    rows: tuple[Row, ...]
    header_bytes: int = 0
    costs: Mapping[str, float] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """Parameters of the float model."""
        return sum(row.parameters for row in self.rows)

    @property
    def parameters_by_bits(self) -> dict[float, int]:
        """The number of parameters of each bit width, from few bits to many."""
        return _added(row.parameters_by_bits for row in self.rows)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one sample."""
        return sum(row.macs for row in self.rows)

    @property
    def macs_by_bits(self) -> dict[tuple[float, float], int]:
        """The multiply-accumulates of each pair (weight bits, input bits), from few bits to many."""
        return _added(row.macs_by_bits for row in self.rows)

    @property
    def bops(self) -> int:
        """Bit operations of one sample: the sum of `Row.bops`."""
        return sum(row.bops for row in self.rows)

    @property
    def float_bytes(self) -> int:
        """Bytes of the float model."""
        return sum(row.float_bytes for row in self.rows)

    @property
    def packed_bytes(self) -> int:
        """Bytes of the file that `qconv.save_packed` writes: the rows' and the header.

        An ``example`` is counted as given if inputs of no usual shape suit; descriptions of network, images and classes
        are not counted, except by the command ``qconv summary``.
        """
        return self.header_bytes + sum(row.packed_bytes for row in self.rows)

    @property
    def compression(self) -> float:
        """``float_bytes / packed_bytes``; 1 for a model that stores nothing."""
        return self.float_bytes / self.packed_bytes if self.packed_bytes else 1.0

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd stores per sample for the backward."""
        return sum(row.saved_bytes for row in self.rows)

    @property
    def lean_bytes(self) -> int:
        """Bytes that autograd stores per sample after `qconv.lean`."""
        return sum(row.lean_bytes for row in self.rows)

    def totals(self) -> dict[str, Any]:
        """All totals as plain data: bits are keys such as ``"1"`` of parameters and ``"1x32"`` of MACs."""
        return {
            "parameters": self.parameters,
            "parameters_by_bits": _labelled(self.parameters_by_bits),
            "macs": self.macs,
            "macs_by_bits": _labelled(self.macs_by_bits),
            "bops": self.bops,
            "float_bytes": self.float_bytes,
            "packed_bytes": self.packed_bytes,
            "compression": self.compression,
            "saved_bytes": self.saved_bytes,
            "lean_bytes": self.lean_bytes,
        }

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """``{"rows": [...], "totals": {...}}``: a row's fields with `Row.bops` and the counts by bits, and `totals`.

        Args:
            path: a file to write it to as well. The file is replaced as a whole or not at all.

        Returns:
            The text.

        Raises:
            FileNotFoundError: the folder of ``path`` does not exist.
        """
        rows = [
            {
                **asdict(row),
                "bops": row.bops,
                "parameters_by_bits": _labelled(row.parameters_by_bits),
                "macs_by_bits": _labelled(row.macs_by_bits),
            }
            for row in self.rows
        ]
        return _written(json.dumps({"rows": rows, "totals": self.totals()}, indent=2) + "\n", path)

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return a header and one line per row, without the totals, so that a column can be summed.

        `Row.parameters` is followed by a column for each bit width of the model (``parameters_1bit``), `Row.macs` by
        one for each pair of weight and input bits (``macs_1x1bit``). Shapes are written ``64x32x32``.

        Arguments, result and errors are as in `to_json`.
        """
        return _written(csv_text([self._csv_row(row) for row in self.rows]), path)

    def _csv_row(self, row: Row) -> dict[str, Any]:
        cells = {**asdict(row), "output_shape": "x".join(map(str, row.output_shape))}
        parameters, macs = row.parameters_by_bits, row.macs_by_bits
        more: dict[str, dict[str, Any]] = {
            "parameters": {f"parameters_{_label(b)}bit": parameters.get(b, 0) for b in self.parameters_by_bits},
            "macs": {**{f"macs_{_label(b)}bit": macs.get(b, 0) for b in self.macs_by_bits}, "bops": row.bops},
        }
        pairs = ({name: value, **more.get(name, {})} for name, value in cells.items() if name != "weights")
        return {name: value for part in pairs for name, value in part.items()}

    def __str__(self) -> str:
        header = ("(header)", *[""] * 8, format_int(self.header_bytes), "", "")
        total = ("total", "", "", "", "", *_numbers(self))
        rows = [None, *map(cells, self.rows), header, None, total]
        reasons = ["", *(row.keeps_float for row in self.rows), "", "", ""]
        columns = COLUMNS
        if any(reasons):
            columns = *COLUMNS, WHY
            rows = [row and (*row, why) for row, why in zip(rows, reasons, strict=True)]
        worst = []
        if self.costs:
            costs = ["", *(cost_text(self.costs.get(row.name)) for row in self.rows), "", "", ""]
            columns = *columns, Column("cost", is_right=True)
            rows = [row and (*row, cost) for row, cost in zip(rows, costs, strict=True)]
            worst = [most_costly(self.costs)]
        return "\n".join([*lines(rows, columns), "", *notes(self), *worst])

    def __repr__(self) -> str:
        return f"Summary({len(self.rows)} rows, {format_int(self.parameters)} parameters, {format_int(self.macs)} MACs)"


def cells(row: Row) -> tuple[str, ...]:
    """The row as text, in the order of `COLUMNS`."""
    shape = "×".join(map(str, row.output_shape))
    return row.name, row.type, shape, row.scheme, format_bits(row), *_numbers(row)


def _numbers(counts: Row | Summary) -> tuple[str, ...]:
    of_model = counts.parameters, counts.macs, counts.bops, counts.float_bytes, counts.packed_bytes
    return tuple(map(format_int, (*of_model, counts.saved_bytes, counts.lean_bytes)))


def notes(summary: Summary) -> list[str]:
    """Return the totals that do not fit in columns, one per line: counts by bits, compression, saved bytes."""
    parameters = [f"{bits:.3g}: {format_int(count)}" for bits, count in summary.parameters_by_bits.items()]
    macs = [f"{w:.3g}×{i:.3g}: {format_int(count)}" for (w, i), count in summary.macs_by_bits.items()]
    before, after = format_int(summary.float_bytes), format_int(summary.packed_bytes)
    return [
        f"parameters by bits         {'; '.join(parameters) or 0}",
        f"MACs by weight×input bits  {'; '.join(macs) or 0}",
        f"compression                {summary.compression:.2f} ({before} bytes to {after})",
        f"saved for the backward     {format_int(summary.saved_bytes)} bytes; if lean {format_int(summary.lean_bytes)}",
    ]


def format_int(value: int) -> str:
    """Format 1234567 as 1,234,567."""
    return f"{value:,}"


def format_bits(row: Row) -> str:
    """Weight and input bits as 1/32; log2(3) as 1.58."""
    return f"{row.weight_bits:.3g}/{row.input_bits:.3g}"


def _without_zeros(counts: Mapping[Key, int]) -> dict[Key, int]:
    return {key: count for key, count in counts.items() if count}


def _added(counts: Iterable[Mapping[Key, int]]) -> dict[Key, int]:
    total: Counter[Key] = Counter()
    for part in counts:
        total.update(part)
    return {key: total[key] for key in sorted(total)}


def _label(bits: float | tuple[float, float]) -> str:
    return "x".join(f"{number:g}" for number in bits) if isinstance(bits, tuple) else f"{bits:g}"


def _labelled(counts: Mapping[Key, int]) -> dict[str, int]:
    return {_label(bits): count for bits, count in counts.items()}


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is None:
        return text
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path (={str(path)!r}) must be in a folder that exists, {path.parent} does not")
    write_file(path, text)
    return text
