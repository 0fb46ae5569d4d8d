"""The base of all quantized layers: their quantizers, their forward, and what a model does with a layer."""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError
from torch.nn.utils import parametrize

from ..function.kept_input import Lean
from ..function.operations import ExtendedOperation, Operation
from ..function.quantized_op import LayerQuantizers, quantized_op
from ..processes import is_distributed, leaving
from ..quantizers import Codes, Identity, Quantizer
from ..quantizers.flags import is_readable
from ..quantizers.observers import Observer
from ..scheme import Scheme
from .adopt import adopt, without_quantizers
from .calibration import calibrate, calibrate_from, lost
from .computed import (
    check_computed_once,
    computed_by,
    evaluated,
    stored_weight,
    trained_weights,
    with_base,
)
from .given import autocast_dtype, check_input, checked
from .loading import refusal, translate
from .naming import QUANTIZERS, name_of


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
        name_in_model: the name under which `qconv.convert` found it; in ``__dict__`` only then.
        lean: what the backward keeps of the input: bits (`qconv.lean`), or the input itself if None.
        observe: called with every input while `qconv.calibrate` runs; None otherwise.
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
    name_in_model: str
    lean: Lean | None = None
    observe: Callable[[Tensor], None] | None = None

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
        before = self._modules.get("input_quantizer")
        self.input_quantizer = scheme.input()
        if isinstance(before, Quantizer):
            self.input_quantizer.before_sign = before.before_sign
        self.weight_quantizer = scheme.weight()
        self.register_module("grad_quantizer", None if scheme.grad is None else scheme.grad())
        self.scheme = scheme
        self.input_quantizer.build(*self.input_channels())
        self._start_from_weight()
        stored = stored_weight(self)
        for quantizer in self.quantizers().values():
            quantizer.to(stored.device, stored.dtype)
            quantizer.requires_grad_(trained)
            quantizer.train(self.training)
        if not computed_by(self):
            self.weight.requires_grad_(trained and not self.weight_quantizer.replaces_weight)

    @classmethod
    def check_scheme(cls, scheme: Scheme) -> None:
        """Raise a ValueError if this kind of layer can't follow ``scheme``."""

    @property
    def is_trained(self) -> bool:
        """Whether the weight, or what replaces it, requires a gradient."""
        if "scheme" in self.__dict__ and self.weight_quantizer.replaces_weight:
            return any(tensor.requires_grad for tensor in self.weight_quantizer.tensors())
        if computed_by(self):
            return any(parameter.requires_grad for parameter in trained_weights(self))
        return self.weight.requires_grad

    @property
    def is_float(self) -> bool:
        """Whether it quantizes nothing, and so computes as its float twin does."""
        return all(isinstance(quantizer, Identity) for quantizer in self.quantizers().values())

    @property
    def has_scale_map(self) -> bool:
        """Whether the output is multiplied by the scheme's map of input magnitudes: while the input is signs."""
        return self.scheme.scale_map and self.input_quantizer.makes_signs

    def input_channels(self) -> tuple[int, int]:
        """The number of input channels, and their dimension in the input."""
        return self.in_channels, 1

    @property
    def pads_by_input(self) -> bool:
        """Whether the padding depends on the size of the input."""
        return False

    def filters(self) -> Tensor:
        """The latent weight with the output channels in dimension 0, as quantizers expect it."""
        return self.weight

    def from_filters(self, filters: Tensor) -> Tensor:
        """The inverse of `filters`: back to the layout of ``weight``."""
        return filters

    @contextmanager
    def as_evaluated(self) -> Iterator[tuple[Quantizer, Tensor]]:
        """The weight's quantizer and the `filters` as in evaluation, without gradient: nothing is drawn at random."""
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
        weight = None if self._is_frozen or computed_by(self) else self.filters()
        return [(self.weight_quantizer, weight), *((quantizer, None) for quantizer in self._other_quantizers())]

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
        if self._is_frozen or computed_by(self):
            with evaluated(self):
                filters = self.filters().clone()
            self.weight_quantizer.set_progress_(progress, filters)
        else:
            filters = self.filters()
            self.weight_quantizer.set_progress_(progress, filters)
            self._put_back(filters)
        for quantizer in self._other_quantizers():
            quantizer.set_progress_(progress, None)

    @torch.no_grad()
    def _start_from_weight(self) -> None:
        """Set what the weight's quantizer learns from the weight; it is fresh (`NeedsData`)."""
        with evaluated(self):
            self.weight_quantizer.initialize(self.filters().detach())
        self._refresh()

    def _refresh(self) -> None:
        for part in self.weight_quantizer.modules():
            if isinstance(part, Quantizer) and part._parameters:
                part.start_()

    def follow_weight_(self) -> None:
        """Set what a fresh quantizer has learned from the weight anew, as every forward in training does.

        Not from tensors that only stand in for parameters, as in `torch.func.functional_call`.
        """
        if not self.weight_quantizer.is_fresh:
            return
        own = *trained_weights(self), *self.weight_quantizer.parameters()
        if all(type(tensor) is nn.Parameter and not tensor.is_meta for tensor in own) and not lost(self, own):
            self._start_from_weight()

    @property
    def _is_frozen(self) -> bool:
        """Whether the latent weight is a buffer, or a parameter that is not trained."""
        weight = self._parameters.get("weight")
        return "weight" in self._buffers if weight is None else not weight.requires_grad

    def _put_back(self, filters: Tensor) -> None:
        is_copy = filters.data_ptr() != self.weight.data_ptr()  # in another layout
        # Unchanged values are not copied back: a backward that still needs the weight would find it changed.
        if is_copy and (filters.is_inference() or filters._version):
            self.weight.copy_(self.from_filters(filters))

    def quantizers(self) -> dict[str, Quantizer]:
        """Return its quantizers by the names of their attributes."""
        return {name: getattr(self, name) for name in QUANTIZERS if getattr(self, name) is not None}

    def _other_quantizers(self) -> list[Quantizer]:
        """The quantizers of the input and of the gradient."""
        return [quantizer for quantizer in (self.input_quantizer, self.grad_quantizer) if quantizer is not None]

    def apply_op(self, input: Tensor, op: Operation | ExtendedOperation, bias: Tensor | None, *extra: Tensor) -> Tensor:
        """Run ``op`` with this layer's quantizers; under autocast in its dtype, as for a float layer."""
        compiling = torch.compiler.is_compiling()
        if not compiling:
            check_computed_once(self, self.weight_quantizer, self.filters)
            if self.training and is_readable(input):
                self.follow_weight_()
        elif torch.compiler.is_dynamo_compiling():
            self._while_compiled(id(self))
        quantizers = LayerQuantizers(
            self.input_quantizer, self.weight_quantizer, self.grad_quantizer, self.scheme.backward_weight
        )
        if self.observe is not None:
            self.observe(input)
        calibrates = False
        if self.training and self.input_quantizer.is_fresh:
            if compiling:
                torch._dynamo.graph_break(
                    msg="call qconv.calibrate(model, batches) before torch.compile(fullgraph=True)"
                )
            calibrates = self.input_quantizer.reads_fresh()
            if calibrates:
                calibrate(self, input, settles=compiling)
        output = self._compute(input, op, bias, quantizers, *extra)
        if self.training and not compiling and torch.is_grad_enabled() and not output.requires_grad:
            quantizers.settle_()  # it is frozen: there will be no backward
        if calibrates and not compiling and output.requires_grad and is_distributed():
            output.register_hook(leaving())
        return output

    def _compute(
        self,
        input: Tensor,
        op: Operation | ExtendedOperation,
        bias: Tensor | None,
        quantizers: LayerQuantizers,
        *extra: Tensor,
    ) -> Tensor:
        device, name = input.device.type, partial(name_of, self)
        dtype = autocast_dtype(device)
        if dtype is None or input.dtype == torch.float64:  # autocast leaves float64 alone
            return quantized_op(input, self.filters(), bias, op, quantizers, *extra, lean=self.lean, name=name)
        with torch.autocast(device, enabled=False):
            bias = None if bias is None else bias.to(dtype)
            return quantized_op(
                input.to(dtype), self.filters(), bias, op, quantizers, *extra, lean=self.lean, name=name
            )

    def _while_compiled(self, identity: int) -> None:
        """Follow the weight while Dynamo makes a graph; the call is not in it, so training begins here.

        To ask for ``id(self)`` makes it the graph of this layer alone: of another one, its own call would be missing.
        """
        del identity
        if self.training:
            self.follow_weight_()
        if torch.is_grad_enabled():
            self.weight_quantizer.settle_()

    # As `torch.compiler.assume_constant_result` does, which loads the compiler. Of a function, torch 2.11 would take no
    # layer as its argument.
    _while_compiled._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]

    def calibrate_(self, input: Tensor) -> None:
        """Set the learned tensors of the input's quantizer from ``input``, the same in all processes.

        All processes must call it. They get the mean over those whose input has a range. If none has one, because
        inputs are empty or all values are equal, nothing is set.

        Raises:
            ValueError: NaN or inf in the input of any process; learned tensors held by ``fully_shard``.
            RuntimeError: another process is at another layer, or does not come (`meet`); a replica of DataParallel.
        """
        calibrate(self, input, settles=True)

    def calibrate_from_(self, observer: Observer) -> bool:
        """As `calibrate_`, from the finite values that an observer of the input's quantizer has seen.

        Returns:
            Whether the quantizer was set, in all processes.
        """
        return calibrate_from(self, observer)

    def as_node(self, *arguments: Any) -> Any:
        """Record this call as one node of a graph of `torch.fx`, as for torch's own layers.

        A tracer treats only the modules of ``torch.nn`` as units, and would trace into this one.
        """
        tracer: Any = next(argument.tracer for argument in arguments if isinstance(argument, fx.Proxy))
        if tracer.root is self:
            raise TraceError(f"{type(self).__name__} can't be the root that is traced: trace nn.Sequential(layer)")
        return tracer.create_proxy("call_module", tracer.path_of_module(self), arguments, {})

    def check_input(self, input: Tensor) -> None:
        """Raise unless the input has a floating dtype, and the dtype and device of the weight.

        Raises:
            TypeError: no tensor; an integer, boolean or complex input, or without autocast a dtype other than the
                weight's.
            ValueError: a device other than the weight's.
        """
        check_input(self, input)

    def reset_parameters(self) -> None:
        """Initialize as the ``torch.nn`` twin does, and start all quantizers anew, also in their stages and schedules.

        Those that need data wait for it again. Quantizers of another kind than the scheme's stay as they are.
        """
        super().reset_parameters()  # pyright: ignore[reportAttributeAccessIssue]  # the twin comes next in the bases
        if "scheme" not in self.__dict__:  # the twin's constructor calls this before there are quantizers
            return
        self._reset_quantizers()
        self._start_from_weight()

    def _reset_quantizers(self, places: Iterable[str] = QUANTIZERS) -> None:
        """Start quantizers anew, but for what the weight's learns from the weight."""
        fresh = self.scheme.input(), self.scheme.weight(), None if self.scheme.grad is None else self.scheme.grad()
        fresh[0].build(*self.input_channels())
        for place, new in zip(QUANTIZERS, fresh, strict=True):
            own = getattr(self, place)
            if place not in places or new is None or type(new) is not type(own):
                continue
            shapes = {name: tensor.shape for name, tensor in own.state_dict().items()}
            state = dict(new.state_dict())  # without what it says of its bits
            if place == "weight_quantizer":  # what it learns comes from the weight, below, perhaps in another shape
                learned = {name for name, tensor in new.named_parameters() if shapes.get(name) != tensor.shape}
                state = {name: tensor for name, tensor in state.items() if name not in learned}
            if all(shapes.get(name) == tensor.shape for name, tensor in state.items()):
                own.load_state_dict(state, strict=False)

    def _on_meta(self) -> list[str]:
        """The places of the quantizers that have tensors without values."""
        return [
            place
            for place in QUANTIZERS
            if (own := getattr(self, place, None)) is not None  # the twin's constructor may cast before there are any
            and any(tensor.is_meta for tensor in (*own.parameters(), *own.buffers()))
        ]

    @classmethod
    def adopt(cls, layer: nn.Module, scheme: Scheme | None) -> None:
        """Turn ``layer``, of type ``cls.float_type`` or an equivalent subclass, into a quantized layer in place.

        The object stays the same: its parameters, hooks and the places that share it are kept.
        """
        adopt(layer, cls, scheme)

    def release(self) -> None:
        """Undo `adopt`: turn this layer into its ``torch.nn`` twin again, with `float_weight` as weight."""
        if not computed_by(self):  # a computed weight stays as it is
            trained = self.is_trained
            with torch.no_grad():
                self.weight.copy_(self.float_weight())
            self.weight.requires_grad_(trained)
        self.without_quantizers_(with_base(self, self.float_type))

    def bake_(self) -> None:
        """Turn this layer into a float one for evaluation: its weight is the quantized one."""
        weight_q = self.quantized_weight()
        self.release()
        with torch.no_grad():
            self.weight.copy_(weight_q)

    def without_quantizers_(self, kind: type[nn.Module]) -> None:
        """Remove everything that only a quantized layer has, and set the class to ``kind``."""
        without_quantizers(self, kind)

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
        error_msgs += self.translate(state_dict, prefix)
        if wrong := refusal(self, state_dict, prefix):
            error_msgs.append(wrong)
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        learned = f"{prefix}weight_quantizer."
        if not self.weight.is_meta:  # assigned from a checkpoint that has no quantizers
            stored = tuple(
                place for place in QUANTIZERS if any(key.startswith(f"{prefix}{place}.") for key in state_dict)
            )
            without = [place for place in self._on_meta() if place not in stored]
            for place in without:
                getattr(self, place).to_empty(device=self.weight.device)
            self._reset_quantizers(without)
        if f"{prefix}weight" in state_dict and not any(key.startswith(learned) for key in state_dict):
            self._start_from_weight()

    def translate(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        """Give the tensors of a layer of a method's authors the names that they have here; return what forbids it."""
        return translate(self, state_dict, prefix)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        """Cast or move the tensors, which is no change of what is learned; from the meta device, start it anew."""
        before = self._on_meta()
        super()._apply(*args, **kwargs)
        if before and not self._on_meta():  # `to_empty` leaves whatever the memory held
            self._reset_quantizers(before)
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

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scheme={self.scheme.name}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"  # one line per layer: the scheme describes the children
