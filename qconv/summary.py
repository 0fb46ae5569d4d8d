"""What a model consists of, layer by layer: bits, parameters, multiply-accumulates, bit operations and bytes."""

import copy
import csv
import io
import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import index
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .layers import QuantizedLayer
from .quantizers import Quantizer

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
FLOAT_BITS = 32
SCALE_BYTES = 4
TEXT_COLUMNS = 4
HEAD = (
    *("layer", "type", "output", "scheme", "bits w/in"),
    *("parameters", "MACs", "BOPs", "float bytes", "packed bytes", "saved bytes"),
)

Key = TypeVar("Key", float, tuple[float, float])


@dataclass(frozen=True)
class Row:
    """One module that has parameters or buffers of its own, multiplies, or keeps something for the backward.

    Attributes:
        name: the module's name in the model.
        type: its class.
        output_shape: of one sample, without the batch; of a dimension 0 that is not the batch of one, with it.
        scheme: of a quantized layer; "float" of any other.
        weight_bits: information per weight; 32 where it is not quantized, whatever the dtype.
        input_bits: information per input value; 32 where it is not quantized, whatever the dtype, and in deformable
            layers, which multiply the weight with values between those of the quantized input.
        parameters: of the float layer: weight and bias, without the tensors that its quantizers learn.
        weights: how many of the parameters are a quantized layer's weights, of `weight_bits`; the others have 32.
        macs: multiply-accumulates for one sample; of convolutions and linear layers, others count 0.
        float_bytes: parameters and buffers as the float layer stores them.
        packed_bytes: as `float_bytes`, with a quantized weight as ceil(bits · numel / 8) bytes and 4 bytes a scale, and
            with the parameters of the input's quantizer, which inference needs. Schedules (buffers) are not shipped.
        saved_bytes: what autograd keeps of one sample for the backward: see `summarize`.
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
        """Bit operations, ``macs · weight_bits · input_bits``, rounded where bits are no whole number.

        So counts Bayesian Bits (arXiv:2005.07093); float counts as 32 bits, 1024 operations a multiply-accumulate.
        Papers on binary networks often give ``OPs = binary macs / 64 + float macs`` instead: take `macs_by_bits`.
        """
        return round(self.macs * self.weight_bits * self.input_bits)


@dataclass(frozen=True, repr=False)
class Summary:
    """The rows of a model in the order of its modules, and their totals; ``str`` of it is a table."""

    rows: tuple[Row, ...]

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
        """Bytes with the quantized weights packed."""
        return sum(row.packed_bytes for row in self.rows)

    @property
    def compression(self) -> float:
        """``float_bytes / packed_bytes``; 1 for a model that stores nothing."""
        return self.float_bytes / self.packed_bytes if self.packed_bytes else 1.0

    @property
    def saved_bytes(self) -> int:
        """Bytes that autograd keeps of one sample for the backward."""
        return sum(row.saved_bytes for row in self.rows)

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
        }

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """``{"rows": [...], "totals": {...}}``: a row's fields with `Row.bops` and the counts by bits, and `totals`.

        Args:
            path: where to write it, too. The file is replaced as a whole or not at all.

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
        """A header and one line a row, without the totals, so that a column can be summed.

        After `Row.parameters` stands a column for each bit width of the model (``parameters_1bit``), after `Row.macs`
        one for each pair of weight and input bits (``macs_1x1bit``). Shapes are written ``64x32x32``.

        Arguments, result and errors are those of `to_json`.
        """
        lines = [self._csv_line(row) for row in self.rows]
        text = io.StringIO()
        writer = csv.DictWriter(text, lines[0] if lines else (), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        return _written(text.getvalue(), path)

    def _csv_line(self, row: Row) -> dict[str, Any]:
        parameters, macs = row.parameters_by_bits, row.macs_by_bits
        return {
            "name": row.name,
            "type": row.type,
            "output_shape": "x".join(map(str, row.output_shape)),
            "scheme": row.scheme,
            "weight_bits": row.weight_bits,
            "input_bits": row.input_bits,
            "parameters": row.parameters,
            **{f"parameters_{_label(bits)}bit": parameters.get(bits, 0) for bits in self.parameters_by_bits},
            "macs": row.macs,
            **{f"macs_{_label(bits)}bit": macs.get(bits, 0) for bits in self.macs_by_bits},
            "bops": row.bops,
            "float_bytes": row.float_bytes,
            "packed_bytes": row.packed_bytes,
            "saved_bytes": row.saved_bytes,
        }

    def __str__(self) -> str:
        numbers = self.parameters, self.macs, self.bops, self.float_bytes, self.packed_bytes, self.saved_bytes
        total = ("total", "", "", "", "", *map(format_int, numbers))
        table = [HEAD, *(cells(row) for row in self.rows), total]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [_line(cells, widths) for cells in table]
        rule = "  ".join("-" * width for width in widths)
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], "", *notes(self)])

    def __repr__(self) -> str:
        return f"Summary({len(self.rows)} rows, {format_int(self.parameters)} parameters, {format_int(self.macs)} MACs)"


def cells(row: Row) -> tuple[str, ...]:
    """The row as text, in the order of `HEAD`."""
    numbers = row.parameters, row.macs, row.bops, row.float_bytes, row.packed_bytes, row.saved_bytes
    shape = "×".join(map(str, row.output_shape))
    return row.name, row.type, shape, row.scheme, format_bits(row), *map(format_int, numbers)


def notes(summary: Summary) -> list[str]:
    """The totals that do not fit in columns: a line for the parameters by bits, the MACs by bits, the compression."""
    parameters = [f"{bits:.3g}: {format_int(count)}" for bits, count in summary.parameters_by_bits.items()]
    macs = [f"{w:.3g}×{i:.3g}: {format_int(count)}" for (w, i), count in summary.macs_by_bits.items()]
    before, after = format_int(summary.float_bytes), format_int(summary.packed_bytes)
    return [
        f"parameters by bits         {'; '.join(parameters) or 0}",
        f"MACs by weight×input bits  {'; '.join(macs) or 0}",
        f"compression                {summary.compression:.2f} ({before} bytes to {after})",
    ]


def format_int(value: int) -> str:
    """1234567 as 1,234,567."""
    return f"{value:,}"


def format_bits(row: Row) -> str:
    """Weight and input bits as 1/32; log2(3) as 1.58."""
    return f"{row.weight_bits:.3g}/{row.input_bits:.3g}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    text, numbers = slice(None, TEXT_COLUMNS), slice(TEXT_COLUMNS, None)
    left = [cell.ljust(width) for cell, width in zip(cells[text], widths[text], strict=True)]
    right = [cell.rjust(width) for cell, width in zip(cells[numbers], widths[numbers], strict=True)]
    return "  ".join([*left, *right])


def _without_zeros(counts: Mapping[Key, int]) -> dict[Key, int]:
    return {key: count for key, count in counts.items() if count}


def _added(counts: Iterable[Mapping[Key, int]]) -> dict[Key, int]:
    total: Counter[Key] = Counter()
    for each in counts:
        total.update(each)
    return {key: total[key] for key in sorted(total)}


def _label(bits: float | tuple[float, float]) -> str:
    return "x".join(f"{each:g}" for each in bits) if isinstance(bits, tuple) else f"{bits:g}"


def _labelled(counts: Mapping[Key, int]) -> dict[str, int]:
    return {_label(bits): count for bits, count in counts.items()}


def _written(text: str, path: str | os.PathLike[str] | None) -> str:
    if path is None:
        return text
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path (={str(path)!r}) must be in a folder that exists, {path.parent} does not")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(text.encode())
        temporary.replace(path)
    finally:  # renamed away, or to be removed
        temporary.unlink(missing_ok=True)
    return text


def summary(model: nn.Module, input_size: Sequence[int]) -> Summary:
    """Print what `model` is made of as a table with its totals, and return it as data.

    Arguments, errors and what is counted are those of `summarize`, which prints nothing.

    Example:
        >>> table = summary(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), (3, 5, 5))  # doctest: +ELLIPSIS
        layer  type    output  scheme  bits w/in  parameters   MACs       BOPs  float bytes  packed bytes  saved bytes
        ...
        >>> table.macs, table.saved_bytes
        (1944, 588)
    """
    result = summarize(model, input_size)
    print(result)  # noqa: T201  # it is there to be read on the screen
    return result


def summarize(model: nn.Module, input_size: Sequence[int]) -> Summary:
    """Count what `model` is made of, by one forward of a batch of one, a sample of zeros.

    The forward runs on a copy and with a random state of its own, so nothing of `model` changes. A parameter that
    several modules share counts once, with the first of them; a module that is called several times counts its
    multiply-accumulates as often.

    Multiply-accumulates are those of the convolution, transposed convolution or linear layer itself, padding included.
    Not counted are products elsewhere (attention, XNOR-Net's map of input magnitudes) and, of a deformable convolution,
    the sampling: it counts as the convolution of its kernel, and the layer that predicts its offsets on its own.

    Saved bytes are the storages that autograd keeps for the backward as the parameters of `model` require it, under
    an autocast around this call, too. A storage counts once, with the first module that saves it in its own forward:
    what a parent computes between its children counts with the parent. Parameters and buffers do not count, nor does
    what a checkpointed part computes again. The forward is that of evaluation with dropout layers on, so that a sample
    alone is enough: the statistics that batch norm keeps of a training batch, two numbers a channel, are not in it.

    Args:
        model: any module, quantized or not, that takes one tensor.
        input_size: of one sample, without the batch: (C, H, W) for pictures.

    Raises:
        TypeError: `model` is no module, or `input_size` no sequence of whole numbers.
        ValueError: `input_size` has a dimension less than 1, or the model does not take such an input; the model has
            lazy parameters without a shape, or nothing that could be counted.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model (={model!r}) must be a torch.nn.Module")
    size = _checked_size(input_size)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"model ({type(model).__name__}) has no shape for {name!r} yet: call it once before")
    with torch.inference_mode(False):
        trace = _trace(copy.deepcopy(model).eval(), size)
    seen: set[Tensor] = set()
    rows = []
    for name, module in _modules(model):
        own = _unseen([*module.parameters(recurse=False), *module.buffers(recurse=False)], seen)
        if own or trace.macs[name] or trace.saved[name]:
            rows.append(_row(name, module, own, trace, seen))
    if not rows:
        raise ValueError(f"model ({type(model).__name__}) has no parameters, buffers or layers to count")
    return Summary(tuple(rows))


def _checked_size(input_size: Sequence[int]) -> tuple[int, ...]:
    try:
        size = tuple(index(each) for each in input_size)
    except TypeError as error:
        raise TypeError(
            f"input_size (={input_size!r}) must be a sequence of whole numbers, such as (3, 32, 32)"
        ) from error
    if not size or min(size) < 1:
        raise ValueError(f"input_size (={size}) must be one sample's shape, each dimension at least 1")
    return size


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """All modules but the quantizers of layers: what those hold is counted with their layer."""
    layers = [module for module in model.modules() if isinstance(module, QuantizedLayer)]
    quantizers = [child for layer in layers for child in layer.children() if isinstance(child, Quantizer)]
    inner = {module for quantizer in quantizers for module in quantizer.modules()}
    return [(name, module) for name, module in model.named_modules() if module not in inner]


def _unseen(tensors: Iterable[Tensor], seen: set[Tensor]) -> list[Tensor]:
    """The tensors that were not met before, each once; they are remembered."""
    new = [tensor for tensor in dict.fromkeys(tensors) if tensor not in seen]
    seen.update(new)
    return new


@dataclass
class _Trace:
    """What one forward showed of the modules, by name.

    Attributes:
        shapes: output shape of the last call.
        macs: multiply-accumulates of all calls.
        saved: bytes that were first saved for the backward in the module's own forward.
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    macs: Counter[str] = field(default_factory=Counter)
    saved: Counter[str] = field(default_factory=Counter)


def _trace(model: nn.Module, input_size: tuple[int, ...]) -> _Trace:
    trace = _Trace()
    running: list[str] = []
    # The storages themselves, not their addresses: a freed address can be another tensor's.
    known = {tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())}

    def enter(name: str) -> Callable[..., None]:
        return lambda module, args: running.append(name)

    def leave(name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            running.pop()
            if isinstance(output, Tensor):
                trace.shapes[name] = tuple(output.shape[1:] if output.shape[:1] == (1,) else output.shape)
                trace.macs[name] += count_macs(module, args[0] if args else kwargs.get("input"), output)

        return record

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage not in known:
            known.add(storage)
            trace.saved[running[-1]] += storage.nbytes()
        return tensor

    for name, module in _modules(model):
        module.register_forward_pre_hook(enter(name))
        module.register_forward_hook(leave(name), with_kwargs=True, always_call=True)
        if isinstance(module, DROPOUTS):
            module.train()
    floats = (tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point())
    reference = next(floats, torch.zeros(()))
    sample = torch.zeros(1, *input_size, dtype=reference.dtype, device=reference.device)
    try:
        with _random_state_kept(sample.device), torch.enable_grad(), saved_tensors_hooks(save, lambda tensor: tensor):
            model(sample)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as error:
        raise ValueError(f"input_size (={input_size}) must be what the model takes: {error}") from error
    return trace


def _random_state_kept(device: torch.device):
    if device.type in ("cpu", "meta"):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)


def count_macs(module: nn.Module, input: Any, output: Tensor) -> int:
    """Multiply-accumulates of one call: of a convolution, zero padding included, or of a linear layer.

    ``output.numel() · in_channels / groups · prod(kernel_size)``, a deformable convolution's likewise; of a transposed
    one ``input.numel() · out_channels / groups · prod(kernel_size)``; ``output.numel() · in_features`` of a linear one.
    """
    if isinstance(module, nn.Linear):
        return output.numel() * module.in_features
    if isinstance(module, CONVOLUTIONS):
        return output.numel() * module.in_channels // module.groups * math.prod(module.kernel_size)
    if isinstance(module, TRANSPOSED):
        return input.numel() * module.out_channels // module.groups * math.prod(module.kernel_size)
    if _is_deformable(module):
        weight: Any = module.weight  # (C_out, C_in / groups, *kernel_size)
        return output.numel() * weight[0].numel()
    return 0


def _is_deformable(module: nn.Module) -> bool:
    """Whether it is torchvision's layer; where torchvision was never imported, nothing is."""
    layer = getattr(sys.modules.get("torchvision.ops"), "DeformConv2d", None)
    return layer is not None and isinstance(module, layer)


def _row(name: str, module: nn.Module, own: list[Tensor], trace: _Trace, seen: set[Tensor]) -> Row:
    scheme, weight_bits, input_bits, weights = "float", FLOAT_BITS, FLOAT_BITS, 0
    packed_bytes = float_bytes = _bytes(own)
    if isinstance(module, QuantizedLayer):
        scheme, weight_bits = module.scheme.name, module.weight_quantizer.bits
        input_bits = FLOAT_BITS if _is_deformable(module) else module.input_quantizer.bits
        packed_bytes += _bytes(_unseen(module.input_quantizer.parameters(), seen))
        if any(tensor is module.weight for tensor in own):  # not where another layer has counted it
            weights = module.weight.numel()
            if weight_bits < FLOAT_BITS:
                packed_bytes += _packed_weight(module) - _bytes([module.weight])
    return Row(
        name=name or "(model)",
        type=type(module).__name__,
        output_shape=trace.shapes.get(name, ()),
        scheme=scheme,
        weight_bits=weight_bits,
        input_bits=input_bits,
        parameters=sum(tensor.numel() for tensor in own if isinstance(tensor, nn.Parameter)),
        weights=weights,
        macs=trace.macs[name],
        float_bytes=float_bytes,
        packed_bytes=packed_bytes,
        saved_bytes=trace.saved[name],
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _packed_weight(layer: QuantizedLayer) -> int:
    """Bytes of the codes and the scales; what the weight quantizer has learned is in these already.

    A quantizer that has no integer codes counts with one scale.
    """
    codes = math.ceil(layer.weight_quantizer.bits * layer.weight.numel() / 8)
    try:
        scales = layer.weight_codes().scale.numel()
    except TypeError:
        scales = 1
    return codes + SCALE_BYTES * scales
