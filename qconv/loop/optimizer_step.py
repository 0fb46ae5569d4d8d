"""Calls of a training loop beside the optimizer: after each optimizer step, and as training progresses."""

import inspect
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..ground.checks import check_module, in_a_line
from ..layers import QuantizedLayer
from ..layers.naming import name_of
from ..layers.twins import quantized_layers
from ..quantizers import Quantizer, Stages
from ..quantizers.base import bounded, is_plain, is_plain_cpu
from ..quantizers.part import Part
from .input_signs import note

_torch: Any = torch  # whose stubs leave out _foreach_*

PATIENCE = 20
"""The number of optimizer steps between two looks at what other devices than the CPU hold."""


def after_step(model: nn.Module) -> None:
    """Update all quantized layers, and quantizers outside of them, in place after an optimizer step.

    Latent weights are clamped to the range of their quantizers (BNN and BWN to [-1, 1], DeepShift to its powers),
    learned steps are kept positive, and random streams of stochastic rounding advance. Frozen weights and learned
    tensors (``requires_grad=False``) stay as they are. Call it after ``optimizer.step()``, or use `after_every_step`.

    Raises:
        TypeError: ``model`` is not a module.
        FloatingPointError: NaN or inf in a learned tensor on the CPU. From another device it is not read: that would
            wait.
    """
    check_module(model)
    held = _Held.by(model)
    note(held.layers, "is_stepped")
    _after_step(held)
    _check_learned(model, held.learned)


class _Held(NamedTuple):
    """What is stepped in a model: layers, quantizers that are not part of one or of another, and what all learn."""

    layers: list[QuantizedLayer]
    alone: list[Quantizer]
    learned: list[Tensor]

    @classmethod
    def by(cls, model: nn.Module) -> "_Held":
        """Look through a model in every step, without making the names of its modules, which takes longer."""
        held, outside, seen, inside = cls([], [], []), list[Quantizer](), set[nn.Module](), set[nn.Module]()

        def visit(module: nn.Module, is_inside: bool) -> None:
            if is_inside:
                inside.add(module)
            if module in seen:
                return
            seen.add(module)
            if isinstance(module, QuantizedLayer):
                held.layers.append(module)
                is_inside = True
            elif isinstance(module, Part):
                held.learned.extend([x for x in module._parameters.values() if x is not None and x.requires_grad])
                if not is_inside and isinstance(module, Quantizer):
                    outside.append(module)
                    is_inside = True
            for child in module._modules.values():
                if child is not None and (child._modules or isinstance(child, Part | QuantizedLayer)):
                    visit(child, is_inside)

        visit(model, False)
        for quantizer in outside:
            if quantizer not in inside and all(isinstance(tensor, Tensor) for tensor in quantizer.tensors()):
                held.alone.append(quantizer)
        return held


@torch.no_grad()
def _after_step(held: _Held) -> None:
    """Step all; what is only clamped, is clamped together: a GPU starts a few kernels in place of one for each."""
    stepped: list[tuple[Quantizer, Tensor | None]] = [(quantizer, None) for quantizer in held.alone]
    for layer in held.layers:
        if torch.compiler.is_compiling() or not layer.is_stepped_by_quantizers:
            layer.after_step_()
        else:
            stepped += layer.stepped()
    together: dict[tuple[float, float, bool], dict[int, Tensor]] = {}  # each once: layers may share a weight
    for quantizer, weight in stepped:
        clamped = [*bounded(quantizer, weight)]
        is_more = type(quantizer).after_step_ is not Quantizer.after_step_ or "stream" in quantizer._modules
        if is_more or not all(is_plain(tensor) for tensor, *_ in clamped):
            quantizer.after_step_(weight)
            continue
        for tensor, low, high, is_magnitude in clamped:
            together.setdefault((low, high, is_magnitude), {})[id(tensor)] = tensor
    for (low, high, is_magnitude), by_id in together.items():
        tensors = [*by_id.values()]
        signs = _torch._foreach_sign(tensors) if is_magnitude else None
        if is_magnitude:
            _torch._foreach_abs_(tensors)
        _torch._foreach_clamp_min_(tensors, low)
        if high < math.inf:
            _torch._foreach_clamp_max_(tensors, high)
        if signs is not None:
            _torch._foreach_mul_(tensors, signs)


@torch.no_grad()
def _check_learned(model: nn.Module, learned: Sequence[Tensor], wait: bool = False) -> None:
    """Raise for NaN or inf in what quantizers have learned, which no checkpoint may hold.

    On other devices than the CPU only with ``wait``.
    """
    readable = [tensor for tensor in learned if is_plain_cpu(tensor) or (wait and is_plain(tensor))]
    norms = _torch._foreach_norm(readable, 1) if readable else ()
    if all(map(math.isfinite, norms)):
        return
    wrong = next((tensor for tensor in readable if not tensor.isfinite().all()), None)
    if wrong is None:  # a sum beyond float16
        return
    name = next(name for name, parameter in model.named_parameters() if parameter is wrong)
    raise FloatingPointError(
        f"an optimizer step left NaN or inf in {name}: the training has diverged. Restart from an earlier state "
        "with a smaller learning rate or clipped gradients (torch.nn.utils.clip_grad_norm_)"
    )


def after_every_step(optimizer: Optimizer, model: nn.Module) -> RemovableHandle:
    """Make every ``optimizer.step()`` end with `after_step`; ``handle.remove()`` undoes it.

    It works in your own loop, under Lightning and Accelerate, and with a gradient scaler, because all call ``step`` of
    the optimizer itself. If an optimizer wraps another, the innermost is used. `copy.deepcopy` and `pickle` of torch's
    optimizers drop this: call it again for the copies.

    Learned tensors of a later stage (`Stages`) have gradients of zero while they wait, yet the optimizer builds up
    moments and step counts for them. Both are reset after each step, so that these tensors start fresh when their stage
    begins. This works for torch's Adam family, SGD, RMSprop, Adagrad and Adadelta, for optimizers that have only Adam's
    moments, and for the slow weights of timm's Lookahead, but not if the optimizer's step is compiled.

    An optimizer that was made before `qconv.convert` or a layer's ``set_scheme`` has the weights, but not what the
    scheme learns in addition, such as LSQ's steps. A warning names such tensors.

    Raises:
        TypeError: ``optimizer`` is not a torch optimizer and wraps none; ``model`` is not a module.
        FloatingPointError: a step leaves NaN or inf in a learned tensor. Tensors that are not on the CPU are read every
            20 steps. If the optimizer's step is compiled, none is read.
    """
    inside = innermost(optimizer)
    check_module(model)
    note(quantized_layers(model).values(), "is_stepped")
    if names := left_out(inside, model):
        more = f" and {len(names) - 1} other parameter{'s' * (len(names) > 2)}" if len(names) > 1 else ""
        warnings.warn(
            f"the optimizer lacks parameters that the schemes of its weights learn: {names[0]}{more}. Create it "
            "after qconv.convert, or call optimizer.add_param_group. If they should not change, call "
            "requires_grad_(False). Ignore this if another optimizer trains them",
            stacklevel=2,
        )
    return inside.register_step_post_hook(_AfterStep(model))


class _AfterStep:
    """A hook that is copied together with its model, for optimizers whose copies keep their hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.steps = 0
        self.quantizers: list[Quantizer] = []
        self.stages: list[Stages] = []
        self.waiting: list[Tensor] = []  # after the last step

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_inner_step(optimizer):
            return
        held = _Held.by(self.model)
        _after_step(held)
        if torch.compiler.is_compiling():
            return
        quantizers = [layer.weight_quantizer for layer in held.layers]
        if [*map(id, quantizers)] != [*map(id, self.quantizers)]:  # at first, and after `set_scheme` or `convert`
            self.quantizers, self.steps = quantizers, 0
            self.stages = [module for module in self.model.modules() if isinstance(module, Stages)]
        self.steps += 1
        _check_learned(self.model, held.learned, wait=self.steps % PATIENCE == 0)
        waiting = [*_waiting(self.stages)]
        for tensor in waiting:
            _set_back(optimizer, tensor)
        for tensor in (*waiting, *self.waiting):  # those whose stage has just begun, too: their first value came late
            if isinstance(slow := optimizer.state.get(tensor, {}).get(_SLOW), Tensor):
                slow.copy_(tensor.detach())
        self.waiting = waiting


_KNOWN = (
    *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax),
    *(torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.SGD),
)
_AT_THE_START = {
    **dict.fromkeys(("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg"), 0),
    **dict.fromkeys(("acc_delta", "momentum_buffer"), 0),
    "mu_product": 1,
}
"""What these optimizers have of a new tensor. Others use some of these names for values that start elsewhere."""
_SLOW = "lookahead_slow_buff"
"""The slow weight of timm's Lookahead, in the state of the optimizer that it wraps."""


def _waiting(quantizers: Iterable[Stages]) -> Iterator[Tensor]:
    """Yield the learned tensors of later stages."""
    for stages in quantizers:
        for quantizer in list(stages.quantizers)[stages.stage + 1 :]:
            yield from quantizer.parameters()


def _set_back(optimizer: Optimizer, tensor: Tensor) -> None:
    """Set what an optimizer has of a tensor back to the start; it stays there, as checkpoints of shards expect.

    Of an optimizer that is not known, only what is Adam's alone: its moments start at 0 everywhere.
    """
    state = optimizer.state.get(tensor, {})
    if type(optimizer) not in _KNOWN and not ("exp_avg" in state and state.keys() - {_SLOW} <= _AT_THE_START.keys()):
        return
    values = {**_AT_THE_START, "sum": optimizer.defaults.get("initial_accumulator_value", 0)}
    for name in values.keys() & state.keys():
        if isinstance(state[name], Tensor):
            state[name].fill_(values[name])
        elif isinstance(state[name], int | float):
            state[name] = values[name]


def left_out(optimizer: Any, model: nn.Module) -> list[str]:
    """The names of what quantizers learn of layers whose weight ``optimizer`` holds, but which it does not hold."""
    held = {id(tensor) for group in innermost(optimizer).param_groups for tensor in group["params"]}
    return [
        ".".join(filter(None, (name, place, own)))
        for name, layer in quantized_layers(model).items()
        if id(layer._parameters.get("weight")) in held
        for place, quantizer in layer.quantizers().items()
        for own, tensor in quantizer.named_parameters()
        if tensor.requires_grad and id(tensor) not in held
    ]


def is_stepped_by(optimizer: Any, model: nn.Module) -> bool:
    """Whether the steps of ``optimizer`` end with `after_step` of the model, or of one that has its layers."""
    hooks = innermost(optimizer)._optimizer_step_post_hooks.values()
    layers = set(quantized_layers(model).values())
    return any(isinstance(hook, _AfterStep) and layers <= set(hook.model.modules()) for hook in hooks)


_WRAPPED = "optimizer", "_optimizer", "base_optimizer", "_base_optimizer", "optim"


def is_sharding(optimizer: Any) -> bool:
    """Whether it gives each process an optimizer of its own for some of the parameters; its import takes long."""
    return type(optimizer).__name__ in ("ZeroRedundancyOptimizer", "OSS")


def innermost(optimizer: Any) -> Optimizer:
    """Return the optimizer that makes the step: Accelerate's, Lightning's and others wrap it, as SAM and Lookahead do.

    The one in torch's `ZeroRedundancyOptimizer` has a share of the parameters only: that optimizer counts itself.
    """
    seen: set[int] = set()
    while id(optimizer) not in seen:
        seen.add(id(optimizer))
        attributes = getattr(optimizer, "__dict__", {})
        names = () if is_sharding(optimizer) else _WRAPPED
        inside = (attributes.get(name) for name in names)
        optimizer = next((value for value in inside if isinstance(value, Optimizer)), optimizer)
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer (={in_a_line(optimizer)}) must be a torch.optim.Optimizer, or wrap one")
    return optimizer


_STEP = Optimizer.profile_hook_step(lambda _: None).__code__


def is_inner_step(optimizer: Optimizer) -> bool:
    """Whether this hook belongs to a step that another step of the optimizer has called, as by ``super().step()``.

    torch calls the hooks of an optimizer around each of the two, if both classes have been instantiated.
    """
    if torch.compiler.is_compiling():
        return False
    frame, steps = inspect.currentframe(), 0
    while frame is not None and steps < 2:
        steps += frame.f_code is _STEP and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return steps == 2


def set_progress(model: nn.Module, progress: float) -> None:
    """Set every schedule in the quantizers of ``model``.

    These are the derivatives of IR-Net, AdaBin, ReSTE and FDA, ReCU's tau, SiMaN's percentile, INQ's portions,
    DeepShift-PS's random rounding, and the stages of `two_stage`, `layerwise` and `staged`.

    Call it at the start of each epoch with ``epoch / epochs``; the schedules' ends are the quantizers' arguments. It
    sets buffers: they are saved, resumed and broadcast.

    Raises:
        ValueError: ``progress`` is not from 0 to 1.
        TypeError: ``progress`` is not a number; ``model`` is not a module.
    """
    check_module(model)
    if isinstance(progress, Tensor) and not progress.ndim:
        progress = progress.item()
    if isinstance(progress, bool) or not isinstance(progress, Real):
        raise TypeError(f"progress (={progress!r}) must be a number from 0 to 1")
    progress = float(progress)
    if not 0 <= progress <= 1:
        raise ValueError(f"progress (={progress}) must be from 0, the start of training, to 1, its end")
    held = _Held.by(model)
    for layer in held.layers:
        layer.set_progress_(progress)
    for quantizer in held.alone:
        quantizer.set_progress_(progress, None)


def is_final(model: nn.Module) -> bool:
    """Whether all quantizers of ``model`` are past their stages and portions: whether it is what will ship."""
    return all(quantizer.is_final for quantizer in _quantizers(model))


def check_final(model: nn.Module, argument: str) -> None:
    """Raise a ValueError for a layer that will quantize otherwise at the end: what it costs now tells nothing."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLayer) and not all(each.is_final for each in module.quantizers().values()):
            raise ValueError(
                f"{argument}: {name_of(module, name)} changes during training, so its cost now is not its final "
                "cost: pass the scheme of its last stage, or one that does not change"
            )


def final_from(model: nn.Module) -> float:
    """Return the progress from which all quantizers of ``model`` are final, if `set_progress` is called with it."""
    return max((quantizer.final_from for quantizer in _quantizers(model)), default=0.0)


def _quantizers(model: nn.Module) -> Iterator[Quantizer]:
    held = _Held.by(model)
    for layer in held.layers:
        yield from layer.quantizers().values()
    yield from held.alone
