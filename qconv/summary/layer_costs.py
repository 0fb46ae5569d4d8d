"""The contents of a model, layer by layer: bits, parameters, multiply-accumulates, bit operations and bytes."""

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..ground.checks import check_module, in_a_line
from ..ground.table import screen_width
from ..layers import QuantizedLayer
from ..layers.bypassed import Watch
from ..layers.computed import computed_by, evaluated, parts_of_weight
from ..layers.copies import copied
from ..layers.naming import frozen_part
from ..layers.observed_run import as_written, random_state_kept, without_warnings
from ..layers.parents import FAST_PATHS
from ..quantizers import Quantizer
from .costs_table import FLOAT_BITS, Row, Summary, row_name
from .saved import REFUSED, Kept, kept_in_training, sample_of
from .terminal import screen_text

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def summary(model: nn.Module, input_size: Sequence[int], *, costs: Mapping[str, float] | None = None) -> Summary:
    """Print the contents of `model` as a table with totals, and return them as data.

    A terminal shows as much as its width allows: layers that repeat in one line, modules that multiply.

    Arguments, errors and counts are as in `summarize`, which prints nothing. ``costs`` adds a column with the cost of
    quantizing each layer, by its name, such as `qconv.Sensitivity.costs`; it shows all modules, whatever the width.

    Example:
        >>> table = summary(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), (3, 5, 5))  # doctest: +ELLIPSIS
        layer  type    output  scheme  bits w/in  parameters   MACs       BOPs  float bytes  packed bytes ...
        ...
        >>> table.macs, table.saved_bytes
        (1944, 588)
    """
    result = replace(summarize(model, input_size), costs=costs or {})
    width = screen_width()
    text = str(result) if width is None or costs else screen_text(result, width)
    print(text)  # noqa: T201  # it is there to be read on the screen
    return result


def summarize(model: nn.Module, input_size: Sequence[int]) -> Summary:
    """Count the contents of `model`, by a forward in evaluation on one sample of zeros.

    All forwards run on a copy with its own random state, so `model` does not change. A parameter shared by several
    modules counts once, with the first of them; a module that is called several times counts its multiply-accumulates
    each time.

    Multiply-accumulates count the convolution, transposed convolution or linear layer itself, padding included.
    The projections of `nn.MultiheadAttention` and of torchvision's shifted windows, which compute with the weights of
    linear layers without calling them, count with the attention. They do not include products elsewhere (of queries
    with keys, XNOR-Net's map of input magnitudes) nor the sampling of a deformable convolution, which counts as the
    convolution of its kernel; the layer that predicts its offsets counts separately.

    Saved bytes are the storages that autograd keeps for the backward, given which parameters of `model` require a
    gradient, and under any autocast around this call. A storage counts once, with the first module that saves it in its
    own forward: computations of a parent between its children count with the parent. Parameters and buffers do not
    count, nor do tensors that a checkpointed part computes again. The forward runs as in training, on numbers from 0 to
    1; modules in evaluation stay there if `model` itself is in training, and `torch.nn.SyncBatchNorm` always does.
    Quantizers that were not calibrated keep their ranges. If the model refuses a single sample in training, as batch
    norm refuses a single value per channel, two samples run and the bytes are halved; if it refuses two as well, it
    runs in evaluation with dropout layers on.

    The lean bytes come from another such forward after `qconv.lean`, in its exact form if `model` is exact. They count
    the tensors that the graph of the output holds in the end. With checkpointed parts they are an upper bound: hooks
    count them, and under hooks for saved tensors lean layers don't start from a tensor that another layer keeps. If a
    layer still keeps a float of the size of its input, `Row.keeps_float` gives the reason.

    Args:
        model: any module, quantized or not, that takes one tensor.
        input_size: the size of one sample, without the batch: (C, H, W) for images.

    Raises:
        TypeError: `model` is not a module, or is frozen (`qconv.freeze`); `input_size` not a sequence of whole numbers.
        ValueError: `input_size` has a dimension less than 1, or the model does not accept such an input; the model has
            lazy parameters without a shape, or nothing to count.
    """
    check_module(model)
    size = _checked_size(input_size)
    if (frozen := frozen_part(model)) is not None:
        raise TypeError(f"model: {frozen} is frozen: summarize the trained model that it was made from")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if nn.parameter.is_lazy(tensor):
            raise ValueError(f"model ({type(model).__name__}) has no shape for {name!r} yet: call it once before")
    with torch.inference_mode(False):
        trace = _trace(copied(model), size)
    from ..packed import packed_sizes  # pydantic and safetensors, which `import qconv` does not need

    packed, header = packed_sizes(model, size)
    seen: set[Tensor] = set()
    rows = []
    with evaluated(model):
        for name, module in _modules(model):
            own = [tensor for tensor in dict.fromkeys(_tensors(module)) if tensor not in seen]
            seen.update(own)
            if own or trace.macs[name] or trace.saved.bytes[name] or trace.lean.bytes[name]:
                rows.append(_row(name, module, own, trace, packed.get(name, 0)))
    if not rows:
        raise ValueError(f"model ({type(model).__name__}) has no parameters, buffers or layers to count")
    return Summary(tuple(rows), header)


def _checked_size(input_size: Sequence[int]) -> tuple[int, ...]:
    try:
        size = tuple(index(side) for side in input_size)
    except TypeError as error:
        raise TypeError(
            f"input_size (={in_a_line(input_size)}) must be a sequence of whole numbers, such as (3, 32, 32)"
        ) from error
    if not size or min(size) < 1:
        raise ValueError(f"input_size (={size}) must be one sample's shape, each dimension at least 1")
    return size


def _tensors(module: nn.Module) -> list[Tensor]:
    """The tensors of a module in the state dict, without its children; a computed weight replaces its sources."""
    passing = module._non_persistent_buffers_set
    buffers = [(name, buffer) for name, buffer in module.named_buffers(recurse=False) if name not in passing]
    named = [*module.named_parameters(recurse=False), *buffers]
    if not isinstance(module, QuantizedLayer) or computed_by(module) is None:
        return [tensor for _, tensor in named]
    parts = parts_of_weight(module)
    weight = nn.Parameter(module.weight.detach(), module.is_trained)
    return [tensor for name, tensor in named if name not in parts] + [weight]


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return all modules except quantizers and parametrizations inside layers, which count with the layer."""
    layers = [module for module in model.modules() if isinstance(module, QuantizedLayer)]
    children = [pair for layer in layers for pair in layer.named_children()]
    own = [child for name, child in children if isinstance(child, Quantizer) or name == "parametrizations"]
    inner = {module for child in own for module in child.modules()}
    return [(name, module) for name, module in model.named_modules() if module not in inner]


@dataclass
class _Trace:
    """The results of the forwards, by the names of the modules.

    ``bypassed`` are quantized layers that were never called although the forward computed with their weights.
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    macs: Counter[str] = field(default_factory=Counter)
    saved: Kept = field(default_factory=Kept)
    lean: Kept = field(default_factory=Kept)
    bypassed: set[str] = field(default_factory=set)


def _trace(model: nn.Module, size: tuple[int, ...]) -> _Trace:
    """Run the forwards on ``model``, a copy. Those in training mode may change it, so they come last."""
    _call_all_children_(model)
    modules = dict(_modules(model))
    modes = {module: module.training or not model.training for module in model.modules()}
    layers = [module for module in model.modules() if isinstance(module, QuantizedLayer)]
    trace, watch = _Trace(), Watch(model, layers)
    handles = [_record(trace, name, module) for name, module in modules.items()]
    try:
        with as_written(), random_state_kept(model), without_warnings():
            with torch.no_grad(), watch:
                model.eval()(sample_of(model, (1, *size)))
            for handle in handles:
                handle.remove()
            try:
                trace.saved, trace.lean = kept_in_training(model, modules, modes, size)
            except REFUSED:
                modes = {module: isinstance(module, DROPOUTS) for module in modes}
                trace.saved, trace.lean = kept_in_training(model, modules, modes, size)
    except REFUSED as error:
        raise ValueError(f"input_size (={size}) must be what the model takes: {error}") from error
    trace.bypassed = {name for name, module in modules.items() if module in watch.bypassed}
    return trace


def _call_all_children_(model: nn.Module) -> None:
    """Switch off all fast paths, of float parts, too: their layers count only if they are called."""
    for module_name, class_name, attribute, value in FAST_PATHS:
        kind = getattr(sys.modules.get(module_name), class_name, ())
        for module in model.modules():
            if isinstance(module, kind) and hasattr(module, attribute):
                setattr(module, attribute, value)


def _record(trace: _Trace, name: str, module: nn.Module) -> RemovableHandle:
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        trace.macs[name] += count_macs_of_children(module, args, kwargs)
        if isinstance(output, Tensor):
            trace.shapes[name] = tuple(output.shape[1:] if output.shape[:1] == (1,) else output.shape)
            trace.macs[name] += count_macs(module, args[0] if args else kwargs.get("input"), output)

    return module.register_forward_hook(record, with_kwargs=True)


def count_macs(module: nn.Module, input: Any, output: Tensor) -> int:
    """Return the multiply-accumulates of one call of a convolution, zero padding included, or of a linear layer.

    ``output.numel() · in_channels / groups · prod(kernel_size)``, also for a deformable convolution; for a transposed
    one ``input.numel() · out_channels / groups · prod(kernel_size)``; ``output.numel() · in_features`` for a linear
    one.
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


def count_macs_of_children(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the multiply-accumulates of linear layers that the module does not call, but reads the weights of.

    `nn.MultiheadAttention` multiplies each number of queries, keys, values and output by E weights. Shifted windows
    multiply each position of the padded image by ``qkv`` and ``proj``.
    """
    if isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward:
        named = dict(zip(("query", "key", "value"), args, strict=False)) | kwargs
        sizes = [named[name].numel() for name in ("query", "key", "value", "query")]
        return sum(sizes) * module.embed_dim
    swin = sys.modules.get("torchvision.models.swin_transformer")
    kinds = [getattr(swin, name, None) for name in ("ShiftedWindowAttention", "ShiftedWindowAttentionV2")]
    if any(kind is not None and type(module).forward is kind.forward for kind in kinds):
        own: Any = module
        batch, *sides, _ = (args[0] if args else kwargs["x"]).shape
        windows = [-(-side // step) * step for side, step in zip(sides, own.window_size, strict=True)]
        return batch * math.prod(windows) * (own.qkv.weight.numel() + own.proj.weight.numel())
    return 0


def _is_deformable(module: nn.Module) -> bool:
    """Whether it is torchvision's layer; always False if torchvision was never imported."""
    layer = getattr(sys.modules.get("torchvision.ops"), "DeformConv2d", None)
    return layer is not None and isinstance(module, layer)


def _row(name: str, module: nn.Module, own: list[Tensor], trace: _Trace, packed_bytes: int) -> Row:
    scheme, weight_bits, input_bits, weights = "float", FLOAT_BITS, FLOAT_BITS, 0
    if isinstance(module, QuantizedLayer) and name in trace.bypassed:
        scheme = f"float: never called, not {module.scheme.name}"
    elif isinstance(module, QuantizedLayer):
        scheme, weight_bits = module.scheme.name, module.weight_quantizer.bits
        input_bits = FLOAT_BITS if _is_deformable(module) else module.input_quantizer.bits
        is_computed = computed_by(module) is not None
        if is_computed or any(tensor is module.weight for tensor in own):  # unless another layer has counted it
            weights = module.weight.numel()
    return Row(
        name=row_name(name),
        type=type(module).__name__,
        output_shape=trace.shapes.get(name, ()),
        scheme=scheme,
        weight_bits=weight_bits,
        input_bits=input_bits,
        parameters=sum(tensor.numel() for tensor in own if isinstance(tensor, nn.Parameter)),
        weights=weights,
        macs=trace.macs[name],
        float_bytes=sum(tensor.numel() * tensor.element_size() for tensor in own),
        packed_bytes=packed_bytes,
        saved_bytes=trace.saved.bytes[name],
        lean_bytes=trace.lean.bytes[name],
        keeps_float=trace.lean.floats.get(name, ""),
    )
