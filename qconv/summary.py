"""What a model consists of, layer by layer: scheme, bits, multiply-accumulates and bytes."""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .layers import QuantizedLayer
from .quantizers import Quantizer

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
SCALE_BYTES = 4
TEXT_COLUMNS = 4
HEAD = ("layer", "type", "output", "scheme", "bits w/in", "parameters", "MACs", "float bytes", "packed bytes")


@dataclass(frozen=True)
class Row:
    """One module that has parameters or buffers of its own.

    Attributes:
        name: the module's name in the model.
        type: its class.
        output_shape: of one sample, without the batch.
        scheme: of a quantized layer; "float" of any other.
        weight_bits: information per weight; 32 where it is not quantized.
        input_bits: information per input value; 32 where it is not quantized.
        parameters: of the float layer: weight and bias, without the tensors that its quantizers learn.
        macs: multiply-accumulates for one sample; of convolutions and linear layers, others count 0.
        float_bytes: parameters and buffers as the float layer stores them.
        packed_bytes: as `float_bytes`, with a quantized weight as ceil(bits · numel / 8) bytes and 4 bytes a scale.
    """

    name: str
    type: str
    output_shape: tuple[int, ...]
    scheme: str
    weight_bits: float
    input_bits: float
    parameters: int
    macs: int
    float_bytes: int
    packed_bytes: int


@dataclass(frozen=True)
class Summary:
    """The rows of a model in the order of its modules, and their totals; `str` of it is a table."""

    rows: tuple[Row, ...]

    @property
    def parameters(self) -> int:
        """Parameters of the float model."""
        return sum(row.parameters for row in self.rows)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of one sample."""
        return sum(row.macs for row in self.rows)

    @property
    def float_bytes(self) -> int:
        """Bytes of the float model."""
        return sum(row.float_bytes for row in self.rows)

    @property
    def packed_bytes(self) -> int:
        """Bytes with the quantized weights packed."""
        return sum(row.packed_bytes for row in self.rows)

    def __str__(self) -> str:
        total = ("total", "", "", "", "", *map(format_int, self._totals()))
        table = [HEAD, *(cells(row) for row in self.rows), total]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [_line(cells, widths) for cells in table]
        rule = "  ".join("-" * width for width in widths)
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])

    def _totals(self) -> tuple[int, ...]:
        return self.parameters, self.macs, self.float_bytes, self.packed_bytes


def cells(row: Row) -> tuple[str, ...]:
    """The row as text, in the order of `HEAD`."""
    shape = "×".join(map(str, row.output_shape))
    bits = f"{row.weight_bits:.3g}/{row.input_bits:.3g}"
    numbers = map(format_int, (row.parameters, row.macs, row.float_bytes, row.packed_bytes))
    return row.name, row.type, shape, row.scheme, bits, *numbers


def format_int(value: int) -> str:
    """1234567 as 1,234,567."""
    return f"{value:,}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    text, numbers = slice(None, TEXT_COLUMNS), slice(TEXT_COLUMNS, None)
    left = [cell.ljust(width) for cell, width in zip(cells[text], widths[text], strict=True)]
    right = [cell.rjust(width) for cell, width in zip(cells[numbers], widths[numbers], strict=True)]
    return "  ".join([*left, *right])


def summary(model: nn.Module, input_size: Sequence[int]) -> Summary:
    """Count what `model` is made of, by one forward of a batch of one in evaluation mode.

    The forward runs on a copy, so neither training mode nor buffers of `model` change. A parameter that several modules
    share counts once, with the first of them; a module that is called several times counts its multiply-accumulates as
    often. Products outside of convolutions and linear layers (attention) are not counted.

    Args:
        model: any module, quantized or not.
        input_size: of one sample, without the batch: (C, H, W) for pictures.

    Raises:
        ValueError: if `input_size` has a dimension less than 1, or the model does not take such an input.
    """
    if not input_size or min(input_size) < 1:
        raise ValueError(f"input_size (={tuple(input_size)}) must be one sample's shape, each dimension at least 1")
    shapes, macs = _trace(copy.deepcopy(model).eval(), tuple(input_size))
    seen: set[int] = set()
    rows = []
    for name, module in _modules(model):
        own = [tensor for tensor in _float_tensors(module) if id(tensor) not in seen]
        seen.update(map(id, own))
        if own or macs.get(name):
            rows.append(_row(name, module, own, shapes.get(name, ()), macs.get(name, 0)))
    return Summary(tuple(rows))


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules but quantizers: what those hold is counted with their layer."""
    return ((name, module) for name, module in model.named_modules() if not isinstance(module, Quantizer))


def _float_tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _trace(model: nn.Module, input_size: tuple[int, ...]) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    """Output shape (of the last call) and multiply-accumulates (of all calls) of every module."""
    shapes: dict[str, tuple[int, ...]] = {}
    macs: dict[str, int] = {}

    def hook(name: str):
        def record(module: nn.Module, args: tuple[Tensor, ...], output: object) -> None:
            if isinstance(output, Tensor):
                shapes[name] = tuple(output.shape[1:])
                macs[name] = macs.get(name, 0) + count_macs(module, args, output)

        return record

    for name, module in _modules(model):
        module.register_forward_hook(hook(name))
    reference = next(model.parameters(), torch.zeros(()))
    sample = torch.zeros(1, *input_size, dtype=reference.dtype, device=reference.device)
    try:
        with torch.no_grad():
            model(sample)
    except RuntimeError as error:
        raise ValueError(f"input_size (={input_size}) must be what the model takes: {error}") from error
    return shapes, macs


def count_macs(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> int:
    """Multiply-accumulates of one call: of a convolution, zero padding included, or of a linear layer."""
    if isinstance(module, nn.Linear):
        return output.numel() * module.in_features
    if isinstance(module, CONVOLUTIONS):
        return output.numel() * module.in_channels // module.groups * math.prod(module.kernel_size)
    if isinstance(module, TRANSPOSED):
        return args[0].numel() * module.out_channels // module.groups * math.prod(module.kernel_size)
    return 0


def _row(name: str, module: nn.Module, own: list[Tensor], shape: tuple[int, ...], macs: int) -> Row:
    float_bytes = sum(tensor.numel() * tensor.element_size() for tensor in own)
    quantized = isinstance(module, QuantizedLayer)
    weight_bits = module.weight_quantizer.bits if quantized else 32
    packed_bytes = float_bytes
    if quantized:
        packed_bytes += sum(tensor.numel() * tensor.element_size() for tensor in _float_tensors(module.input_quantizer))
        if weight_bits < 32 and any(tensor is module.weight for tensor in own):
            packed_bytes += _packed_weight(module) - module.weight.numel() * module.weight.element_size()
    return Row(
        name=name or "(model)",
        type=type(module).__name__,
        output_shape=shape,
        scheme=module.scheme.name if quantized else "float",
        weight_bits=weight_bits,
        input_bits=module.input_quantizer.bits if quantized else 32,
        parameters=sum(tensor.numel() for tensor in own if isinstance(tensor, nn.Parameter)),
        macs=macs,
        float_bytes=float_bytes,
        packed_bytes=packed_bytes,
    )


def _packed_weight(layer: QuantizedLayer) -> int:
    """Bytes of the codes and the scales; what the weight quantizer has learned is in these already.

    A quantizer that defines no codes counts with one scale.
    """
    codes = math.ceil(layer.weight_quantizer.bits * layer.weight.numel() / 8)
    has_codes = type(layer.weight_quantizer).codes is not Quantizer.codes
    return codes + SCALE_BYTES * (layer.weight_codes().scale.numel() if has_codes else 1)
