"""Quantizers in sequence during training: float first, then fewer and fewer bits."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from ..ground.processes import gathered, whole
from .base import Codes, Levels, Quantizer, Whole, whole_of
from .flags import SHARE, Mark, is_readable, may_differ
from .form import Form
from .mixed import Mixed
from .observers import Observer, Several
from .part import Rule, has_begun
from .rounding import Rounding


class Stages(Quantizer):
    """Quantizes with the last of ``stages`` that has begun.

    Two-stage training, activations first (ReActNet, arXiv:2003.03488; Bulat et al., arXiv:1904.05868), gives the weight
    ``Stages([(0, Identity), (0.5, Sign)])``; progressive bits are ``Stages([(0, partial(LSQ, 4)), (0.5, partial(LSQ,
    2))])``. A stage begins with a new quantizer, whatever weight decay did to its learned tensors while they waited: a
    weight quantizer is initialized from the latent weight at that moment, an input quantizer that needs data from the
    next training batch. If the previous stage was of the same class, learned ranges (`Quantizer.kept`) carry over. A
    schedule inside a stage runs from the start of the stage to its end. A start is reached at progress that lies within
    1e-9 of it, as sums of floats do.

    The learned tensors of all stages exist from the start, so that the optimizer holds them. The gradient of waiting
    ones is zero, not None, since DistributedDataParallel waits for every gradient; `qconv.after_every_step` sets
    back what the optimizer has gathered of them, so that they train as new ones. `torch.compile` recompiles at each
    stage. The stage is saved as a float buffer, ``begun``, with a flag for each stage, above 0 once it has begun: an
    average of models is in the last stage among them. A stage at 1 never begins, because progress stays below 1 in
    training: `bits` is then that of the stage before. Latent weights are clipped by the rule of the current stage's
    quantizer.

    Args:
        stages: pairs (progress at which it begins, factory of its quantizer); the first begins at 0.

    Raises:
        ValueError: no stages, a first stage that does not begin at 0, starts that do not increase or lie beyond 1; one
            stage for weights and another for inputs; a quantizer that replaces the weight (`ShiftPS`).
        TypeError: a quantizer in place of its factory, or a factory that makes something else.
    """

    begun: Tensor
    _place: slice | None = None  # of a snapshot

    def __init__(self, stages: Sequence[tuple[float, Callable[[], Quantizer]]]) -> None:
        super().__init__()
        self.starts = tuple(float(start) for start, _ in stages)
        if not self.starts or self.starts[0] != 0:
            raise ValueError(f"stages must begin with one at 0, not at {self.starts[:1]}")
        if not all(low < high for low, high in pairwise((*self.starts, math.inf))) or self.starts[-1] > 1:
            raise ValueError(f"stages (at {self.starts}) must begin one after another, from 0 to 1")
        made = []
        for _, factory in stages:
            if isinstance(factory, Quantizer):
                raise TypeError(f"stages must hold classes or partials that make a quantizer, not one ({factory})")
            made.append(factory())
        if wrong := [quantizer for quantizer in made if not isinstance(quantizer, Quantizer)]:
            raise TypeError(f"stages must hold what makes a quantizer, not {type(wrong[0]).__name__}")
        self.roles = tuple(role for role in Quantizer.roles if all(role in quantizer.roles for quantizer in made))
        if not self.roles:
            kinds = ", ".join(f"{type(quantizer).__name__} for {'/'.join(quantizer.roles)}" for quantizer in made)
            raise ValueError(f"stages can't be combined, because they have no role in common: {kinds}")
        if any(quantizer.replaces_weight for quantizer in made):
            raise ValueError("stages can't hold a quantizer whose learned tensors replace the weight (ShiftPS)")
        self.quantizers = nn.ModuleList(made)
        self.factories = [factory for _, factory in stages]
        self.built: tuple[int, int] | None = None
        self.register_buffer("begun", torch.tensor([1.0] + [0.0] * (len(made) - 1)))
        self._stage = 0
        self._seen: Mark | None = None
        self.last = sum(start < 1 for start in self.starts) - 1
        self.final_from = self.starts[self.last]
        self.final_from += made[self.last].final_from * (self._end(self.last) - self.final_from)

    @property
    def stage(self) -> int:
        """The last stage that has begun, counted from 0; in a compiled graph, the last known value."""
        if not self._is_snapshot and is_readable(self.begun):
            # The last stage is left by `set_progress_` and by loading alone, which write to `_seen` themselves.
            is_last = self._stage == len(self.starts) - 1
            if may_differ(self.begun, self._seen, self.training and is_last):
                self._read_stage()
        return self._stage

    def _read_stage(self) -> None:
        stage = max(number for number, flag in enumerate(self.begun.tolist()) if flag > 0)
        if stage != self._stage:  # to set an attribute of a module takes longer than to read the flags
            self._stage = stage
        if not self.begun.is_cpu:
            self._seen = Mark(self.begun)

    @stage.setter
    def stage(self, value: int) -> None:
        with torch.no_grad():
            self.begun.copy_(torch.arange(len(self.starts)) <= value)
        self._stage, self._seen = value, None

    def train(self, mode: bool = True) -> Self:
        """Set the mode as for any module; a graph compiled afterwards belongs to the current stage."""
        super().train(mode)
        self._stage = self.stage
        return self

    @property
    def current(self) -> Quantizer:
        """The quantizer of the current stage."""
        return self._all()[self.stage]

    @property
    def bits(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]  # it isn't set
        """The bits of the last stage that begins: the aim of training."""
        return self._all()[self.last].bits

    @property
    def is_final(self) -> bool:
        """Whether the last stage has begun and is final itself."""
        return self.stage == self.last and self.current.is_final

    @property
    def signs(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The signs of the current stage."""
        return self.current.signs

    @property
    def at_work(self) -> Quantizer:
        """The quantizer at work of the current stage."""
        return self.current.at_work

    @property
    def is_binary(self) -> bool:
        """Whether the current stage is binary."""
        return self.current.is_binary

    @property
    def splits_at_zero(self) -> bool:
        """Whether any stage splits at 0: the model before the layer is the same in all stages."""
        return any(quantizer.splits_at_zero for quantizer in self._all())

    @property
    def needs_data(self) -> bool:
        """Whether any stage needs data."""
        return any(quantizer.needs_data for quantizer in self._all())

    @property
    def calibrated(self) -> bool:
        """Whether the current stage is calibrated; setting it sets all stages that need data."""
        return self.current.calibrated

    @calibrated.setter
    def calibrated(self, value: bool) -> None:
        for quantizer in self._all():
            if quantizer.needs_data:
                quantizer.calibrated = value

    @property
    def is_fresh(self) -> bool:
        return self.current.is_fresh

    def reads_fresh(self) -> bool:
        return self.current.reads_fresh()

    def settle_(self) -> None:
        for quantizer in self._all():
            quantizer.settle_()

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(tensor for quantizer in self._all() for tensor in quantizer.tensors())

    def quantize(self, x: Tensor, *tensors: Tensor) -> Tensor:
        return self.current.quantize(x, *tensors[self._own()])

    def whole(self, x: Tensor, *tensors: Tensor) -> Whole | None:
        return whole_of(self.current, x, tensors[self._own()])

    @property
    def whole_ends(self) -> tuple[int, int] | None:
        return self.current.whole_ends

    def rounding_of(self, x: Tensor, *tensors: Tensor) -> Rounding | None:
        return self.current.known_rounding(x, *tensors[self._own()])

    def backward(self, grad: Tensor, x: Tensor, *tensors: Tensor) -> tuple[Tensor | None, ...]:
        return self._of_all(self.current.backward(grad, x, *tensors[self._own()]), tensors)

    @property
    def needs_input(self) -> bool:
        return self.current.needs_input

    def keep(self, x: Tensor, form: Form, *tensors: Tensor) -> tuple[Tensor, ...] | None:
        return self.current.keep(x, form, *tensors[self._own()])

    def restore(self, kept: Sequence[Tensor], form: Form, *tensors: Tensor) -> Whole | Tensor:
        return self.current.restore(kept, form, *tensors[self._own()])

    def backward_kept(
        self, grad: Tensor, kept: Sequence[Tensor], form: Form, *tensors: Tensor
    ) -> tuple[Tensor | None, ...]:
        return self._of_all(self.current.backward_kept(grad, kept, form, *tensors[self._own()]), tensors)

    def _of_all(self, grads: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Return the current stage's gradients, and None for the waiting tensors."""
        waiting = [torch.zeros_like(tensor) if tensor.is_floating_point() else None for tensor in tensors]
        waiting[self._own()] = grads[1:]
        return grads[0], *waiting

    def snapshot(self) -> Self:
        self._stage = self.stage  # it shares the buffer that the next stage changes
        made = super().snapshot()
        made._place = self._own()  # where `torch.jit.trace` records a Function, no other tensors may be read
        return made

    def hold(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        # Of waiting tensors only the shape is read, and the next stage writes into them.
        own = self._own()
        held = [tensor.new_empty(()).expand(tensor.shape) for tensor in tensors]
        held[own] = self.current.hold(*tensors[own])
        return tuple(held)

    def codes(self, x: Tensor, *tensors: Tensor) -> Codes:
        return self.current.codes(x, *tensors[self._own()])

    def levels(self, *tensors: Tensor) -> Levels | None:
        return self.current.levels(*tensors[self._own()])

    def build(self, channels: int, dim: int) -> None:
        self.built = channels, dim
        for quantizer in self._all():
            quantizer.build(channels, dim)

    def initialize(self, x: Tensor) -> None:
        for quantizer in self._all()[self.stage :]:
            quantizer.initialize(x)

    def search_(self, x: Tensor) -> None:
        self.current.search_(x)

    def observer(self) -> Observer:
        return Several([quantizer.observer() for quantizer in self._all()[self.stage :]])

    def initialize_from(self, observer: Observer) -> None:
        for quantizer, own in zip(self._all()[self.stage :], cast(Several, observer).observers, strict=True):
            quantizer.initialize_from(own)

    def after_step_(self, x: Tensor | None) -> None:
        self.current.after_step_(x)

    def set_progress_(self, progress: float, x: Tensor | None) -> None:
        stage = sum(has_begun(start, progress) for start in self.starts) - 1
        if stage != self.stage:
            before, self.stage = self.current, stage
            with gathered(self):
                self._begin(before, None if x is None else whole(x))
        start = self.starts[stage]
        length = self._end(stage) - start
        self.current.set_progress_(min(max(progress - start, 0.0) / length, 1.0) if length else 1.0, x)

    def _begin(self, before: Quantizer, x: Tensor | None) -> None:
        """Set the stage's quantizer to its initial learned tensors, all whole."""
        with torch.random.fork_rng(devices=[]):
            fresh = self.factories[self.stage]()
        if self.built is not None:
            fresh.build(*self.built)
        values = dict(fresh.named_parameters())
        with torch.no_grad():
            for name, parameter in self.current.named_parameters():
                if name in values and values[name].shape == parameter.shape:
                    parameter.copy_(values[name])
        if isinstance(before, Mixed) and type(before.quantizer) is type(self.current):  # it now quantizes all elements
            self.current.load_state_dict(before.quantizer.state_dict())
            return
        if self.current.goes_on_from(before):
            fresh = before
        elif x is not None:
            fresh.initialize(x)  # its `kept` tensors are copied, and come from the weight of this moment
        self.current.go_on_from_(fresh, x)

    def _end(self, stage: int) -> float:
        """Return the progress at which the next stage begins."""
        return (*self.starts, 1.0)[stage + 1]

    def rules(self) -> dict[str, Rule]:
        return {"begun": SHARE}

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._seen = None
        if is_readable(self.begun):  # now: a compiled graph does not read it
            self._read_stage()

    def _all(self) -> list[Quantizer]:
        return [cast(Quantizer, quantizer) for quantizer in self.quantizers]

    def _own(self) -> slice:
        """Return the position of the current stage's tensors among all."""
        if self._place is not None:
            return self._place
        counts = [len(quantizer.tensors()) for quantizer in self._all()]
        first = sum(counts[: self.stage])
        return slice(first, first + counts[self.stage])

    def extra_repr(self) -> str:
        return f"starts={self.starts}, stage={self.stage}"
