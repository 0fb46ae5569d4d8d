"""The comparison of a frozen model with the trained one."""

import copy
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from ..convert import to_float
from ..function.sums import output_scale, plus, scales_follow
from ..ground.table import Column, least_width, lines, wrap
from ..layers import QuantizedLayer
from ..layers.copies import copied
from ..lean import lean
from ..packed import load_packed
from ..packed.tensors import inner_model
from ..program.operations import Quantize
from ..quantizers import Identity, Whole
from ..quantizers.base import whole_of
from .build import FrozenModel, build
from .defaults import of_shipping
from .integers import Quantized, from_zero

HEADS = "layer", "arithmetic", "codes ≠", "error", "of bound", "drift"
COLUMNS = tuple(map(Column, HEADS))
LEFT_OUT: tuple[tuple[str, ...], ...] = ((), ("of bound",), ("of bound", "drift"))  # on narrower and narrower screens
CLOSE = 1e-5  # of the largest output: the possible difference of two orders of float sums
SURE, SHORT = 8, 1152  # times the largest error of the trained network's float32 in a channel, for sums of SHORT terms
FEW = 64  # numbers of a channel whose errors may all be small by chance
UNIT = 2.0**-24  # the largest relative rounding error of float32
TINY = 1e-37  # near the smallest normal float32: smaller numbers may become 0


@dataclass(frozen=True)
class LayerCheck:
    """The result of checking one layer on the inputs that the frozen network itself gives it.

    Attributes:
        name: the name of the layer.
        arithmetic: "binary", "offset", "integer", "shift" or "float".
        codes: number of codes that differ from the trained quantizer's of the same floats.
        error: the largest difference of an input from the exact result of the trained modules before the layer, on the
            outputs of the layers before them.
        of_bound: the largest used share of what rounding explains of it; 1 at the limit.
        drift: number of codes that differ from those of the exact result.
        elements: number of inputs.
    """

    name: str
    arithmetic: str
    codes: int = 0
    error: float = 0.0
    of_bound: float = 0.0
    drift: int = 0
    elements: int = 0

    @property
    def equal(self) -> bool:
        """Whether codes are equal, and floats agree within rounding."""
        return not self.reason

    @property
    def reason(self) -> str:
        """Return the differences in words; empty if there are none."""
        if self.codes:
            return f"{self.codes} of {self.elements:,} codes are not the trained quantizer's"
        if self.of_bound <= 1:
            return ""
        return f"its input is off by up to {self.error:.1e}, {self.of_bound:.3g} times what rounding explains"

    def merged(self, other: "LayerCheck") -> "LayerCheck":
        """Return the result for the inputs of both."""
        return replace(
            self,
            codes=self.codes + other.codes,
            error=_larger(self.error, other.error),
            of_bound=_larger(self.of_bound, other.of_bound),
            drift=self.drift + other.drift,
            elements=self.elements + other.elements,
        )


@dataclass(frozen=True)
class Verification:
    """The result of `verify`; ``print`` shows it as a table.

    Attributes:
        layers: one for each quantized layer, in the order of the model.
        guided: the largest difference between an output and the exact result of the trained modules on the outputs of
            the layers before them.
        difference: the largest difference between an output and the trained network's.
        largest: the largest output.
        decisions: number of inputs that get another class than from the trained network (with one output: another
            sign), in any place where outputs have several.
        samples: number of inputs.
        of_bound: the largest used share of what `guided` may be; 1 at the limit.
        last: the name of the quantized layer that runs last.
    """

    layers: tuple[LayerCheck, ...]
    guided: float
    difference: float
    largest: float
    decisions: int
    samples: int
    of_bound: float = 0.0
    last: str = ""

    @property
    def first_difference(self) -> LayerCheck | None:
        """The first layer that is not equal."""
        return next((layer for layer in self.layers if not layer.equal), None)

    @property
    def equal(self) -> bool:
        """Whether all integers are equal, and all codes and floats, outputs included, agree within rounding."""
        return self.first_difference is None and self.of_bound <= 1

    def __str__(self) -> str:
        return self.text()

    def text(self, width: int | None = None) -> str:
        """Return the table and the result, in at most `width` columns if possible; None sets no limit."""
        outcome = (
            f"{self._verdict()}; outputs differ from the trained ones by up to {self.difference:.1e} of "
            f"{self.largest:.3g}; {self.decisions} of {self.samples} predicted classes differ"
        )
        cells = [_cells(layer) for layer in self.layers]
        tables = [_without(heads, cells) for heads in LEFT_OUT]
        fitting = (table for table in tables if width is None or least_width(*table) <= width)
        return "\n".join([*lines(*next(fitting, tables[-1]), width), *wrap(outcome, width or len(outcome))])

    def _verdict(self) -> str:
        first = self.first_difference
        if first is not None:
            return f"not equal: '{first.name}' is the first layer that differs: {first.reason}"
        if self.equal:
            return "equal"
        where = f"what follows '{self.last}', the last quantized layer," if self.last else "the network"
        return (
            f"not equal: {where} has outputs that are off by up to {self.guided:.1e}, {self.of_bound:.3g} times "
            "what rounding explains"
        )


def _without(heads: Sequence[str], cells: Sequence[Sequence[str]]) -> tuple[list[list[str]], list[Column]]:
    """Return rows and columns without the named columns."""
    kept = [place for place, head in enumerate(HEADS) if head not in heads]
    return [[row[place] for place in kept] for row in cells], [COLUMNS[place] for place in kept]


def _cells(layer: LayerCheck) -> tuple[str, ...]:
    """The layer as text, in the order of `COLUMNS`."""
    is_integer = layer.arithmetic != "float"
    counts = (str(layer.codes), f"{layer.drift} of {layer.elements:,}") if is_integer else ("", "")
    return layer.name, layer.arithmetic, counts[0], f"{layer.error:.1e}", f"{layer.of_bound:.2f}", counts[1]


@of_shipping()
def verify(
    model: nn.Module, frozen: FrozenModel | str | os.PathLike[str], inputs: Tensor | Iterable[Any]
) -> Verification:
    """Compare a trained model with its frozen form, or with a packed file, on real inputs, layer by layer.

    The frozen network runs as it is shipped, on its own codes, and the trained one follows it in float64: each of its
    quantized layers takes the input that the frozen network gave it. So each layer is checked by itself: its codes must
    be those of the trained quantizer for the same floats, every one, and the floats the exact result of the trained
    modules, applied to the trained layer's exact sums. Rounding explains 8 times the largest error that the trained
    modules make in float32, in a channel.

    The outputs, and with them the decisions, must agree with the exact ones alike. The trained network on its own codes
    has other elements fall to the other side of an edge, since float sums depend on their order; the outputs and
    decisions that differ from it are counted.

    Both networks run on the CPU, in float32 and eagerly: `torch.compile` and `torch.autocast` are switched off, since
    the shipped model computes in integers and float32. A network that was trained under autocast is compared by its
    weights.

    Args:
        model: the trained model; wrappers that compile it or spread it over devices are removed.
        frozen: its frozen form, or a packed file, which is loaded and frozen.
        inputs: one batch or several; of ``(images, labels)``, as a loader gives them, the images.

    Raises:
        ValueError: a frozen model with other layers; no input, or one with NaN or inf.
        TypeError: `frozen` is neither a frozen model nor a path; the output of a model is not a tensor.
        PackedFileError: a file that is damaged, or of another model.
    """
    if isinstance(model, FrozenModel) or not isinstance(frozen, FrozenModel | str | os.PathLike):
        given = f"model ({type(model).__name__}), frozen ({type(frozen).__name__})"
        raise TypeError(f"{given} must be the trained model, and what qconv.freeze made of it or a packed file")
    model = lean(copied(inner_model(model)).eval().cpu(), False)
    if not isinstance(frozen, FrozenModel):
        frozen = build(load_packed(frozen, to_float(copy.deepcopy(model))), None)
    elif any(tensor.device.type != "cpu" for tensor in (*frozen.parameters(), *frozen.buffers())):
        frozen = copy.deepcopy(frozen).cpu()
    names = {name: layer for name, layer in model.named_modules() if isinstance(layer, QuantizedLayer)}
    for told in frozen.layers:
        if told.name not in names:
            raise ValueError(
                f"the frozen model has a layer '{told.name}', the trained one has no quantized layer there"
            )
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(device, enabled=False))
        if any(hasattr(module, "_orig_mod") for module in (*model.modules(), *frozen.modules())):
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        return _compared(model, frozen, (inputs,) if _is_batch(inputs) else inputs)


def _is_batch(inputs: Any) -> bool:
    """Whether it is one batch: a tensor, or one with labels."""
    if isinstance(inputs, tuple | list) and len(inputs) == 2:
        kinds = [isinstance(each, Tensor) and each.is_floating_point() for each in inputs]
        return kinds == [True, False] and isinstance(inputs[1], Tensor)
    return isinstance(inputs, Tensor)


def _compared(model: nn.Module, frozen: FrozenModel, inputs: Iterable[Any]) -> Verification:
    checks = {told.name: LayerCheck(told.name, told.arithmetic) for told in frozen.layers}
    guided = differs = largest = of_bound = 0.0
    decisions = samples = 0
    follower = _Follower(model, checks)
    for number, batch in enumerate(inputs):
        if isinstance(batch, tuple | list) and batch and isinstance(batch[0], Tensor):  # with labels
            batch = batch[0]
        if not isinstance(batch, Tensor):
            raise TypeError(f"inputs must be tensors, or (tensor, labels), not {type(batch).__name__}")
        batch = batch.cpu()
        if not batch.isfinite().all():
            raise ValueError(f"inputs have NaN or inf in batch {number}: pass typical inputs")
        trained = leaves(model(batch))
        own, output = own_run(frozen, batch)
        exact, rounded = follower.run(batch, own)
        samples += len(batch)
        for got, wanted, low, first in zip(output, exact, rounded, trained, strict=True):
            if not first.numel():
                continue
            off, share = _off(got, wanted, low, follower.sure)
            guided, of_bound = _larger(guided, off), _larger(of_bound, share)
            differs = _larger(differs, float(difference(got, first).max()))
            largest = max(largest, float(first.double().abs().max()))
        differing = [other_decisions(a, b, len(batch)) for a, b in zip(trained, output, strict=True)]
        decisions += int(torch.stack(differing).any(0).sum())
    if not samples:
        raise ValueError("inputs must hold at least one sample")
    called = tuple(check for check in follower.checks.values() if check.elements or check.of_bound)
    return Verification(called, guided, differs, largest, decisions, samples, of_bound, follower.last)


def leaves(output: Any) -> list[Tensor]:
    """Return the tensors of an output."""
    leaves = tree_flatten_with_path(output)[0]
    for path, leaf in leaves:
        if not isinstance(leaf, Tensor):
            where = f" at {keystr(path)} of its {type(output).__name__}" if path else ""
            raise TypeError(f"model returns {type(leaf).__name__}{where}; it must return tensors")
    if not leaves:
        raise TypeError(f"model returns an empty {type(output).__name__}; it must return tensors")
    return [leaf for _, leaf in leaves]


class Own(NamedTuple):
    """The input of a layer in a frozen network's own run, and its codes (signs, or codes less the code of 0)."""

    input: Tensor
    codes: Tensor | None


def own_run(frozen: FrozenModel, batch: Tensor) -> tuple[dict[str, list[Own]], list[Tensor]]:
    """Return the inputs of all layers when the frozen network runs as a whole, and its outputs."""
    found: dict[str, list[Own]] = {}
    frozen.suit(batch)
    if not frozen.untraced:
        _add_own(found, frozen, batch)
        return found, leaves(frozen(batch))
    with ExitStack() as stack:
        for name, part in frozen.named_modules():
            if isinstance(part, FrozenModel) and part is not frozen:
                prefix = name.partition(".")[2]  # behind "network"

                def add(part: FrozenModel, args: Any, name: str = prefix) -> None:
                    _add_own(found, part, args[0], name)

                stack.callback(part.register_forward_pre_hook(add).remove)
        return found, leaves(frozen(batch))


def _add_own(found: dict[str, list[Own]], frozen: FrozenModel, input: Tensor, name: str = "") -> None:
    """Add the inputs of the layers of a network, or of one layer of that name."""
    frozen.suit(input)
    if frozen.untraced:
        return
    values, program = frozen.own_values(input), frozen.program(input)
    for call in program.layers:
        given, codes = values[call.input], None if call.codes is None else values[call.codes]
        if isinstance(quantize := program.operations[call.codes or 0], Quantize):  # pyright: ignore
            codes = codes.long() - quantize.zero  # pyright: ignore
        if call.is_last:
            given, codes = given.movedim(1, -1), None if codes is None else codes.movedim(1, -1)
        found.setdefault(name or call.name, []).append(Own(given, codes))


class _Follower:
    """Runs the trained network, in float64 and in float32, with the frozen network's inputs in its quantized layers.

    Attributes:
        checks: for each layer, what was found.
        last: the name of the last layer that was called.
        sure: see `_sure`.
    """

    def __init__(self, model: nn.Module, checks: Mapping[str, LayerCheck]) -> None:
        self.checks, self.last, self.sure = dict(checks), "", _sure(model, checks)
        self.networks: dict[torch.dtype, nn.Module] = {}
        for dtype in (torch.float64, torch.float32):  # a network each, as some keep tensors of an earlier call
            self.networks[dtype] = copy.deepcopy(model).eval()  # copies of some graphs train
            for module in self.networks[dtype].modules():
                if isinstance(module, nn.RNNBase):  # which refuses inputs of another dtype than its weights
                    module.to(dtype)
        self.layers = {name: Quantized(model.get_submodule(name)) for name in checks}

    def run(self, batch: Tensor, own: Mapping[str, list[Own]]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the outputs in float64 and in float32, of which those are the exact ones."""
        outputs, calls = [], []
        left: dict[str, list[Own]] = {}
        for dtype, network in self.networks.items():
            left = {name: list(each) for name, each in own.items()}
            seen: list[tuple[str, Tensor, Own | None]] = []
            mode = _InFloat64() if dtype == torch.float64 else nullcontext()
            with _guided(network, self.layers, left, seen), mode:
                outputs.append(leaves(network(batch.to(dtype) if batch.is_floating_point() else batch)))
            calls.append(seen)
        exact, rounded = calls
        for (name, wanted, given), (_, low, _) in zip(exact, rounded, strict=True):
            if name in own:  # else its output is a constant, or its arguments are several: seen in what follows
                self.checks[name] = self.checks[name].merged(self._check(name, wanted, low, given))
        for name, missed in left.items():  # of calls that the trained network does not make
            if missed:
                count = sum(each.input.numel() for each in missed)
                self.checks[name] = replace(self.checks[name], of_bound=math.inf, drift=count)
        self.last = exact[-1][0] if exact else ""
        return outputs[0], outputs[1]

    def _check(self, name: str, wanted: Tensor, low: Tensor, own: Own | None) -> LayerCheck:
        layer: Any = self.layers[name].layer
        nothing = LayerCheck(name, self.checks[name].arithmetic)
        if own is None or own.input.numel() != wanted.numel():
            return replace(nothing, of_bound=math.inf, elements=wanted.numel())
        if not wanted.numel():
            return nothing
        got, quantizer = own.input.reshape(wanted.shape), layer.input_quantizer
        off, share = _off(got, wanted, low, self.sure, layer.input_channels()[1])
        found = replace(nothing, error=off, of_bound=share, elements=wanted.numel())
        if own.codes is None or isinstance(quantizer, Identity):
            return found
        codes, exact = (self.layers[name].codes(values) for values in (got, wanted.float()))
        if own.codes.numel() != codes.numel():  # with the border of its own
            return found
        differing, drifting = (own.codes.reshape(codes.shape) != others for others in (codes, exact))
        return replace(found, codes=int(differing.sum()), drift=int(drifting.sum()))


def rounded(exact: Tensor, layer: Any) -> Tensor:
    """Return a layer's output with the errors of a product and a sum or two, in either direction, in float32."""
    generator = torch.Generator("cpu").manual_seed(0)
    signs = torch.randint(0, 2, exact.shape, generator=generator, device="cpu") * 2 - 1
    bias = torch.zeros(1) if layer.bias is None else layer.bias
    terms = torch.maximum(exact.abs(), bias.abs().view(-1, *[1] * (layer.weight.ndim - 2)))  # which may cancel out
    return (exact + 4 * UNIT * signs * terms).float()


class _InFloat64(TorchFunctionMode):
    """Context manager: a function of float64, or of whole numbers, takes all its floats, parameters too, in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = args, kwargs or {}
        if not any(isinstance(leaf, Tensor) and leaf.dtype != torch.float32 for leaf in tree_leaves(given)):
            return func(*args, **given[1])
        wide = tree_map(_widened, given)
        output = (Tensor.double if func is Tensor.float else func)(*wide[0], **wide[1])
        for leaf, wider in zip(tree_leaves(given), tree_leaves(wide), strict=True):
            if isinstance(leaf, Tensor) and wider is not leaf and wider._version:  # it was changed in place
                leaf.copy_(wider)
        return output


def _widened(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.double() if leaf.dtype == torch.float32 else leaf
    return torch.float64 if leaf is torch.float32 else leaf


def _narrowed(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype == torch.float64 else leaf


@contextmanager
def _guided(
    network: nn.Module,
    layers: Mapping[str, Quantized],
    own: Mapping[str, list[Own]],
    seen: list[tuple[str, Tensor, Own | None]],
) -> Iterator[None]:
    """Context manager: quantized layers return the exact outputs for the frozen network's inputs."""
    with ExitStack() as stack:
        for name, layer in layers.items():
            place: Any = network.get_submodule(name)

            def forward(input: Tensor, *rest: Any, name: str = name, layer: Any = layer, **named: Any) -> Tensor:
                given = own[name].pop(0) if own.get(name) else None
                seen.append((name, input.clone(), given))
                x = input if given is None or given.input.numel() != input.numel() else given.input.reshape(input.shape)
                in_float32 = input.dtype == torch.float32 and (given is None or given.codes is None)
                with torch._C.DisableTorchFunction():
                    if rest or named or in_float32:  # whose sums make an error
                        more = tree_map(_narrowed, (rest, named))
                        output = layer.layer(x.float(), *more[0], **more[1])
                    else:
                        output = _output(layer, x.float(), given)
                        output = output if input.dtype == torch.float64 else rounded(output, layer.layer)
                    # The trained modules may read its strides.
                    return (output.contiguous() if input.is_contiguous() else output).to(input.dtype)

            place.forward = forward
            stack.callback(vars(place).pop, "forward")
        yield


def _output(layer: Quantized, input: Tensor, own: Own | None) -> Tensor:
    """Return a layer's output in float64: of its quantized input, or of the frozen network's codes."""
    trained: Any = layer.layer
    if not layer.is_known or input.ndim == trained.weight.ndim - 1 != 1:
        return trained(input)
    quantizer, weight = trained.input_quantizer, layer.weight
    bias = None if trained.bias is None else trained.bias.double()
    input_q, whole = layer.input(input).double(), whole_of(quantizer, layer.padded(input), quantizer.tensors())
    if own is not None and own.codes is not None and own.codes.numel() == input_q.numel():
        levels, values = from_zero(quantizer.levels(*quantizer.tensors())), own.codes.reshape(input_q.shape)
        input_q = values.double() * levels.scale.double()
        whole = Whole(values, levels.scale) if levels.offset is None else None
        input_q = input_q if levels.offset is None else input_q + levels.offset.double()
    with trained.as_evaluated() as (of_weight, filters):
        whole_w = whole_of(of_weight, filters, of_weight.tensors())
    op = trained.operation(input) if trained.weight.ndim > 2 else None
    if whole is None or whole_w is None or not scales_follow(whole.scale, whole_w, op):
        return layer.product(input_q, weight.double(), bias, input)  # pyright: ignore
    output = layer.product(whole.values.double(), whole_w.values.double(), None, input)
    scale = output_scale(whole.scale, whole_w.scale, torch.float64)
    output = output if scale is None else output * scale
    return output if bias is None else plus(output, bias, trained.weight)


def difference(got: Tensor, wanted: Tensor) -> Tensor:
    """Return the differences from the exact numbers: 0 if both are NaN, inf if one is or the shapes differ."""
    if got.shape != wanted.shape:
        return torch.full_like(wanted, torch.inf, dtype=torch.float64)
    got, wanted = got.double(), wanted.double()
    is_same = (got == wanted) | (got.isnan() & wanted.isnan())
    return torch.where(is_same, 0.0, (got - wanted).abs()).nan_to_num(torch.inf, torch.inf)


def _sure(model: nn.Module, checks: Mapping[str, LayerCheck]) -> float:
    """Return how many times the errors of the trained network's float32 may be those of a right frozen network.

    It adds up floats one after the other; torch adds up parts, whose errors grow less: with 32, 128 and 512 channels
    the largest errors of 3×3 convolutions were 2.3, 5.9 and 13 times torch's, as the roots of 288, 1,152 and 4,608.
    """
    weights = [
        getattr(module, "weight", None)
        for name, module in model.named_modules()
        if name not in checks or checks[name].arithmetic == "float"
    ]
    terms = max((w.shape[1:].numel() for w in weights if isinstance(w, Tensor) and w.ndim > 1), default=1)
    return SURE * max(1.0, (terms / SHORT) ** 0.5)


def _off(got: Tensor, exact: Tensor, low: Tensor, sure: float, dim: int = 1) -> tuple[float, float]:
    """Return the largest difference from exact numbers, and the largest share of what rounding explains.

    Args:
        got: numbers.
        exact: the trained network's, in float64.
        low: the trained network's, in float32, whose error is that of float32.
        sure: see `_sure`.
        dim: of the channels.
    """
    off, error = difference(got, exact), difference(low, exact)
    if not off.numel():
        return 0.0, 0.0
    others = [d for d in range(exact.ndim) if d != dim % exact.ndim]
    is_by_channel = exact.ndim > 1 and exact.numel() >= FEW * exact.shape[dim]

    def largest(values: Tensor) -> Tensor:
        return values.amax(others) if is_by_channel else values.max()

    bound = sure * (largest(error) + UNIT * exact.double().abs().nan_to_num(0, 0, 0).max()) + TINY
    return float(off.max()), float((largest(off) / bound).max())


def _larger(first: float, second: float) -> float:
    """The larger number; NaN if one is NaN."""
    return first if first >= second or math.isnan(first) else second


def classes(output: Tensor) -> Tensor:
    """Return each sample's class: with one output its sign; for ``(N, C, …)`` outputs, at each position.

    Booleans and whole numbers are classes already.
    """
    if not output.is_floating_point():
        return output
    if output.ndim < 2:
        output = output.reshape(-1, 1)
    elif output.ndim == 3 and output.shape[1] == 1:  # one row of classes for each sample
        output = output.squeeze(1)
    return output.argmax(1) if output.shape[1] > 1 else (output[:, 0] > 0).long()


def joined(batches: Iterable[Sequence[Tensor]]) -> list[Tensor]:
    """Return each output of all batches."""
    return [torch.cat([*map(torch.atleast_1d, parts)]) for parts in zip(*batches, strict=True)]


def compared(got: Sequence[Tensor], wanted: Sequence[Tensor], samples: int) -> tuple[Tensor, Tensor, float, float]:
    """Compare outputs with a trained model's.

    Returns:
        For each sample, whether it gets another class in an output, or NaN or inf, and whether the order of float sums
        explains all differences; the largest difference; the largest output.
    """
    others, is_far = torch.zeros(2, samples, dtype=torch.bool)
    off = largest = 0.0
    for one, other in zip(got, wanted, strict=True):
        if other.numel():
            error, most = difference(one, other), float(other.double().abs().nan_to_num(0, 0, 0).max())
            others |= other_decisions(one, other, samples) | of_samples(error.isinf(), samples)
            is_far |= of_samples(error > tolerance(most), samples)
            off, largest = max(off, float(error.max())), max(largest, most)
    return others, ~is_far, off, largest


def other_decisions(one: Tensor, other: Tensor, samples: int) -> Tensor:
    """Whether each sample has another class in ``other``, at one position or more."""
    is_other = torch.tensor(one.shape != other.shape)
    if one.shape == other.shape and other.numel():
        is_other = classes(one.to(other.dtype)) != classes(other)
    return of_samples(is_other, samples)


def of_samples(flags: Tensor, samples: int) -> Tensor:
    """Whether each sample has a flag; all or none of the samples where these are not flags of samples."""
    return flags.reshape(samples, -1).any(1) if flags.ndim and len(flags) == samples else flags.any().expand(samples)


def tolerance(largest: float) -> float:
    """The difference of outputs that the order of float sums can explain, where this is the largest output."""
    return CLOSE * (largest + 0.1)
