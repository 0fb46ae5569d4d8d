"""The contract of a quantizer: a forward and a pseudo-gradient, as two pure functions."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from .behind import KEY, difference
from .flags import flag_of, is_flag, is_readable, is_set
from .form import Form
from .levels import Levels
from .node import Quantize, as_called
from .observers import Observer, Samples
from .part import Part, as_it_is_now
from .rounding import Rounding, bytes_of


class Codes(NamedTuple):
    """A quantized tensor as integers; `dequantize` returns ``quantize(x)`` from it exactly.

    Attributes:
        values: whole numbers in the shape of ``x``; an integer dtype, or a floating one where NaN must be kept.
        scale: float tensor that broadcasts against ``values``.
        zero: the code of 0, an integer.
        offset: float tensor added at the end, for methods whose levels are not centred on 0 (AdaBin, LSQ+).
        negative_scale: the scale of negative values where it differs (TTQ).
    """

    values: Tensor
    scale: Tensor
    zero: int = 0
    offset: Tensor | None = None
    negative_scale: Tensor | None = None

    def dequantize(self) -> Tensor:
        """``(values − zero) · scale + offset``, in the dtype of ``scale``."""
        centred = self.values - self.zero
        scale = self.scale
        if self.negative_scale is not None:
            scale = torch.where(centred < 0, self.negative_scale, scale)
        return centred * scale if self.offset is None else centred * scale + self.offset


class Whole(NamedTuple):
    """The two factors of a quantized tensor: ``x_q = values · scale``.

    Attributes:
        values: whole numbers, or whole multiples of one power of two, in a floating dtype of at least that of ``x``.
        scale: float tensor that broadcasts against ``values``; None stands for 1.
    """

    values: Tensor
    scale: Tensor | None = None


class Quantizer(Part):
    r"""Base of all quantizers.

    A subclass writes two pure functions: `backward`, and either `quantize` or, if its values are whole numbers times a
    scale, `whole`. They receive the tensors that `tensors` returns, never the parameters of ``self``, so that the
    Functions of `qconv.function` can differentiate with respect to them. A quantizer can also be used alone as an
    ordinary module: ``quantizer(x)`` returns the quantized tensor and backpropagates the pseudo-gradient.

    Hyper-parameters are constructor arguments. Whatever changes during training is a buffer: it is saved, resumed and
    broadcast, and changing it does not trigger a recompile. `tensors` returns it too, and `backward` returns None for
    it. In a weight tensor, dimension 0 is the output channel (the filter). Learned tensors may be float32 beside an
    ``x`` of another dtype; each gradient has the dtype of its tensor.

    Arguments of a wrong type raise a TypeError that names them; numbers of bits out of range raise a ValueError. A
    checkpoint that holds an integer in place of a learned tensor raises a TypeError; one with NaN, inf or a step that
    is not positive raises a ValueError (`rules`). Nothing of the quantizer is loaded then. A different number of bits
    is noticed only if it changes a tensor's shape or codes (N2UQ, INQ).

    Attributes:
        bits: information per element: 1, log2(3), 2, 4 ...; 32 for a tensor left as it is.
        signs: every value is +1 or -1, so a convolution may run on the codes alone.
        is_binary: the values of `whole` are +1 and -1, and there is one scale, or one for each filter.
        replaces_weight: the learned tensors replace the weight, which receives no gradient (DeepShift-PS).
        roles: where a `Scheme` may use it. A quantizer that learns tensors or takes them from data has only one role,
            which decides how it starts. One that rounds gradients at random does so in evaluation too, and is for
            gradients alone.
        final_from: the progress from which it quantizes as it will at the end: above 0 if stages or portions come
            first.
        has_whole: whether `whole` describes `quantize`: no subclass has overridden `quantize` alone.
        has_rounding: whether `rounding_of` describes `whole`: no subclass has overridden `whole` or `quantize` alone.
        changes_values: whether it overrides the `whole` or `quantize` of a parent, but not what that states of the
            values: `keep`, `whole_ends` and `is_binary` then say nothing.
        code_dtype: the dtype of the integers that `codes` makes from `whole`.
        kept: the learned tensors that carry over to a quantizer of the same class with other bits: ranges, not steps.
        before_sign: the `note_of` the activations that `qconv.convert` made before it. It is saved, and a state dict
            with another note is refused. It is not a buffer, because it describes how the model was built, as a class
            does.

    A quantizer that needs data sets ``self.calibrated = False`` in its constructor. This creates a float buffer of that
    name: 0 while it waits, above 0 once it is set. Averages of models, broadcasts and state dicts carry it like any
    other tensor. Read as an attribute it is a bool, and once True it is never read from the device again.
    """

    bits: float = 32
    signs: bool = False
    is_binary: bool = False
    replaces_weight: bool = False
    roles: tuple[str, ...] = ("input", "weight", "grad")
    final_from: float = 0.0
    has_whole: bool = True
    has_rounding: bool = True
    changes_values: bool = False
    code_dtype: torch.dtype = torch.int16
    kept: tuple[str, ...] = ()
    before_sign: Tensor | None = None
    _was_calibrated: bool = True  # the last known value of the buffer
    _share_told: bool = False  # whether `share_of_data` has read the buffer since it was loaded

    @property
    def needs_data(self) -> bool:
        """Whether its learned tensors start from data, no matter whether it has seen any yet (`calibrated`)."""
        return "calibrated" in self._buffers

    @property
    def calibrated(self) -> bool:
        """False while the learned tensors wait for data (`initialize`); in a compiled graph, the last known value."""
        return self._was_calibrated if torch.compiler.is_compiling() else self.had_data()

    @calibrated.setter
    def calibrated(self, value: bool) -> None:
        flag = self._buffers.get("calibrated")
        if flag is None:
            self._buffers["calibrated"] = flag_of(value)
        else:
            flag.fill_(float(value))
        self._was_calibrated = value

    def had_data(self) -> bool:
        """`calibrated`, read from the buffer unless known to be set. This breaks a graph that is being compiled."""
        if not self._was_calibrated:
            self._was_calibrated = is_set(cast(Tensor, self._buffers["calibrated"]))
        return self._was_calibrated

    def share_of_data(self) -> float | None:
        """The flag of its data if set, below 1 in an average that began before its data. Returned once, then None."""
        flag = self._buffers.get("calibrated")
        if flag is None or self._share_told or not self._was_calibrated or not is_readable(flag):
            return None
        share = flag.item()
        self._share_told = share > 0
        return share

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "calibrated" and isinstance(value, bool):  # torch.nn.Module would refuse a bool in a buffer's place
            type(self).calibrated.__set__(self, value)
        else:
            super().__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if (value := self.__dict__.pop("calibrated", None)) is not None:  # a whole model pickled by an earlier version
            self.calibrated = value

    @property
    def splits_at_zero(self) -> bool:
        """Whether 0 separates its only two levels, at least at the start if the threshold is learned; true of signs.

        Inputs of one sign, such as those behind a ReLU, are then all quantized to one value.
        """
        return self.signs

    @property
    def is_final(self) -> bool:
        """Whether it already quantizes as it will at the end; before, the trained model is not the shipped one."""
        return True

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the learned or scheduled tensors, in the order in which `quantize` and `backward` take them.

        They carry any difference between training and evaluation: stochastic rounding gets a key only in training. So
        the two functions need not ask for the mode, which may have changed by the time the backward runs.
        """
        return ()

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        """Return the quantized tensor ``x_q``, the product of `whole`, in the shape, dtype and device of ``x``."""
        whole = self.whole(x, *tensors)
        if whole is None:
            raise NotImplementedError(f"{type(self).__name__} defines neither whole() nor quantize()")
        values, scale = whole
        return (values if scale is None else values * scale).to(x.dtype)

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole | None:
        """Return whole numbers and a scale whose product is ``x_q``; None if ``x_q`` is not of that form.

        Layers add up products of whole numbers, which is exact, and multiply the sum by the scales. Quantizers that
        keep real numbers, or have an offset or two scales, return None; their `quantize` is called instead.
        """
        return None

    @property
    def whole_ends(self) -> tuple[int, int] | None:
        """The smallest and the largest number of `whole`; None if they depend on data, or parts of 1 are among them."""
        return (-1, 1) if self.signs else None

    def rounding_of(self, x: Tensor, *tensors: Tensor) -> Rounding | None:
        """Return how `whole` rounds, if it is to evenly spaced levels from one of `whole_ends` to the other.

        Others ask `known_rounding`: a subclass may round otherwise than it inherits.
        """
        return None

    def known_rounding(self, x: Tensor, *tensors: Tensor) -> Rounding | None:
        """`rounding_of`; None if a subclass overrides `whole` or `quantize` alone."""
        return self.rounding_of(x, *tensors) if self.has_rounding else None

    def whole_bytes(self, x: Tensor, *tensors: Tensor, offset: int) -> Whole | None:
        """Return `whole`, its values plus ``offset`` as uint8 modulo 256, in the memory format of ``x``; None for NaN.

        Only if there are `whole_ends`. Reads a value from the device.
        """
        rounding, ends = self.known_rounding(x, *tensors), self.whole_ends
        if rounding is None:
            values, scale = cast(Whole, self.whole(x, *tensors))
            if self.signs:  # which are never NaN, and of any dtype
                return Whole(values.to(torch.int8).add_(offset).view(torch.uint8), scale)
            codes = None if ends is None else bytes_of(values, offset, *ends)
        else:
            scale, codes = rounding.scale, rounding.bytes(x, offset)
        return None if codes is None else Whole(codes, scale)

    def restore_bytes(self, kept: Sequence[Tensor], form: Form, *tensors: Tensor, offset: int) -> Whole | None:
        """Return what `whole_bytes` gives for the ``x`` of ``kept = keep(x, form, *tensors)``, if it has no NaN."""
        if self.signs:
            return Whole(form.signs(kept[0], torch.int8).add_(offset).view(torch.uint8))
        return in_bytes(self.restore(kept, form, *tensors), offset)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A class that overrides one of the two does not compute what it inherits for the other.
        of_whole, of_quantize = place(cls, "whole"), place(cls, "quantize")
        cls.has_whole = of_whole <= of_quantize
        if of_whole < of_quantize:
            cls.quantize = Quantizer.quantize
        cls.has_rounding = place(cls, "rounding_of") <= min(of_whole, of_quantize)
        # Nor is what it inherits for a lean layer that of its own functions.
        if place(cls, "backward") < place(cls, "backward_kept"):
            cls.backward_kept, cls.needs_input = Quantizer.backward_kept, Quantizer.needs_input  # pyright: ignore
        own, stated = min(of_whole, of_quantize), place(cls, "keep", "coding", "parts", "whole_ends")
        parents = (parent.__dict__ for parent in cls.__mro__[own + 1 :] if parent is not Quantizer)
        cls.changes_values = own < stated and any("whole" in parent or "quantize" in parent for parent in parents)
        if cls.changes_values:
            cls.keep, cls.whole_ends, cls.is_binary = Quantizer.keep, Quantizer.whole_ends, False  # pyright: ignore

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of ``x`` and of each tensor from ``grad``, the gradient of ``x_q``: the pseudo-gradient.

        ``grad`` may be overwritten, and returned.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no backward()")

    @property
    def is_continuous(self) -> bool:
        """Whether `backward` is a continuous function of ``x``: rounding errors of ``x`` hardly change it."""
        return False

    @property
    def needs_input(self) -> bool:
        """Whether the gradient needs ``x`` besides what `keep` returns: `backward` is called, not `backward_kept`."""
        return True

    def keep(self, x: Tensor, form: Form, *tensors: Tensor) -> tuple[Tensor, ...] | None:
        """Return bits of ``x`` that a lean layer keeps for its backward in place of ``x``; None if there are none.

        `restore` and `backward_kept` give from them, bit for bit, what `whole` (or `quantize`) and `backward` give from
        ``x``. A subclass that overrides one of these, but not what it inherits here, keeps no bits or needs ``x``.
        """
        return None

    def restore(self, kept: Sequence[Tensor], form: Form, *tensors: Tensor) -> Whole | Tensor:
        """Return what `whole` gives for the ``x`` of ``kept = keep(x, form, *tensors)``; ``x_q`` if it gives nothing.

        Values may have a wider dtype. What a NaN of ``x`` becomes is left open.
        """
        raise NotImplementedError(f"{type(self).__name__} defines keep() and no restore()")

    def backward_kept(
        self, grad: Tensor, kept: Sequence[Tensor], form: Form, *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return what `backward` returns for ``x``, from what was kept. It is not called if it `needs_input`.

        ``grad`` may be overwritten, and returned.
        """
        raise NotImplementedError(f"{type(self).__name__} needs no input and defines no backward_kept()")

    def snapshot(self) -> Self:
        """Return a copy that keeps computing as this one does now, even if its mode, stage or attributes change later.

        A backward calls the snapshot taken when its forward ran: quantizing again then gives what the forward computed,
        even if a quantizer reads an attribute that has changed. Tensors are shared; `hold` copies those that must not
        change.
        """
        return as_it_is_now(self)

    def hold(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return ``tensors`` as a backward may read them after `set_progress_` or `after_step_` wrote to buffers.

        Buffers of one element are copied. Learned tensors are returned as they are: if one changed in between, autograd
        raises, as it does for any weight.
        """
        return tuple(t if t.requires_grad or t.numel() != 1 else t.clone() for t in tensors)

    def codes(self, x: Tensor, *tensors: Tensor) -> Codes:
        """Return integer codes of ``x``, such that ``quantize(x, *tensors) == codes.dequantize().to(x.dtype)`` exactly.

        By default they are the values of `whole`, in ``code_dtype``.

        Raises:
            TypeError: the quantizer keeps real numbers, so it has no codes.
        """
        whole = self.whole(x, *tensors)
        if whole is None:
            raise TypeError(f"{type(self).__name__} has no integer codes")
        values, scale = whole
        one = torch.ones((), dtype=x.dtype, device=x.device)
        return Codes(values.to(self.code_dtype), one if scale is None else scale)

    def levels(self, *tensors: Tensor) -> Levels | None:
        """Return the levels that every ``x`` is quantized to; None if they depend on ``x`` or are real numbers.

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

    def observer(self) -> Observer:
        """Return an observer of the batches of `qconv.calibrate`, for `initialize_from`.

        A quantizer that starts from statistics of the data, not from the tensor itself, is a `FromData`. The others get
        the first samples, up to 2^22 values in total.
        """
        return Samples()

    def initialize_from(self, observer: Observer) -> None:
        """Set the learned tensors from what ``observer``, a result of `observer`, has seen."""
        if isinstance(observer, Samples) and not observer.is_empty:
            self.initialize(observer.joined())

    @torch.no_grad()
    def go_on_from_(self, other: "Quantizer", x: Tensor | None) -> None:
        """Start where ``other``, of the same class but with other arguments, has arrived: copy its `kept` tensors.

        Tensors that come from data are set anew: from ``x``, the latent weight, or if None from the next training
        batch.
        """
        if x is not None:
            self.initialize(x)
        elif self.needs_data:
            self.calibrated = False
        for name in self.kept:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine.shape == theirs.shape:
                mine.copy_(theirs)

    def after_step_(self, x: Tensor | None) -> None:
        """Update in place after an optimizer step: clamp latent tensors to their range, advance random streams.

        ``x`` is the latent weight, or None for quantizers of inputs and gradients.
        """

    def set_progress_(self, progress: float, x: Tensor | None) -> None:
        """Set the buffers of a schedule; ``progress`` goes from 0 at the start of training to 1 at its end.

        ``x`` is the latent weight, or None for quantizers of inputs and gradients.
        """

    def forward(self, x: Tensor) -> Tensor:
        """Quantize as a stand-alone autograd node."""
        return Quantize.apply(x, as_called(self), *self.tensors())

    def check_state(self, state_dict: Mapping[str, Any], prefix: str = "") -> None:
        key = f"{prefix}calibrated"
        if not self.needs_data:
            super().check_state(state_dict, prefix)
            return
        others = {name: value for name, value in state_dict.items() if name != key and name.startswith(prefix)}
        super().check_state(others, prefix)  # an earlier version saved a bool
        value = state_dict.get(key, False)
        if not is_flag(value):
            raise ValueError(f"{key} (={value}) in the checkpoint must be True or False")

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        behind = state_dict.pop(f"{prefix}{KEY}", None)  # absent in float checkpoints and in those of earlier versions
        if behind is not None and self.before_sign is not None:
            where = prefix.removesuffix(".").removesuffix("input_quantizer").removesuffix(".")
            if wrong := difference(self.before_sign, behind, where or type(self).__name__):
                error_msgs.append(wrong)
        # If a float checkpoint holds nothing of the quantizer, the layer sets it from the loaded weight.
        flag = self._buffers.pop("calibrated", None)  # loaded last, since it depends on the other tensors
        before = len(missing_keys) + len(error_msgs)
        try:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        finally:
            if flag is not None:
                self._buffers["calibrated"] = flag
        key = f"{prefix}calibrated"
        if flag is None or not any(other.startswith(prefix) for other in state_dict):
            return
        if key not in state_dict:
            missing_keys.append(key)
            return
        if key in unexpected_keys:
            unexpected_keys.remove(key)
        # If a step was missing or had another shape, it was not loaded; the present one still waits for data.
        if len(missing_keys) + len(error_msgs) == before:
            self._load_flag(state_dict[key], local_metadata.get("assign_to_params_buffers", False))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.before_sign is not None:
            destination[f"{prefix}{KEY}"] = self.before_sign.clone()

    def _load_flag(self, value: bool | Tensor, assign: bool) -> None:
        if isinstance(value, Tensor) and value.is_meta:
            return
        own = cast(Tensor, self._buffers["calibrated"])
        flag = torch.as_tensor(value, dtype=own.dtype).reshape(())
        if assign:
            self._buffers["calibrated"] = flag
        else:
            own.copy_(flag)
        self._was_calibrated = is_set(flag)
        self._share_told = False


def place(cls: type, *names: str) -> int:
    """The place in the order of resolution of the first class that defines one of the names."""
    return next(i for i, parent in enumerate(cls.__mro__) if any(name in parent.__dict__ for name in names))


def whole_of(quantizer: Quantizer, x: Tensor, tensors: Sequence[Tensor]) -> Whole | None:
    """Return the factors of ``quantizer.quantize``, whole numbers and a scale; None if it has another form."""
    return quantizer.whole(x, *tensors) if quantizer.has_whole else None


def in_bytes(whole: Whole | Tensor, offset: int) -> Whole | None:
    """Return `whole` numbers plus ``offset`` as uint8 modulo 256, and their scale; None for a tensor of other ones."""
    if isinstance(whole, Tensor):
        return None
    return Whole((whole.values.to(torch.int16) + offset).to(torch.uint8), whole.scale)


def is_plain_cpu(x: Tensor) -> bool:
    """Whether reading values costs nothing: they are on the CPU, not fake, and nothing is being traced.

    `torch.jit.trace` would freeze the decisions that depend on these values, and go wrong on others.
    """
    return x.device.type == "cpu" and is_plain(x)


def is_plain(x: Tensor) -> bool:
    """Whether our operator may stand for several of torch's: nothing is being traced, and no subclass sees it."""
    return type(x) in (Tensor, nn.Parameter) and not torch.jit.is_tracing()  # pyright: ignore
