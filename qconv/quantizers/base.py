"""The contract of a quantizer: a forward and a pseudo-gradient, as two pure functions."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from .behind import KEY, difference
from .flags import flag_of, is_flag, is_readable, is_set
from .levels import Levels
from .node import Quantize, as_called
from .observers import Observer, Samples
from .part import Part, as_it_is_now


class Codes(NamedTuple):
    """A quantized tensor as integers, from which `dequantize` makes ``quantize(x)`` again, exactly.

    Attributes:
        values: whole numbers, the shape of ``x``; of an integer dtype, or a floating one where NaN has to come through.
        scale: float tensor that broadcasts against ``values``.
        zero: the code of 0, an integer.
        offset: float tensor that is added in the end, where a method's levels don't lie around 0 (AdaBin, LSQ+).
        negative_scale: the scale of negative values, where it is another one (TTQ).
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
    """What a quantized tensor is made of: ``x_q = values · scale``.

    Attributes:
        values: whole numbers, or whole multiples of one power of two, in a floating dtype of at least that of ``x``.
        scale: float tensor that broadcasts against ``values``; None is 1.
    """

    values: Tensor
    scale: Tensor | None = None


class Quantizer(Part):
    r"""Base of all quantizers.

    A subclass writes two pure functions: `quantize`, or `whole` where its values are whole numbers times a scale, and
    `backward`. They receive the tensors of `tensors`, never ``self``'s parameters, so the Functions of `qconv.function`
    can differentiate with respect to them. Used alone, a quantizer is an ordinary module: ``quantizer(x)`` returns the
    quantized tensor and backpropagates the pseudo-gradient.

    Hyper-parameters are constructor arguments. What changes during training is a buffer: it is saved, resumed and
    broadcast, and changing it recompiles nothing; `tensors` returns it, too, and `backward` gives None for it. In a
    weight tensor, dimension 0 is the output channel (the filter). Learned tensors may be float32 beside a ``x`` of
    another dtype; each gradient has the dtype of its tensor.

    Arguments of a wrong type raise a TypeError that names them, numbers of bits a ValueError. So does a checkpoint with
    an integer in place of a learned tensor, or with NaN, inf or a step that is not positive in it (`rules`): nothing of
    the quantizer is loaded then. Only as many bits as change a tensor's shape or codes are told apart (N2UQ, INQ).

    Attributes:
        bits: information per element: 1, log2(3), 2, 4 ...; 32 for a tensor left as it is.
        signs: every value is +1 or -1, so that a convolution may run on the codes alone.
        replaces_weight: the learned tensors stand for the weight, which receives no gradient (DeepShift-PS).
        roles: what a `Scheme` may give it to. What learns tensors or takes them from data has one role, by which it
            starts; what rounds gradients at random does so in evaluation too, and is for gradients alone.
        final_from: the progress from which it quantizes as in the end: above 0 where stages or portions come first.
        has_whole: `whole` belongs to `quantize`: no subclass has written `quantize` alone.
        code_dtype: of the integers that `codes` makes of `whole`.
        kept: the learned tensors that a quantizer of the same class with other bits goes on with: ranges, not steps.
        before_sign: `note_of` what `qconv.convert` found before it; it is saved, and a state dict that says something
            else is refused. No buffer, for it says how the model was made, as a class does.

    A quantizer that needs data sets ``self.calibrated = False`` in its constructor. That makes a float buffer of this
    name, 0 while it waits, above 0 once it is set: an average of models, a broadcast and a state dict carry it like any
    tensor. As an attribute it reads as a bool, and never from the device again once it was True.
    """

    bits: float = 32
    signs: bool = False
    replaces_weight: bool = False
    roles: tuple[str, ...] = ("input", "weight", "grad")
    final_from: float = 0.0
    has_whole: bool = True
    code_dtype: torch.dtype = torch.int16
    kept: tuple[str, ...] = ()
    before_sign: Tensor | None = None
    _was_calibrated: bool = True  # what was last known of the buffer
    _share_told: bool = False  # the buffer was looked at by `share_of_data` since it was loaded

    @property
    def needs_data(self) -> bool:
        """Whether its learned tensors start from data, whether or not it has had them (`calibrated`)."""
        return "calibrated" in self._buffers

    @property
    def calibrated(self) -> bool:
        """False while the learned tensors wait for `initialize` with data; in a compiled graph what was last known."""
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
        """`calibrated`, looked up in the buffer unless it is known to be set: a graph that is compiled breaks there."""
        if not self._was_calibrated:
            self._was_calibrated = is_set(cast(Tensor, self._buffers["calibrated"]))
        return self._was_calibrated

    def share_of_data(self) -> float | None:
        """The flag of its data, below 1 in an average that began before them: once, when it is set; else None."""
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
        """Whether 0 is the edge between its only two levels (at first, where it is learned): signs are such.

        Inputs of one sign, as behind a ReLU, are then all quantized to one value.
        """
        return self.signs

    @property
    def is_final(self) -> bool:
        """Whether it quantizes as in the end; until then what was trained is not what ships."""
        return True

    def tensors(self) -> tuple[Tensor, ...]:
        """Learned or scheduled tensors, in the order in which `quantize` and `backward` take them.

        Where training differs from evaluation, so do they: stochastic rounding is handed a key in training alone. So
        the two functions need not ask for the mode, which may be another one when the backward runs.
        """
        return ()

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        """The quantized tensor ``x_q``: shape, dtype and device of ``x``; the product of what `whole` gives."""
        whole = self.whole(x, *tensors)
        if whole is None:
            raise NotImplementedError(f"{type(self).__name__} defines neither whole() nor quantize()")
        values, scale = whole
        return (values if scale is None else values * scale).to(x.dtype)

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole | None:
        """Whole numbers and their scale, of which ``x_q`` is the product; None where it isn't made so.

        Layers add up products of whole numbers, which is exact, and multiply the sum by the scales. Quantizers that
        keep real numbers, or have an offset or two scales, give None, and are then asked to `quantize`.
        """
        return None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A class that has one of the two anew does not compute what it inherits of the other.
        of_whole, of_quantize = (
            next(i for i, parent in enumerate(cls.__mro__) if name in parent.__dict__) for name in ("whole", "quantize")
        )
        cls.has_whole = of_whole <= of_quantize
        if of_whole < of_quantize:
            cls.quantize = Quantizer.quantize

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        """The pseudo-gradient: gradient of ``x``, then of each tensor, from ``grad``, the gradient of ``x_q``.

        ``grad`` is handed over: it may be overwritten, and returned.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no backward()")

    def snapshot(self) -> Self:
        """This quantizer as it computes now, whatever becomes of its mode, its stage and its other Python attributes.

        A backward calls the snapshot that was taken when its forward ran: `backward` may then read ``self.training``,
        and quantizing again gives what the forward had. Tensors are shared: those that count come by `hold`.
        """
        return as_it_is_now(self)

    def hold(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """``tensors`` as a backward may read them after `set_progress_` and `after_step_`, which write into buffers.

        Buffers of one element are copied. What is learned stays the tensor itself: where that changed in between,
        autograd raises, as it does for any weight.
        """
        return tuple(t if t.requires_grad or t.numel() != 1 else t.clone() for t in tensors)

    def codes(self, x: Tensor, *tensors: Tensor) -> Codes:
        """Integer codes of ``x``, with ``quantize(x, *tensors) == codes.dequantize().to(x.dtype)``, exactly.

        Those of `whole`, in ``code_dtype``, unless a subclass has others.

        Raises:
            TypeError: the quantizer keeps real numbers and so has no codes.
        """
        whole = self.whole(x, *tensors)
        if whole is None:
            raise TypeError(f"{type(self).__name__} has no integer codes")
        values, scale = whole
        one = torch.ones((), dtype=x.dtype, device=x.device)
        return Codes(values.to(self.code_dtype), one if scale is None else scale)

    def levels(self, *tensors: Tensor) -> Levels | None:
        """The levels that all ``x`` are quantized to; None where they depend on ``x``, or are real numbers.

        Integer inference and export need those of the input: without them its layer computes on floats.
        """
        return None

    def build(self, channels: int, dim: int) -> None:
        """Create learned tensors with one element for each of the input's ``channels``, its dimension ``dim``."""

    def initialize(self, x: Tensor) -> None:
        """Create or set the learned tensors from ``x``: the float weight of the layer, or the first inputs.

        What needs data waits through an ``x`` that is empty or of equal values: its tensors stay, and it is not
        calibrated by it.
        """

    def observer(self) -> Observer:
        """What watches the batches of `qconv.calibrate` for `initialize_from`.

        A quantizer that starts from figures of the data, not from the tensor, is a `FromData`. The others get the first
        samples, as many as have together at most 2^22 values.
        """
        return Samples()

    def initialize_from(self, observer: Observer) -> None:
        """Set the learned tensors from what ``observer``, which `observer` made, has seen."""
        if isinstance(observer, Samples) and not observer.is_empty:
            self.initialize(observer.joined())

    @torch.no_grad()
    def go_on_from_(self, other: "Quantizer", x: Tensor | None) -> None:
        """Start where ``other``, of the same class and with other arguments, has come to: with what is `kept`.

        What comes from data is set anew: from ``x``, the latent weight; with None, from the next training batch.
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
        """What follows an optimizer step, in place: bring latent tensors into their range, move random streams on.

        ``x`` is the latent weight; None where the quantizer has an input or a gradient.
        """

    def set_progress_(self, progress: float, x: Tensor | None) -> None:
        """Set the buffers of a schedule; ``progress`` goes from 0, the start of training, to 1, its end.

        ``x`` is the latent weight; None where the quantizer has an input or a gradient.
        """

    def forward(self, x: Tensor) -> Tensor:
        """Quantize as an autograd node of its own."""
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
        # Where a float checkpoint holds nothing of the quantizer, the layer sets it from the loaded weight instead.
        flag = self._buffers.pop("calibrated", None)  # which depends on what becomes of the others
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
        # A step of another shape or none was not loaded, and the one that is here still waits for data.
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


def whole_of(quantizer: Quantizer, x: Tensor, tensors: Sequence[Tensor]) -> Whole | None:
    """The whole numbers and the scale that ``quantizer.quantize`` multiplies; None where it does something else."""
    return quantizer.whole(x, *tensors) if quantizer.has_whole else None


def is_plain_cpu(x: Tensor) -> bool:
    """Whether values can be looked at for nothing: no transfer from a device, no fake tensor, nothing that is traced.

    `torch.jit.trace` would keep what these values decided, and go wrong on others.
    """
    return x.device.type == "cpu" and type(x) in (Tensor, nn.Parameter) and not torch.jit.is_tracing()  # pyright: ignore
