"""Freezing: a trained model becomes one that computes on integers."""

import copy
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from ..layers import QuantizedLayer
from ..layers.bypassed import forget, is_own_hook
from ..layers.computed import computed_by
from ..layers.naming import name_of
from ..packed.layer import describe
from ..packed.tensors import inner_model, joined
from ..quantizers import Quantizer
from .functional import trained_module
from .layers import IntegerLayer
from .parts import Part
from .proof import Parts, find_sample, takes
from .rewrite import Frozen, Rewriter, make_contiguous

_COMPARED = 4  # samples of an example on which traces are compared
_BATCH = 32
_TRACING = threading.RLock()  # while `torch.fx` traces, every module that any thread calls becomes part of the graph


class FrozenModel(nn.Module):
    """An inference model: `network` computes on integers where `layers` says so.

    Attributes:
        layers: what became of each quantized layer.
        untraced: names of the modules whose forward stays Python, and why; those inside of them may be frozen.
        nan: what samples with NaN lead to, "pass" or "refuse", as of `freeze`.
        functions: what functions in forwards compute, as modules, by the names that `Frozen.folded` may have of them.
        batch_dims: how many dimensions a batch has; None if that is not known.
    """

    def __init__(
        self,
        network: nn.Module,
        layers: tuple[Frozen, ...],
        untraced: dict[str, str] | None = None,
        nan: Literal["pass", "refuse"] = "pass",
        functions: Mapping[str, nn.Module] | None = None,
        batch_dims: int | None = None,
    ) -> None:
        super().__init__()
        self.network, self.layers, self.untraced, self.nan = network, layers, untraced or {}, nan
        self.functions = {} if functions is None else dict(functions)
        self.batch_dims = batch_dims
        self._hides_nan = any(told.arithmetic in ("integer", "shift") for told in layers)

    def forward(self, input: Tensor) -> Tensor:
        """What the trained model gives in evaluation.

        Raises:
            ValueError: NaN or inf in the input of a model that was frozen with ``nan="refuse"``; a single sample that
                is not a batch, where the model can't compute it.
        """
        if not self._hides_nan and self.nan == "pass":
            return self._run(input)
        wrong = ~input.isfinite()
        wrong = wrong.flatten(1).any(1) if input.ndim > 1 else wrong.any().view(1)
        if self.nan == "refuse" and bool(wrong.any()):
            raise ValueError(f"input has NaN or inf in {int(wrong.sum())} of {len(input)} samples")
        return tree_map(lambda output: _with_nan(output, wrong), self._run(input))

    def _run(self, input: Tensor) -> Tensor:
        if input.ndim == 4 and isinstance(self.network, fx.GraphModule):  # the format of the integer operators
            input = input.contiguous(memory_format=torch.channels_last)
        try:
            return self.network(input)
        except (RuntimeError, ValueError, IndexError) as error:
            if self.batch_dims is None or input.ndim != self.batch_dims - 1:
                raise
            raise ValueError(
                f"input has shape {tuple(input.shape)}; a frozen model takes batches, of {self.batch_dims} dimensions: "
                "call it with input.unsqueeze(0)"
            ) from error

    def find(self, name: str) -> nn.Module:
        """What stands for the module that has this name in the trained model.

        Raises:
            AttributeError: nothing does: its work is done by another one.
        """
        module = self.network
        for key in name.split(".") if name else ():
            module = getattr(module.graph if isinstance(module, Part) else module, key)
        return module.graph if isinstance(module, Part) else module

    def folded(self, name: str, model: nn.Module) -> nn.Module:
        """What `Frozen.folded` names, as it was trained: a module of the trained `model`, or what a function does.

        Raises:
            AttributeError: the model has no such module.
        """
        function = self.functions.get(name)
        return trained_module(model, name) if function is None else function

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if fn(torch.zeros(1)).dtype != torch.float32:
            raise ValueError("a frozen model computes on integers and float32: it can't be cast")
        return super()._apply(fn, recurse)

    def train(self, mode: bool = True) -> "FrozenModel":
        """Raise a ValueError unless `mode` is False."""
        if mode:
            raise ValueError("a frozen model can't be trained: train the model that it was made from")
        return super().train(False)


@torch.no_grad()
def freeze(
    model: nn.Module,
    *,
    tolerance: float = 0.0,
    example: Tensor | None = None,
    nan: Literal["pass", "refuse"] = "pass",
) -> FrozenModel:
    """An inference model of a trained one, which stays as it is: integers inside, batch norm folded; on the CPU.

    Quantized layers run on integer operators where their codes allow it: signs by exclusive or and counting bits, codes
    of up to 8 bits as 8-bit integers with 32-bit sums, powers of two on fixed-point inputs in 8-bit parts, which are
    shifted. The others multiply floats, by a weight that is quantized once. Batch norm behind a layer of integers
    becomes its scale and bias. Where nothing but batch norm, monotone activations and maximum pooling lies between two
    quantized layers, as modules or as functions (``F.relu(x)``, ``x.clamp(0, 6)``), they become integers, too: a
    threshold per channel for signs, else a rounding that is proved to give the trained codes for every possible sum.
    `FrozenModel.layers` says what became of each layer, and why.

    The model takes one tensor; what else its forward takes has its default. What can't be traced faithfully by
    `torch.fx` stays Python, and its parts are frozen alone: a forward that branches on shapes, that changes the module,
    that draws random numbers or enters autocast; and one whose trace gives other outputs than the module, or calls
    other layers, on samples of `example` (without one: on random inputs, if some of usual shapes suit the model). A
    layer whose weight the model reads beside its call stays as it was trained. `FrozenModel.untraced` says which
    modules stay Python, and why. Where such a module reaches into a part that is frozen as a whole, and no input has
    shown it, a `ReadBeside` that names the part is raised when it happens.

    Integers have no NaN. A trained sign makes +1 of it, and so does a frozen one; all other quantizers hand it on, and
    a frozen model with layers of such codes gives NaN for each sample that holds one, or inf, of which a float layer
    makes NaN. (An ONNX file does not.)

    Args:
        model: the trained one.
        tolerance: how far a rounding may be from the trained quantizer's steps, in steps. With 0 it is proved equal,
            which float32 does not allow for codes of 8 bits: those go through floats. With 0.01 they are handed on, and
            may be off by one.
        example: inputs as in use, with which the frozen model is compared with the trained one by `qconv.verify`.
        nan: "refuse" makes the frozen model raise a ValueError for inputs with NaN or inf.

    Raises:
        TypeError: `model` is not a module, or can't be copied; `example` is not a tensor.
        ValueError: a quantizer that waits for data or is not in its last stage; NaN or inf in a tensor; another dtype
            than float32; hooks, which would be lost; a model that is frozen, or needs several inputs; a tolerance
            outside 0 to 1; another `nan`; an example that the model does not take; a frozen model that differs from the
            trained one on `example`.
    """
    if not 0 <= tolerance <= 1:
        raise ValueError(f"tolerance (={tolerance}) must be at least 0 and at most 1")
    if nan not in ("pass", "refuse"):
        raise ValueError(f"nan (={nan!r}) must be 'pass' or 'refuse'")
    made = build(model, tolerance, example)
    made.nan = nan
    if example is not None:
        _check(model, made, example)
    return made


def _required_inputs(model: nn.Module) -> list[inspect.Parameter]:
    """The arguments without which the model can't be called."""
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    arguments = inspect.signature(model.forward, follow_wrapped=False).parameters.values()
    return [each for each in arguments if each.default is each.empty and each.kind not in kinds]


def build(model: nn.Module, tolerance: float, example: Tensor | None) -> FrozenModel:
    """As `freeze`, with traces compared on samples of `example`, and nothing else."""
    with _TRACING:
        return _build(model, tolerance, example)


@torch.no_grad()
def _build(model: nn.Module, tolerance: float, example: Tensor | None) -> FrozenModel:
    if example is not None and not isinstance(example, Tensor):
        raise TypeError(f"example ({type(example).__name__}) must be a tensor of inputs")
    if example is not None and not example.numel():
        raise ValueError(f"example (of shape {tuple(example.shape)}) must hold at least one sample")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model ({type(model).__name__}) must be a torch.nn.Module")
    model = inner_model(model)
    needed = _required_inputs(model)
    if len(needed) > 1:
        raise ValueError(
            f"model ({type(model).__name__}) takes {', '.join(each.name for each in needed)}: a frozen model takes one "
            "tensor. Freeze the part that does, or give the others a default"
        )
    if needed and needed[0].kind is inspect.Parameter.KEYWORD_ONLY:
        raise ValueError(
            f"model ({type(model).__name__}) takes {needed[0].name} by name alone: a frozen model takes one tensor by "
            "its place. Take the * out of its forward"
        )
    if any(isinstance(module, IntegerLayer | FrozenModel) for module in model.modules()):
        raise ValueError("model is frozen already")
    exact = [name for name, module in model.named_modules() if isinstance(module, Quantizer)]  # scales may be float64
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_floating_point():
            continue
        if tensor.dtype != torch.float32 and name.rpartition(".")[0] not in exact:
            raise ValueError(f"'{name}' is {tensor.dtype}: call model.float() before it is frozen")
        if not tensor.isfinite().all():
            raise ValueError(f"'{name}' has NaN or inf: nothing can be frozen with it")
    for name, module in model.named_modules():
        if not all(map(is_own_hook, (*module._forward_hooks.values(), *module._forward_pre_hooks.values()))):
            if maker := computed_by(module):
                raise ValueError(f"{name_of(module, name)}: {maker}")
            raise ValueError(
                f"'{name}' ({type(module).__name__}) has hooks, which a frozen model would lose: remove them"
            )
        if isinstance(module, QuantizedLayer):
            describe(name, module)  # raises where what it computes is not yet what ships
    try:
        network = copy.deepcopy(model).eval().cpu()
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"model ({type(model).__name__}) can't be copied: {error}") from error
    forget(network)
    if example is None:
        sample = find_sample(network)
    else:
        sample = example[:_COMPARED].detach().cpu()
        try:
            takes(network, sample)
        except Exception as error:  # of a forward that is not ours, all kinds
            what = f"example (of shape {tuple(example.shape)}) does not suit the model"
            raise ValueError(f"{what}: {str(error).partition(chr(10))[0]}") from error
    parts = Parts(network)
    if sample is not None:
        parts.prove(sample)
    frozen = [_untouched(name, reason) for name, reason in parts.reasons.items() if _is_layer(model, name)]
    shared = parts.shared()
    functions: dict[str, nn.Module] = {}
    for part in parts.graphs.values():
        rewriter = Rewriter(part.graph, joined(part.name, ""), part.is_single, tolerance, shared)
        rewriter.run()
        frozen += rewriter.frozen
        functions |= rewriter.functions
    network = parts.place().requires_grad_(False)
    for module in network.modules():
        # Not where a quantizer is left: in another order of the weights its means are rounded otherwise.
        if isinstance(module, nn.Conv2d) and not isinstance(module, QuantizedLayer):
            module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    order = {name: index for index, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    layers = tuple(sorted(frozen, key=lambda each: order[each.name]))
    dims = None if sample is None else sample.ndim
    made = FrozenModel(network, layers, parts.reasons, functions=functions, batch_dims=dims).eval()
    if sample is not None:
        _run(made, sample)
    return made


def _with_nan(output: Any, wrong: Tensor) -> Any:
    """An output of samples, NaN in those that are wrong; other outputs as they are, or all NaN if a sample is wrong."""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return output
    is_of_samples = output.ndim > 0 and output.shape[0] == wrong.shape[0]
    where = wrong.view(-1, *[1] * (output.ndim - 1)) if is_of_samples else wrong.any()
    return output.masked_fill(where, torch.nan)


def _is_layer(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name), QuantizedLayer)


def _untouched(name: str, reason: str) -> Frozen:
    return Frozen(name, "float", reason=reason)


def _run(frozen: FrozenModel, sample: Tensor) -> None:
    """See that the frozen model takes what the trained one takes."""
    try:
        frozen(sample)
    except RuntimeError as error:
        if not isinstance(frozen.network, fx.GraphModule) or not make_contiguous(frozen.network):
            raise ValueError(f"the frozen model can't compute what the trained one does: {error}") from error
        _run(frozen, sample)


def _check(model: nn.Module, frozen: FrozenModel, example: Tensor) -> None:
    """Raise a ValueError unless the frozen model computes what the trained one does."""
    from .verify import verify  # which freezes what it finds in files

    model = copy.deepcopy(model).eval().cpu()
    if isinstance(model(example[:1].cpu()), Tensor):
        found = verify(model, frozen, example.detach().cpu().split(_BATCH))
        if not found.equal:
            raise ValueError(f"the frozen model does not compute what the trained one does:\n{found}")
