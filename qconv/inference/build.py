"""Building a frozen model: the graph of the trained one, rewritten for integers."""

import copy
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from ..ground.checks import check_module
from ..layers import QuantizedLayer
from ..layers.bypassed import is_own_hook
from ..layers.computed import computed_by
from ..layers.copies import check_copies
from ..layers.naming import name_of
from ..lean import lean
from ..packed.layer import check_called, check_shippable
from ..packed.tensors import check_values, inner_model, joined
from ..packed.weight import describe_weight
from ..program.operations import Program
from ..program.plan import NotFused, Planned
from ..quantizers import Quantizer
from ..quantizers.base import has_codes, is_plain, is_wrapped
from .defaults import of_shipping
from .frozen_layers import IntegerLayer
from .functional import trained_module
from .lower import Refused, lower
from .parts import find
from .proof import Parts, find_sample, takes
from .rewrite import Frozen, Rewriter, make_contiguous

# Multiplications of floats in an image from which libraries, and tables for signs, are faster than a fixed order of
# sums: on one thread with AVX-512, a float ResNet-18 of 556 million takes 145 ms for 16 images as a plan and 93 in
# torch, with binary weights 144 and 44; a ResNet-20 of 41 million 9.3 and 12.4, 9.2 and 8.8.
_MANY = 1 << 27
_COMPARED = 4  # samples of an example for comparing traces
_TRACING = threading.RLock()  # while `torch.fx` traces, modules called by any thread become part of the graph


class FrozenModel(nn.Module):
    """A model for inference on integers: `network` computes, and `layers` describes how.

    On the CPU, float32 images go through the network as one plan in C, if a program can hold it (`unplanned`).

    Attributes:
        layers: the result for each quantized layer.
        untraced: the modules with a forward that stays Python, and why; modules inside them may be frozen.
        nan: the treatment of samples with NaN, "pass" or "refuse", as in `freeze`.
        functions: modules that compute the functions called in forwards, by their names in `Frozen.folded`.
        batch_dims: the number of dimensions of a batch; None if unknown.
        unplanned: why images go through `network` module by module; empty if they do not. Known from the first images.
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
        self.unplanned = ""
        self._hides_nan = any(told.arithmetic != "float" for told in layers)
        self._planned: Planned | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Return the output of the trained model in evaluation.

        Raises:
            ValueError: NaN or inf in the input of a model frozen with ``nan="refuse"``; a single sample instead of a
                batch, if the model can't compute it.
        """
        planned = self._plan(input)
        if self.nan == "pass" and (planned is not None or not self._hides_nan):  # a plan knows NaN by itself
            return self._run(input) if planned is None else planned(input)
        wrong = ~input.isfinite()
        wrong = wrong.flatten(1).any(1) if input.ndim > 1 else wrong.any().view(1)
        if self.nan == "refuse" and bool(wrong.any()):
            raise ValueError(f"input has NaN or inf in {int(wrong.sum())} of {len(input)} samples")
        if planned is not None:
            return planned(input)
        return tree_map(lambda output: _with_nan(output, wrong), self._run(input))

    def program(self, input: Tensor) -> Program | None:
        """Return the network as a list of operations for images like `input`; None if there is no plan for them."""
        planned = self._plan(input)
        return None if planned is None else planned.program

    def program_bytes(self, input: Tensor) -> bytes:
        """Return the file of the network's program for images like `input`, as `qconv.save_program` writes it.

        Raises:
            ValueError: there is no plan for them.
        """
        planned = self._plan(input, whatever_its_floats=True)
        if planned is None:
            reason = self.unplanned or f"its input (of shape {tuple(input.shape)}) does not fit"
            raise ValueError(f"the model has no program: {reason}")
        return bytes(planned.content.numpy())

    def _plan(self, input: Tensor, whatever_its_floats: bool = False) -> Planned | None:
        """Return what runs these images as a plan; None if they go through the network module by module."""
        if (self.unplanned and not whatever_its_floats) or not _is_plain_images(input):
            return None
        planned = self._planned
        if planned is None or not planned.takes(input):
            try:
                program = lower(self.network, input)
                floats, others = program.multiplications((input.shape[2], input.shape[3]))
                if floats > max(others, _MANY) and not whatever_its_floats:
                    raise Refused(f"{floats:,} multiplications of floats are faster in its modules")
                self._planned = planned = Planned(program, self._hides_nan)
                self.unplanned = ""
            except (Refused, NotFused) as reason:
                self.unplanned = str(reason).partition("\n")[0]  # torch.fx adds where it was
                return None
        return planned if planned.fits(input) else None

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
        """Return the module that replaces the trained model's module of this name.

        Raises:
            AttributeError: there is none: another module does its work.
        """
        return find(self.network, name)

    def folded(self, name: str, model: nn.Module) -> nn.Module:
        """Return a module of `Frozen.folded` as trained: one of the trained `model`, or one for a function.

        Raises:
            AttributeError: the model has no such module.
        """
        function = self.functions.get(name)
        return trained_module(model, name) if function is None else function

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_planned": None}  # a copy may be changed before it runs

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        self._planned = None
        super()._load_from_state_dict(*args, **options)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if fn(torch.zeros(1, dtype=torch.float32, device="cpu")).dtype != torch.float32:
            raise ValueError("a frozen model computes on integers and float32: it can't be cast")
        return super()._apply(fn, recurse)

    def train(self, mode: bool = True) -> "FrozenModel":
        """Raise a ValueError unless `mode` is False."""
        if mode:
            raise ValueError("a frozen model can't be trained: train the model that it was made from")
        return super().train(False)


def _required_inputs(model: nn.Module) -> list[inspect.Parameter]:
    """Return the arguments that a call of the model requires."""
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    arguments = inspect.signature(model.forward, follow_wrapped=False).parameters.values()
    return [argument for argument in arguments if argument.default is argument.empty and argument.kind not in kinds]


def build(model: nn.Module, tolerance: float, example: Tensor | None) -> FrozenModel:
    """Freeze as `freeze` does, but compare only traces, on samples of `example`."""
    with _TRACING, of_shipping():
        return _build(model, tolerance, example)


def _check_codes(name: str, layer: QuantizedLayer) -> None:
    """Raise if a layer's input quantizer defines levels but no codes, as a user's own quantizer may."""
    quantizer = layer.input_quantizer.at_work
    if not has_codes(quantizer) and quantizer.levels(*quantizer.tensors()) is not None:
        kind = type(quantizer).__name__
        raise ValueError(
            f"{name_of(layer, name)}: {kind} states levels(), but has no codes on them: define whole() in place of "
            "quantize()"
        )


@torch.no_grad()
def _build(model: nn.Module, tolerance: float, example: Tensor | None) -> FrozenModel:
    if example is not None and not isinstance(example, Tensor):
        raise TypeError(f"example ({type(example).__name__}) must be a tensor of inputs")
    if example is not None and not example.numel():
        raise ValueError(f"example (of shape {tuple(example.shape)}) must hold at least one sample")
    if example is not None and not example.isfinite().all():
        raise ValueError("example has NaN or inf: pass typical inputs")
    check_module(model)
    model = inner_model(model)
    needed = _required_inputs(model)
    if len(needed) > 1:
        raise ValueError(
            f"model ({type(model).__name__}) takes {', '.join(argument.name for argument in needed)}: a frozen model "
            "takes one tensor. Freeze the part that does, or let the others have a default"
        )
    if needed and needed[0].kind is inspect.Parameter.KEYWORD_ONLY:
        raise ValueError(
            f"model ({type(model).__name__}) takes {needed[0].name} only by name, but a frozen model takes one "
            "tensor by position: remove the * from its forward"
        )
    if any(isinstance(module, IntegerLayer | FrozenModel) for module in model.modules()):
        raise ValueError("model is already frozen")
    exact = [name for name, module in model.named_modules() if isinstance(module, Quantizer)]  # scales may be float64
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_floating_point():
            continue
        if tensor.dtype != torch.float32 and name.rpartition(".")[0] not in exact:
            raise ValueError(f"'{name}' is {tensor.dtype}: call model.float() before it is frozen")
    try:
        check_values(model, dict((*model.named_parameters(), *model.named_buffers())))
    except ValueError as error:
        raise ValueError(f"{error}: nothing can be frozen with it") from None
    for name, module in model.named_modules():
        if not all(map(is_own_hook, (*module._forward_hooks.values(), *module._forward_pre_hooks.values()))):
            if maker := computed_by(module):
                raise ValueError(f"{name_of(module, name)}: {maker}")
            raise ValueError(
                f"'{name}' ({type(module).__name__}) has hooks, which a frozen model would lose: remove them"
            )
        if isinstance(module, QuantizedLayer):
            check_shippable(name, module)
            _check_codes(name, module)
            describe_weight(name, module, strict=True)  # raises if its codes do not give the weight
    check_copies(model)
    try:
        network = copy.deepcopy(model).eval().cpu()
    except (TypeError, RuntimeError) as error:
        raise TypeError(f"model ({type(model).__name__}) can't be copied: {error}") from error
    for name, module in network.named_modules():
        if module.training:
            raise ValueError(
                f"'{name}' ({type(module).__name__}) stays in training mode after model.eval(), and a frozen model has "
                "none: let its train() reach all modules"
            )
        inside = getattr(module, "_orig_mod", None) if name else None
        if isinstance(inside, nn.Module) and any(isinstance(each, QuantizedLayer) for each in inside.modules()):
            raise ValueError(f"'{name}' is a torch.compile of a part: put its _orig_mod there, or call part.compile()")
    lean(network, False)
    if example is None:
        sample = find_sample(network)
    else:
        sample = example[:_COMPARED].detach().cpu()
        try:
            takes(network, sample)
        except Exception as error:  # a foreign forward may raise anything
            what = f"example (of shape {tuple(example.shape)}) does not suit the model"
            raise ValueError(f"{what}: {str(error).partition(chr(10))[0]}") from error
    if sample is not None:
        check_called(network, sample)
    parts = Parts(network)
    if sample is not None:
        parts.prove(sample)
    frozen = [_untouched(name, reason) for name, reason in parts.reasons.items() if _is_layer(model, name)]
    shared = parts.shared()
    functions: dict[str, nn.Module] = {}
    for part in parts.graphs.values():
        rewriter = Rewriter(part._graph, joined(part._path, ""), part._is_single, tolerance, shared)
        rewriter.run()
        frozen += rewriter.frozen
        functions |= rewriter.functions
    network = parts.place().requires_grad_(False)
    for module in network.modules():
        # Not if a quantizer is left: another order of the weights changes the rounding of its means.
        if isinstance(module, nn.Conv2d) and not isinstance(module, QuantizedLayer):
            module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    order = {name: index for index, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    layers = tuple(sorted(frozen, key=lambda layer: order[layer.name]))
    dims = None if sample is None else sample.ndim
    made = FrozenModel(network, layers, parts.reasons, functions=functions, batch_dims=dims).eval()
    if sample is not None:
        _run(made, sample)
    return made


def _is_plain_images(input: Tensor) -> bool:
    """Whether these are images that C may read: nothing is traced or differentiated, and no mode looks on."""
    if torch.compiler.is_compiling():
        return False
    return (
        is_plain(input)
        and input.is_cpu
        and input.layout == torch.strided
        and not (input.is_neg() or input._is_zerotensor())
        and (input.dtype, input.ndim) == (torch.float32, 4)
        and input.numel() > 0
        and not (is_wrapped(input) or torch.is_autocast_enabled("cpu"))
        and not (torch.is_grad_enabled() and input.requires_grad)
        and not torch._C._len_torch_dispatch_stack()  # pyright: ignore[reportAttributeAccessIssue]
    )


def _with_nan(output: Any, wrong: Tensor) -> Any:
    """Set bad samples of an output to NaN; an output without samples becomes NaN if any sample is bad."""
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
    """Check that the frozen model accepts the inputs of the trained one."""
    try:
        frozen._run(sample)
    except RuntimeError as error:
        if not isinstance(frozen.network, fx.GraphModule) or not make_contiguous(frozen.network):
            raise ValueError(f"the frozen model can't compute what the trained one does: {error}") from error
        _run(frozen, sample)
