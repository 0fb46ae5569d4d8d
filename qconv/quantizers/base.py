"""The contract of a quantizer: a forward and a pseudo-gradient, as two pure functions."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from .codes import Codes as Codes, Whole as Whole, integer_dtype
from .data_flag import NeedsData
from .in_bits import InBits
from .levels import Levels as Levels
from .node import Quantize, as_called
from .numbers import SMALLEST
from .observers import Observer, Samples
from .part import POSITIVE, Rule, as_it_is_now
from .stochastic import Stream

Bounds = Mapping[str, tuple[float, float]]
WEIGHT, MAGNITUDE = "weight", "magnitude of the weight"


class Quantizer(InBits, NeedsData):
    r"""Base of all quantizers.

    A subclass writes two pure functions: `backward`, and either `quantize` or, if its values are whole numbers times a
    scale, `whole`. They receive the tensors that `tensors` returns, never the parameters of ``self``, so that the
    Functions of `qconv.function` can differentiate with respect to them. A quantizer can also be used directly as an
    ordinary module: ``quantizer(x)`` returns the quantized tensor and backpropagates the pseudo-gradient.

    What it states besides of its values, so that layers may compute on integers and keep codes, is `InBits`. A
    quantizer that needs data sets ``self.calibrated = False`` in its constructor (`NeedsData`).

    Hyper-parameters are constructor arguments. Whatever changes during training is a buffer: it is saved, resumed and
    broadcast, and changing it does not trigger a recompile. `tensors` returns it too, and `backward` returns None for
    it. In a weight tensor, dimension 0 is the output channel (the filter). Learned tensors may be float32 beside an
    ``x`` of another dtype; each gradient has the dtype of its tensor.

    Arguments of a wrong type raise a TypeError that names them; numbers of bits out of range raise a ValueError. A
    checkpoint that holds an integer in place of a learned tensor raises a TypeError; one with NaN, inf or a step that
    is not positive raises a ValueError (`rules`). Nothing of the quantizer is loaded then. Learned tensors that fit
    only other bits, such as a step, are loaded with a UserWarning. A state dict's metadata has the bits; without it
    (safetensors) they are noticed only if they change a tensor's shape or codes (N2UQ, INQ).

    Attributes:
        bits: information per element: 1, log2(3), 2, 4 ...; 32 for a tensor left as it is.
        replaces_weight: the learned tensors replace the weight, which receives no gradient (DeepShift-PS).
        roles: where a `Scheme` may use it. A quantizer that learns tensors or takes them from data has only one role,
            which decides how it starts. One that rounds gradients at random does so in evaluation too, and is for
            gradients alone.
        final_from: the progress from which it quantizes as it will at the end: above 0 if stages or portions come
            first.
        has_whole: whether `whole` describes `quantize`: no subclass has overridden only `quantize`.
        is_unsigned: the method itself, not an argument, clips every negative input to 0.
        code_dtype: the dtype of the integers that `codes` makes from `whole`; None takes it from ``bits``.
        training_only: buffers that only its gradient reads: packed files leave them out, and a network that starts
            from other weights (``init_from=``) keeps its own.
        learned_scales: learned steps, ranges and scales, which must be positive; a step clamps them to 2^-20 or more.
        kept: the learned tensors that carry over to a quantizer of the same class with other bits: ranges, not steps.
    """

    bits: float = 32
    replaces_weight: bool = False
    roles: tuple[str, ...] = ("input", "weight", "grad")
    final_from: float = 0.0
    has_whole: bool = True
    is_unsigned: bool = False
    code_dtype: torch.dtype | None = None
    training_only: tuple[str, ...] = ()
    learned_scales: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    before_sign: None = None  # the layer's note has this place in a state dict: torch's sharded ones look it up

    @property
    def is_binary(self) -> bool:
        """Whether the values of `whole` are +1 and −1; a weight has one scale then, or one for each filter."""
        return self.bits == 1 and self.whole_ends == (-1, 1)

    @property
    def splits_at_zero(self) -> bool:
        """Whether 0 separates the only two levels, at least initially if the threshold is learned; true of signs.

        Inputs of one sign, such as those after a ReLU, are then all quantized to one value. By default `levels`, or
        else `whole_ends`, say so of one bit.
        """
        if self.signs or self.bits != 1 or not self.is_elementwise:
            return self.signs and self.is_elementwise
        levels = self.levels(*self.tensors())
        if levels is None:
            low, high = self.whole_ends or (0, 0)
        elif levels.offset is None:
            low, high = levels.low, levels.high
        else:
            low, high = ((code * levels.scale + levels.offset).mean() for code in (levels.low, levels.high))
        return bool(low < 0 < high)

    @property
    def at_work(self) -> "Quantizer":
        """The quantizer that computes in this mode and stage: this one, unless it only chooses among others."""
        return self

    @property
    def is_final(self) -> bool:
        """Whether this already quantizes as at the end of training; before, the shipped model would differ."""
        return True

    def of_authors(self) -> tuple[Mapping[str, str], str]:
        """Return the learned tensors of the authors' layers, which a state dict may hold: their names, and those here.

        And how the authors' code computes from them if it gives other values, for a refusal; else nothing.
        """
        return {}, ""

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the learned or scheduled tensors, in the order in which `quantize` and `backward` take them.

        They carry any difference between training and evaluation: stochastic rounding gets a key only in training. So
        the two functions need not ask for the mode, which may have changed by the time the backward runs.
        """
        return ()

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        """Return the quantized tensor ``x_q``, the product of `whole`, in the shape, dtype and device of ``x``."""
        if is_eager_cuda(x):
            rounding = self.known_rounding(x, *tensors)
            if rounding is not None:
                return rounding.quantized(x)
        whole = self.whole(x, *tensors)
        if whole is None:
            raise NotImplementedError(f"{type(self).__name__} defines neither whole() nor quantize()")
        values, scale = whole
        return (values if scale is None else values * scale).to(x.dtype)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A class that overrides one of the two does not compute what it inherits for the other.
        of_whole, of_quantize = place(cls, "whole"), place(cls, "quantize")
        cls.has_whole = of_whole <= of_quantize
        if of_whole < of_quantize:
            cls.quantize = Quantizer.quantize
        cls._has_rounding = place(cls, "rounding_of") <= min(of_whole, of_quantize)
        # Nor is what it inherits for a lean layer that of its own functions.
        if place(cls, "backward") < place(cls, "backward_kept"):
            cls.backward_kept, cls.needs_input = Quantizer.backward_kept, Quantizer.needs_input  # pyright: ignore
        own, stated = min(of_whole, of_quantize), place(cls, "keep", "coding", "parts", "whole_ends")
        parents = (parent.__dict__ for parent in cls.__mro__[own + 1 : cls.__mro__.index(Quantizer)])
        are_others = any("whole" in parent or "quantize" in parent for parent in parents)
        if own < stated and are_others:  # nor do these say anything of other values
            cls.keep, cls.whole_ends, cls.is_binary = Quantizer.keep, Quantizer.whole_ends, False  # pyright: ignore
        if are_others and own < place(cls, "levels"):
            cls.levels = Quantizer.levels
        if are_others and own < place(cls, "codes"):
            cls.codes = Quantizer.codes

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``x`` and of each tensor from ``grad``, the gradient of ``x_q``: the pseudo-gradient.

        ``grad`` may be overwritten, and returned.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no backward()")

    def snapshot(self) -> Self:
        """Return a copy that keeps computing as now, even if the mode, stage or attributes change later.

        A backward calls the snapshot taken when its forward ran: quantizing again then gives what the forward computed,
        even if a quantizer reads an attribute that has changed. Tensors are shared; `hold` copies those that must not
        change.
        """
        return as_it_is_now(self)

    def hold(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return ``tensors`` for a backward, safe from later writes by `set_progress_` or `after_step_`.

        Buffers of one element are copied. Learned tensors are returned as they are: if one changed in between, autograd
        raises, as it does for any weight. While they are fresh all are copied: the next call of the layer, in the same
        graph perhaps, sets them.
        """
        if not tensors:
            return ()
        if self.is_fresh:
            return tuple(t.clone() for t in tensors)
        return tuple(t if t.requires_grad or t.numel() != 1 else t.clone() for t in tensors)

    def codes(self, x: Tensor, *tensors: Tensor) -> Codes:
        """Return integer codes of ``x``, such that ``quantize(x, *tensors) == codes.dequantize().to(x.dtype)`` exactly.

        By default they are the values of `whole`.

        Raises:
            TypeError: the quantizer keeps real numbers, so it has no codes.
        """
        whole = self.whole(x, *tensors)
        if whole is None:
            raise TypeError(f"{type(self).__name__} has no integer codes: its whole() gives none")
        values, scale = whole
        one = torch.ones((), dtype=x.dtype, device=x.device)
        dtype = integer_dtype(self.bits) if self.code_dtype is None else self.code_dtype
        return Codes(values.to(dtype), one if scale is None else scale)

    def levels(self, *tensors: Tensor) -> Levels | None:
        """Return the levels of all quantized values; None if they depend on ``x`` or are real numbers.

        Integer inference and export need the levels of the input: without them its layer computes on floats.
        """
        return None

    def build(self, channels: int, dim: int) -> None:
        """Create the learned tensors that have an element per channel of the input, its dimension ``dim``."""

    def initialize(self, x: Tensor) -> None:
        """Create or set the learned tensors from ``x``: the float weight of the layer, or the first inputs.

        A quantizer that needs data ignores an ``x`` that is empty or of equal values: it keeps its tensors and stays
        uncalibrated.
        """

    def search_(self, x: Tensor) -> None:
        """Improve the learned tensors that `initialize` set from the weight ``x``, for use without training.

        `qconv.calibrate` calls it while they are fresh. By default they stay.
        """

    def observer(self) -> Observer:
        """Return an observer of the batches of `qconv.calibrate`, for `initialize_from`.

        A quantizer that starts from statistics of the data, not from the tensor itself, is a `FromData`. The others get
        the first samples, up to 2^22 values in total.
        """
        return Samples()

    def initialize_from(self, observer: Observer) -> None:
        """Set the learned tensors from the statistics in ``observer``, a result of `observer`."""
        if isinstance(observer, Samples) and not observer.is_empty:
            self.initialize(observer.joined())

    def goes_on_from(self, other: "Quantizer") -> bool:
        """Whether the `kept` tensors of ``other``, the quantizer of the stage before, can be taken over."""
        return type(other) is type(self)

    @torch.no_grad()
    def go_on_from_(self, other: "Quantizer", x: Tensor | None) -> None:
        """Copy the `kept` tensors of ``other``, a quantizer of the same or a similar class with other arguments.

        Others that come from data are reset: from ``x``, the latent weight, or if None from the next training batch.
        """
        if x is not None:
            self.initialize(x)
        if self.needs_data:
            self.calibrated = x is not None or (bool(self.kept) and other.calibrated)
        for name in self.kept:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine.shape == theirs.shape:
                mine.copy_(theirs)

    @property
    def bounds(self) -> Bounds:
        """Return the ends to which a step clamps each learned tensor, by name, and the latent weight.

        The weight's key is `WEIGHT`, or for ends of its magnitude `MAGNITUDE`.
        """
        return dict.fromkeys(self.learned_scales, (SMALLEST, math.inf))

    def rules(self) -> Mapping[str, Rule]:
        return dict.fromkeys(self.learned_scales, POSITIVE)

    def after_step_(self, x: Tensor | None) -> None:
        """Update in place after an optimizer step: clamp what has `bounds`, advance a `Stream` named ``stream``.

        ``x`` is the latent weight, or None for quantizers of inputs and gradients.
        """
        for tensor, low, high, is_magnitude in bounded(self, x):
            if is_magnitude:
                torch.mul(tensor.abs().clamp_(low, high), tensor.sign(), out=tensor)
            else:
                tensor.clamp_(low, high)
        stream = self._modules.get("stream")
        if isinstance(stream, Stream):
            stream.after_step_()

    def set_progress_(self, progress: float, x: Tensor | None) -> None:
        """Set the buffers of a schedule; ``progress`` goes from 0 at the start of training to 1 at its end.

        ``x`` is the latent weight, or None for quantizers of inputs and gradients.
        """

    def forward(self, x: Tensor) -> Tensor:
        """Quantize as a stand-alone autograd node, without a layer: `initialize` it first if it needs data."""
        return Quantize.apply(x, as_called(self), *self.tensors())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        bits = args[0].get("bits", self.bits)  # of the module's metadata
        learned = {name: own for name, own in self._parameters.items() if f"{prefix}{name}" in state_dict}
        fits = all(
            own is None or own.shape == getattr(state_dict[f"{prefix}{name}"], "shape", None)
            for name, own in learned.items()
        )
        if bits != self.bits and fits and {*learned} - {*self.kept}:  # other shapes are an error
            warnings.warn(
                f"{type(self).__name__} of {self.bits:.3g} bits loads values learned with {bits:.3g} bits, which "
                "may not fit. To start fresh, leave names with '_quantizer.' out of the state dict (strict=False)",
                stacklevel=2,
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix.removesuffix("."))
        if metadata is not None:  # what torch keeps of a module besides its tensors, its version for example
            metadata["bits"] = float(self.bits)


def training_only(module: nn.Module) -> set[str]:
    """Return the names of all buffers of a module that are `Quantizer.training_only`."""
    parts = [(name, part) for name, part in module.named_modules() if isinstance(part, Quantizer)]
    return {f"{name}.{own}" if name else own for name, part in parts for own in part.training_only}


def has_codes(quantizer: Quantizer) -> bool:
    """Whether integer `codes` are defined, directly or through `whole`."""
    return quantizer.has_whole or type(quantizer).codes is not Quantizer.codes


def bounded(quantizer: Quantizer, x: Tensor | None) -> Iterator[tuple[Tensor, float, float, bool]]:
    """Yield the tensors of the quantizer's `bounds`, but frozen ones, their ends, and if these are of the magnitude.

    ``x`` is as in `after_step_`.
    """
    for name, (low, high) in quantizer.bounds.items():
        # What is frozen may be a buffer, or computed.
        tensor = x if name in (WEIGHT, MAGNITUDE) else getattr(quantizer, name)
        if tensor is not None and (tensor is x or tensor.requires_grad):
            yield tensor, low, high, name == MAGNITUDE


def place(cls: type, *names: str, base: type = Quantizer) -> int:
    """Return the position, in the method resolution order, of the first class that defines one of the names."""
    parents = enumerate(cls.__mro__)
    return next(i for i, parent in parents if parent is base or any(name in parent.__dict__ for name in names))


def whole_of(quantizer: Quantizer, x: Tensor, tensors: Sequence[Tensor]) -> Whole | None:
    """Return the factors of ``quantizer.quantize``, whole numbers and a scale; None if it has another form."""
    return quantizer.whole(x, *tensors) if quantizer.has_whole else None


def is_plain_cpu(x: Tensor) -> bool:
    """Whether reading values is cheap: they are on the CPU, not fake, and nothing is being traced.

    `torch.jit.trace` would freeze the decisions that depend on these values, and go wrong on others.
    """
    return x.device.type == "cpu" and is_plain(x)


def is_eager_cuda(x: Tensor) -> bool:
    """Whether operators with a kernel for GPUs save launches: in compiled code Inductor fuses torch's own."""
    return x.is_cuda and is_plain(x) and not torch.compiler.is_compiling()


def is_wrapped(x: Tensor) -> bool:
    """Whether the tensor is wrapped by `torch.func` or a batch of gradients, without rules for in-place operators."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return functorch.is_functorch_wrapped_tensor(x) or functorch.is_legacy_batchedtensor(x)


def is_plain(x: Tensor) -> bool:
    """Whether one operator may replace several of torch's: nothing is traced, and no tensor subclass is involved."""
    return type(x) in (Tensor, nn.Parameter) and not torch.jit.is_tracing()  # pyright: ignore
