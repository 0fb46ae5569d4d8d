"""The base of all quantized layers: quantizers, forward, calibration and updates."""

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..function.kept_input import Lean
from ..function.operations import ExtendedOperation, Operation
from ..function.quantized_op import LayerQuantizers, quantized_op
from ..ground.processes import gathered, is_distributed, leaving
from ..quantizers import Codes, Identity, Quantizer
from ..quantizers.flags import is_readable
from ..scheme import Scheme
from .arguments import autocast_dtype, checked
from .calibration import calibrate, lost
from .computed import (
    check_computed_once,
    computed_by,
    evaluated,
    stored_weight,
    trained_weights,
)
from .loading import emptied, on_meta, refusal, reset_quantizers, translate
from .naming import QUANTIZERS, name_of, quantizers_of
from .sign_note import KEY


class QuantizedLayer(nn.Module):
    """Mixin that turns a ``torch.nn`` layer into a quantized one; put it first among the bases.

    The latent weight stays the plain parameter ``weight``. A float checkpoint loads with no missing key; learned
    tensors of the quantizers are then set from the loaded weight. `float_weight` leads back.

    Attributes:
        float_type: the ``torch.nn`` twin, or the converted subclass of it.
        filters_are_computed: whether `filters` is more than another layout of the weight.
        described_as: the class whose constructor arguments a packed file records; None means ``float_type``.
        own_arguments: further attributes that it records.
        scheme: the scheme that the layer was built with.
        input_quantizer: quantizer of the input.
        weight_quantizer: quantizer of the weight.
        grad_quantizer: quantizer of the output's gradient, or None.
        lean: what the backward keeps of the input: bits (`qconv.lean`), or the input itself if None.
        before_sign: the `note_of` the activations that `qconv.convert` made before it. It is saved, and a state dict
            with another note is refused. It is not a buffer, because it describes how the model was built, as a class
            does.
    """

    float_type: type[nn.Module]
    filters_are_computed: ClassVar[bool] = False
    described_as: ClassVar[type[nn.Module] | None] = None
    own_arguments: ClassVar[tuple[str, ...]] = ()
    weight: Tensor
    bias: Tensor | None
    in_channels: int
    scheme: Scheme
    input_quantizer: Quantizer
    weight_quantizer: Quantizer
    grad_quantizer: Quantizer | None
    lean: Lean | None = None
    before_sign: Tensor | None = None

    def set_scheme(self, scheme: Scheme | None) -> None:
        """Give the layer the quantizers of ``scheme`` (BWN for None), with learned tensors set from the weight.

        If the weight is frozen, they are frozen, too.
        """
        scheme = checked(scheme)
        self.check_scheme(scheme)
        trained = self.is_trained
        if "scheme" in self.__dict__ and self.weight_quantizer.replaces_weight:
            with torch.no_grad():
                self.weight.copy_(self.float_weight())  # continue from what was learned
        for name, quantizer in self._made(scheme).items():
            self.register_module(name, quantizer)
        self.scheme = scheme
        self._start_from_weight()
        stored = stored_weight(self)
        for quantizer in self.quantizers().values():
            quantizer.to(stored.device, stored.dtype)
            quantizer.requires_grad_(trained)
            quantizer.train(self.training)
        if not computed_by(self):
            self.weight.requires_grad_(trained and not self.weight_quantizer.replaces_weight)

    def _made(self, scheme: Scheme) -> dict[str, Quantizer | None]:
        """Make the quantizers of ``scheme`` for this layer."""
        of_input = scheme.input()
        of_input.build(*self.input_channels())
        made = of_input, scheme.weight(), None if scheme.grad is None else scheme.grad()
        return dict(zip(QUANTIZERS, made, strict=True))

    @torch.no_grad()
    def _start_from_weight(self, *, searches: bool = False) -> None:
        """Set the learned tensors of the weight's quantizer from the weight; the quantizer is fresh (`NeedsData`)."""
        with gathered(self), evaluated(self):
            filters = self.filters().detach()
            self.weight_quantizer.initialize(filters)
            if searches:
                self.weight_quantizer.search_(filters)
        self._refresh()

    def _refresh(self) -> None:
        """Let the weight's quantizer follow the weight until the first backward."""
        for part in self.weight_quantizer.modules():
            if isinstance(part, Quantizer) and part._parameters:
                part.start_()

    def follow_weight(self, *, searches: bool = False) -> None:
        """Set the learned tensors of a fresh weight quantizer from the weight again, as each training forward does.

        With ``searches``, as for use without training (`Quantizer.search_`).
        Not from tensors that only stand in for parameters, as in `torch.func.functional_call`.
        """
        if not self.weight_quantizer.is_fresh:
            return
        own = *trained_weights(self), *self.weight_quantizer.parameters()
        if all(type(tensor) is nn.Parameter and not tensor.is_meta for tensor in own) and not lost(self, own):
            self._start_from_weight(searches=searches)

    @classmethod
    def check_scheme(cls, scheme: Scheme) -> None:
        """Raise a ValueError if this kind of layer can't follow ``scheme``."""

    @property
    def is_trained(self) -> bool:
        """Whether the weight, or what replaces it, requires a gradient."""
        if "scheme" in self.__dict__ and self.weight_quantizer.replaces_weight:
            return any(tensor.requires_grad for tensor in self.weight_quantizer.tensors())
        return any(parameter.requires_grad for parameter in trained_weights(self))

    @property
    def is_float(self) -> bool:
        """Whether the layer quantizes nothing, and so computes as its float twin does."""
        return all(isinstance(quantizer, Identity) for quantizer in self.quantizers().values())

    @property
    def has_scale_map(self) -> bool:
        """Whether the output is multiplied by the scheme's map of input magnitudes: only while the input is signs."""
        return self.scheme.scale_map and self.input_quantizer.at_work.signs

    def input_channels(self) -> tuple[int, int]:
        """The number of input channels, and their dimension in the input."""
        return self.in_channels, 1

    def padded(self, input: Tensor) -> Tensor:
        """The float input with its padding, as it is quantized: padding counts in a range or a scale."""
        return input

    def filters(self) -> Tensor:
        """The latent weight with the output channels in dimension 0, as quantizers expect it."""
        return self.weight

    def from_filters(self, filters: Tensor) -> Tensor:
        """The inverse of `filters`: back to the layout of ``weight``."""
        return filters

    @contextmanager
    def as_evaluated(self) -> Iterator[tuple[Quantizer, Tensor]]:
        """The weight's quantizer and the `filters`, as in evaluation: without gradient and without random numbers."""
        quantizer, training = self.weight_quantizer, self.weight_quantizer.training
        quantizer.eval()
        try:
            with torch.no_grad(), evaluated(self):
                yield quantizer, self.filters()
        finally:
            quantizer.train(training)

    def quantized_weight(self) -> Tensor:
        """The weight of the forward in evaluation, in the layout of ``weight``, without gradient."""
        with self.as_evaluated() as (quantizer, filters):
            return self.from_filters(quantizer.quantize(filters, *quantizer.tensors()))

    def float_weight(self) -> Tensor:
        """The weight of the float twin: the latent one, or the quantized one once learned tensors replace it."""
        is_replaced = self.weight_quantizer.replaces_weight and not self.weight_quantizer.is_fresh
        return self.quantized_weight() if is_replaced else self.weight.detach()

    def weight_codes(self) -> Codes:
        """Integer codes and scales of `quantized_weight`, output channels in dimension 0."""
        with self.as_evaluated() as (quantizer, filters):
            return quantizer.codes(filters, *quantizer.tensors())

    @property
    def is_stepped_by_quantizers(self) -> bool:
        """Whether `after_step_` steps no more than the quantizers in `stepped`."""
        return type(self).after_step_ is QuantizedLayer.after_step_ and type(self).filters is QuantizedLayer.filters

    def stepped(self) -> list[tuple[Quantizer, Tensor | None]]:
        """The quantizers, each with the tensor that its `after_step_` gets."""
        return self._with_filters(self._trained_filters())

    def _with_filters(self, filters: Tensor | None) -> list[tuple[Quantizer, Tensor | None]]:
        """The quantizers, that of the weight with its filters."""
        return [(each, filters if each is self.weight_quantizer else None) for each in self.quantizers().values()]

    @torch.no_grad()
    def after_step_(self) -> None:
        """Update after an optimizer step: clamp the latent weight to the range of its quantizer.

        Frozen tensors (buffers, or ``requires_grad=False``), the weight or learned ones, stay as they are. So does what
        a weight is computed from.
        """
        for quantizer, filters in self.stepped():
            quantizer.after_step_(filters)
            if filters is not None:
                self._put_back(filters)

    @torch.no_grad()
    def set_progress_(self, progress: float) -> None:
        """Set the schedules of the quantizers; ``progress`` goes from 0 to 1 during training."""
        trained = self._trained_filters()
        with evaluated(self):
            filters = self.filters().clone() if trained is None else trained
        for quantizer, own in self._with_filters(filters):
            quantizer.set_progress_(progress, own)
        if trained is not None:
            self._put_back(trained)

    def _trained_filters(self) -> Tensor | None:
        """The `filters` that a step may change; None if the weight is frozen (or a buffer) or computed."""
        weight = self._parameters.get("weight")
        is_frozen = "weight" in self._buffers if weight is None else not weight.requires_grad
        return None if is_frozen or computed_by(self) else self.filters()

    def _put_back(self, filters: Tensor) -> None:
        is_copy = filters.data_ptr() != self.weight.data_ptr()  # in another layout
        # Unchanged values are not copied back: a backward that still needs the weight would find it changed.
        if is_copy and (filters.is_inference() or filters._version):
            self.weight.copy_(self.from_filters(filters))

    def quantizers(self) -> dict[str, Quantizer]:
        """Return the layer's quantizers by the names of their attributes."""
        return quantizers_of(self)

    def apply_op(self, input: Tensor, op: Operation | ExtendedOperation, bias: Tensor | None, *extra: Tensor) -> Tensor:
        """Run ``op`` with this layer's quantizers; under autocast in its dtype, as for a float layer."""
        compiling = torch.compiler.is_compiling()
        of_input, of_weight = self.input_quantizer, self.weight_quantizer
        if not compiling:
            if "weight" not in self._parameters:
                check_computed_once(self, of_weight, self.filters)
            if self.training and of_weight.is_fresh and is_readable(input):
                self.follow_weight()
        elif torch.compiler.is_dynamo_compiling():
            self._while_compiled(id(self))
        quantizers = LayerQuantizers(of_input, of_weight, self.grad_quantizer, self.scheme.backward_weight)
        calibrates = False
        if self.training and of_input.is_fresh:
            if compiling:
                torch._dynamo.graph_break(
                    msg="call qconv.calibrate(model, batches) before torch.compile(fullgraph=True), and where a stage "
                    "begins"
                )
            calibrates = of_input.reads_fresh()
            if calibrates:
                calibrate(self, of_input, input, settles=compiling)
        device, name = input.device.type, partial(name_of, self)
        dtype = None if input.dtype == torch.float64 else autocast_dtype(device)  # which leaves float64 alone
        with nullcontext() if dtype is None else torch.autocast(device, enabled=False):
            if dtype is not None:
                input, bias = input.to(dtype), None if bias is None else bias.to(dtype)
            output = quantized_op(input, self.filters(), bias, op, quantizers, *extra, lean=self.lean, name=name)
        if self.training and not compiling and torch.is_grad_enabled() and not output.requires_grad:
            quantizers.settle_()  # it is frozen: there will be no backward
        if calibrates and not compiling and output.requires_grad and is_distributed():
            output.register_hook(leaving())
        return output

    def _while_compiled(self, identity: int) -> None:
        """Follow the weight while Dynamo makes a graph; the call is not in it, so training begins here.

        To ask for ``id(self)`` makes it the graph of this layer alone: of another one, its own call would be missing.
        """
        del identity
        if self.training:
            self.follow_weight()
        if torch.is_grad_enabled():
            self.weight_quantizer.settle_()

    # As `torch.compiler.assume_constant_result` does, which loads the compiler. Of a function, torch 2.11 would take no
    # layer as its argument.
    _while_compiled._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]

    def calibrate_(self, input: Tensor) -> None:
        """Set the learned tensors of the input's quantizer from ``input``, the same in all processes.

        All processes must call it, and get the mean over those whose input has a range; if none has, nothing is set.

        Raises:
            ValueError: NaN or inf in the input of any process; learned tensors held by ``fully_shard``.
            RuntimeError: another process is at another layer, or does not come (`meet`); a replica of DataParallel.
        """
        calibrate(self, self.input_quantizer, input, settles=True)

    def reset_parameters(self) -> None:
        """Initialize as the ``torch.nn`` twin does, and reset all quantizers of the scheme's kinds."""
        super().reset_parameters()  # pyright: ignore[reportAttributeAccessIssue]  # the twin comes next in the bases
        if "scheme" not in self.__dict__:  # the twin's constructor calls this before there are quantizers
            return
        self._reset(QUANTIZERS)
        self._start_from_weight()

    def _reset(self, places: Collection[str]) -> None:
        if places:
            reset_quantizers(self, self._made(self.scheme), places)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        error_msgs = args[-1]
        error_msgs += translate(self, state_dict, prefix)
        if wrong := refusal(self, state_dict, prefix):
            error_msgs.append(wrong)
            return
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if not self.weight.is_meta:  # assigned
            self._reset(emptied(self, state_dict, prefix, self.weight.device))
        if f"{prefix}weight" in state_dict and not any(
            key.startswith(f"{prefix}weight_quantizer.") for key in state_dict
        ):
            self._start_from_weight()

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        """Cast or move the tensors, without a change of what is learned; coming from the meta device, reset them."""
        before = on_meta(self)
        super()._apply(*args, **kwargs)
        if before and not on_meta(self):  # `to_empty` leaves whatever the memory held
            self._reset(before)
            self._refresh()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # To the class of a parametrized layer torch would give one that calls no `__setstate__`, and no `__getstate__`.
        own: Any = super(type(self), self) if parametrize.is_parametrized(self) else self
        memo[id(self)] = copied = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(own.__getstate__(), memo))
        return copied

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.weight_quantizer.replaces_weight:
            # The weight was only the start of training; a float layer should load what was learned.
            destination[f"{prefix}weight"] = self.float_weight()
        if self.before_sign is not None:
            destination[f"{prefix}{KEY}"] = self.before_sign.clone()

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scheme={self.scheme.name}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"  # one line per layer: the scheme describes the children
