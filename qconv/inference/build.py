"""Building a frozen model: the program of the trained one, and what runs it."""

import copy
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..ground.checks import check_module
from ..layers import QuantizedLayer
from ..layers.bypassed import has_own_forward
from ..layers.copies import check_copies, copied
from ..layers.naming import name_of
from ..lean import lean
from ..packed.layer import check_called, check_shippable
from ..packed.tensors import check_values, inner_model
from ..packed.weight import describe_weight
from ..program.library import Library
from ..program.operations import Program, as_images
from ..program.plan import NotFused, program_bytes
from ..program.planned import Planned
from ..quantizers import Quantizer
from ..quantizers.base import has_codes, is_plain, is_wrapped
from .defaults import of_shipping
from .integers import arithmetic
from .lower import lower
from .record import NotRecorded, find_sample, takes


class Frozen(NamedTuple):
    """The result of freezing a layer.

    Attributes:
        name: the name of the layer in the model.
        arithmetic: "binary", "offset", "integer", "shift" or "float".
        reason: why it is float.
    """

    name: str
    arithmetic: str
    reason: str = ""


class FrozenModel(nn.Module):
    """A model for inference on integers: `layers` says how.

    On the CPU, float32 images go through the network as one plan in C; where that lacks a function, torch computes it
    between parts that C runs (`unplanned`).

    Attributes:
        layers: the result for each quantized layer.
        network: what runs inputs without a plan: the program by torch's operators, or the trained forward with frozen
            layers; None until the first input, if no usual shape suits the model.
        untraced: why the forward stays Python, and only its layers are frozen; empty if it does not.
        nan: the treatment of samples with NaN, "pass" or "refuse", as in `freeze`.
        unplanned: why C does not run all of the network; empty if it does. Known from the first images.
    """

    network: nn.Module | None

    def __init__(self, trained: nn.Module, layers: tuple[Frozen, ...], nan: Literal["pass", "refuse"] = "pass") -> None:
        super().__init__()
        self.layers = layers
        self.nan: Literal["pass", "refuse"] = nan
        self.network, self.untraced, self.unplanned = None, "", ""
        self._trained: tuple[nn.Module, ...] = (trained,)  # in a tuple it is no part of the model
        self._hides_nan = any(told.arithmetic != "float" for told in layers)
        self._program: Program | None = None
        self._sample = torch.empty(0, dtype=torch.uint8, device="meta")
        self._planned: Planned | None = None
        self._is_guess = False  # whether the sample is random, and of a usual size
        self._device = torch.device("cpu")

    def forward(self, input: Tensor) -> Any:
        """Return the output of the trained model in evaluation.

        Raises:
            ValueError: NaN or inf in the input of a model frozen with ``nan="refuse"``; a single sample instead of a
                batch.
        """
        if not torch.compiler.is_compiling():
            self.suit(input)
        images = self._images(input)
        plan = self._plan(images)
        knows_nan = not self._hides_nan or (plan is not None and not cast(Planned, self._planned).functions)
        if self.nan == "pass" and knows_nan:
            return (plan or self._run)(images)
        wrong = ~input.isfinite()
        wrong = wrong.flatten(1).any(1) if input.ndim > 1 else wrong.any().view(1)
        if self.nan == "refuse" and bool(wrong.any()):
            raise ValueError(f"input has NaN or inf in {int(wrong.sum())} of {len(input)} samples")
        output = (plan or self._run)(images)
        return output if knows_nan else tree_map(lambda each: _with_nan(each, wrong), output)

    def program(self, input: Tensor) -> Program:
        """Return the network as a list of operations for inputs like this one.

        Raises:
            ValueError: there is none, since its forward stays Python.
        """
        self.suit(input)
        if self._program is None:
            raise ValueError(f"the model has no program: {self.untraced}")
        return self._program

    def program_bytes(self, input: Tensor) -> bytes:
        """Return the file of the network's program for images like `input`, as `qconv.save_program` writes it.

        Raises:
            ValueError: there is no plan for them.
        """
        program = self.program(input)
        try:
            return bytes(program_bytes(program, self._hides_nan).numpy())
        except NotFused as reason:
            raise ValueError(f"the model has no program for C: {reason}") from None

    def traced(self, input: Tensor) -> nn.Module:
        """Return what `torch.export` traces for images like `input`: their plan alone; this model if they have none."""
        self.suit(input)
        planned = self._planned
        is_traced = self._plan(self._images(input)) is not None and not self.unplanned
        return planned if is_traced and planned is not None and len(planned.program.outputs) == 1 else self

    def own_values(self, input: Tensor) -> Mapping[int, Tensor]:
        """Return the values of the program's operations, by number: those of a plan, or of `network`."""
        self.program(input)
        images = self._images(input)
        planned = self._planned if self._plan(images) is not None else None
        return cast(Library, self.network).values(images) if planned is None else planned.values(images)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Raise a TypeError: the program and the plan are made of the trained model's numbers."""
        raise TypeError("a frozen model takes no state: load it into the trained model, and freeze that")

    def suit(self, input: Tensor, is_guess: bool = False) -> None:
        """Lower the network for inputs of this shape, unless it is lowered for them.

        A guess is for what needs no input, such as `torch.compile`; the first input replaces it.
        """
        program = self._program
        if not isinstance(input, Tensor):
            raise TypeError(f"input ({type(input).__name__}) must be a tensor of samples")
        if self._sample.is_floating_point() and not input.is_floating_point():
            what = f"input has dtype {input.dtype}; it must be a floating dtype"
            raise TypeError(f"{what}: call input.to(torch.float32)")
        is_sample = input.ndim == self._sample.ndim - 1
        if program is not None and input.ndim != self._sample.ndim and (is_sample or not self._trained):
            raise ValueError(
                f"input has shape {tuple(input.shape)}; a frozen model takes batches, of {self._sample.ndim} dimensions"
                f"{': call it with input.unsqueeze(0)' if is_sample else ''}"
            )
        if self.untraced or not self._trained:
            return
        is_other = self._is_guess and input.shape[1:] != self._sample.shape[1:]
        if program is None or is_other or not _fits(program, self._sample, input):
            self._lower(input, is_guess)

    @of_shipping()
    def _lower(self, input: Tensor, is_guess: bool) -> None:
        self._is_guess, sample = is_guess, input.detach()[:1].cpu()
        try:
            program = lower(self._trained[0], sample)
        except NotRecorded as reason:
            takes(self._trained[0], sample)  # which raises the network's own error, if there is one
            self.untraced = self.unplanned = str(reason)
            network, kept = _in_parts(self._trained[0], sample, self.nan)
            self.network = network.to(self._device)
            self.layers = tuple(kept.get(told.name, told) for told in self.layers)
            self._program, self._planned = None, None
        else:
            self._sample = torch.empty_like(sample, device="meta")
            self.network = Library(program).to(self._device)
            self._planned, self.unplanned = self._made_plan(program)
            self._program = program  # last: another thread goes on as soon as there is one
        if self._program is None or (self._program.size is None and input.ndim in (3, 4) and not is_guess):
            self._trained = ()

    def _made_plan(self, program: Program) -> tuple[Planned | None, str]:
        """Return the plan of a program, or why there is none."""
        if self._sample.ndim not in (2, 3, 4) or self._sample.dtype != torch.float32:
            what = f"{self._sample.dtype}, of {self._sample.ndim} dimensions"
            return None, f"its input ({what}) is not images of float32"
        try:
            planned = Planned(program, self._hides_nan)
        except NotFused as reason:
            return None, str(reason)
        height, width = as_images(self._sample).shape[2:]
        return planned, planned.suits((height, width))[1]

    def _images(self, input: Tensor) -> Tensor:
        """Return what a program takes; the input itself, if the forward stays Python."""
        return input if self._program is None else as_images(input)

    def _plan(self, input: Tensor) -> Callable[[Tensor], Tensor] | None:
        """Return what runs these images as a plan; None if they go through the network's modules."""
        planned = self._planned
        if planned is None or not _is_images(input) or not planned.takes(input):
            return None
        if torch.compiler.is_compiling():
            return None if self.unplanned or len(planned.program.outputs) > 1 else planned
        if not _is_plain_images(input):
            return None
        is_run, reason = planned.suits((input.shape[2], input.shape[3]))
        if reason != self.unplanned:
            self.unplanned = reason
        return planned.run if is_run else None

    def _run(self, input: Tensor) -> Any:
        network = self.network
        if network is None:
            raise ValueError("the model has seen no input yet: call it once before it is compiled or exported")
        return network(input)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        moved = fn(torch.zeros(1, dtype=torch.float32, device="cpu"))
        if moved.dtype != torch.float32:
            raise ValueError("a frozen model computes on integers and float32: it can't be cast")
        self._device = moved.device
        return super()._apply(fn, recurse)

    def train(self, mode: bool = True) -> "FrozenModel":
        """Raise a ValueError unless `mode` is False."""
        if mode:
            raise ValueError("a frozen model can't be trained: train the model that it was made from")
        return super().train(False)


def _fits(program: Program, sample: Tensor, input: Tensor) -> bool:
    """Whether a program that was made for a sample takes such inputs."""
    kinds = [(each.ndim, each.dtype, each.shape[1:2]) for each in (sample, input)]
    return kinds[0] == kinds[1] and program.size in (None, tuple(as_images(input).shape[2:]))


def _in_parts(
    trained: nn.Module, sample: Tensor, nan: Literal["pass", "refuse"]
) -> tuple[nn.Module, dict[str, Frozen]]:
    """Return a copy of a network whose forward stays Python, with each layer on integers frozen by itself.

    Layers of which the forward reads more than the output, such as a weight, stay floats; these are returned by name.
    """
    network = copy.deepcopy(trained).eval()  # copies of some graphs train
    if isinstance(network, nn.Sequential) and len(network) == 1 and isinstance(network[0], QuantizedLayer):
        return network, {}  # a part itself, of which nothing is recorded, as under autocast
    told: dict[nn.Module, Frozen] = {}
    places: dict[str, nn.Module] = {}
    for name, module in list(network.named_modules(remove_duplicate=False)):
        if isinstance(module, QuantizedLayer) and told.setdefault(module, _told(name, module)).arithmetic != "float":
            places[name] = module
    hidden = {module: nn.Sequential(module) for module in places.values()}  # without the attributes of a layer
    kept: dict[str, Frozen] = {}
    while True:
        for name, module in places.items():
            network.set_submodule(name, hidden.get(module, module))
        try:
            takes(network, sample)
            break
        except AttributeError as error:
            module = next((module for module, alone in hidden.items() if alone is error.obj), None)
            if module is None:
                raise
            del hidden[module]
            name = told[module].name
            kept[name] = Frozen(name, "float", f"the network reads its '{error.name}', and its forward stays Python")
    made = {module: FrozenModel(alone, (told[module],), nan).eval() for module, alone in hidden.items()}
    for name, module in places.items():
        network.set_submodule(name, made.get(module, module))
    return network, kept


def _told(name: str, layer: QuantizedLayer) -> Frozen:
    if has_own_forward(layer):
        return Frozen(name, "float", "it has a forward of its own")
    how = arithmetic(layer)
    return Frozen(name, how.kind, how.reason)


def _required_inputs(model: nn.Module) -> list[inspect.Parameter]:
    """Return the arguments that a call of the model requires."""
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    arguments = inspect.signature(model.forward, follow_wrapped=False).parameters.values()
    return [argument for argument in arguments if argument.default is argument.empty and argument.kind not in kinds]


def build(model: nn.Module, example: Tensor | None) -> FrozenModel:
    """Freeze as `freeze` does, without a comparison."""
    with of_shipping():
        return _build(model, example)


def _check_codes(name: str, layer: QuantizedLayer) -> None:
    """Raise if a layer's input quantizer defines levels but no codes, as a user's own quantizer may."""
    quantizer = layer.input_quantizer.at_work
    if not has_codes(quantizer) and quantizer.levels(*quantizer.tensors()) is not None:
        kind = type(quantizer).__name__
        raise ValueError(
            f"{name_of(layer, name)}: {kind} states levels(), but has no codes on them: define whole() in place of "
            "quantize()"
        )


def _build(model: nn.Module, example: Tensor | None) -> FrozenModel:
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
    if any(isinstance(module, FrozenModel) for module in model.modules()):
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
        if isinstance(module, QuantizedLayer):
            check_shippable(name, module)
            _check_codes(name, module)
            describe_weight(name, module, strict=True)  # raises if its codes do not give the weight
    check_copies(model)
    try:
        network = copied(model).eval().cpu()
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
        sample = example[:1].detach().cpu()
        try:
            takes(network, sample)
        except Exception as error:  # a foreign forward may raise anything
            what = f"example (of shape {tuple(example.shape)}) does not suit the model"
            raise ValueError(f"{what}: {str(error).partition(chr(10))[0]}") from error
    if sample is not None:
        check_called(network, sample)
    network.requires_grad_(False)
    names = network.named_modules()
    made = FrozenModel(network, tuple(_told(name, layer) for name, layer in names if isinstance(layer, QuantizedLayer)))
    made.eval()
    if sample is not None:
        made.suit(sample, is_guess=example is None)
    return made


def _is_images(input: Tensor) -> bool:
    """Whether these are float32 images on the CPU, of which no gradient is wanted."""
    return (
        input.device.type == "cpu"
        and (input.dtype, input.ndim) == (torch.float32, 4)
        and not torch.is_autocast_enabled("cpu")
        and not (torch.is_grad_enabled() and input.requires_grad)
    )


def _is_plain_images(input: Tensor) -> bool:
    """Whether C may read the memory of images: nothing is traced, and no mode looks on."""
    return (
        is_plain(input)
        and input.layout == torch.strided
        and not (input.is_neg() or input._is_zerotensor())
        and input.numel() > 0
        and not is_wrapped(input)
        and not torch._C._len_torch_dispatch_stack()  # pyright: ignore[reportAttributeAccessIssue]
    )


def _with_nan(output: Any, wrong: Tensor) -> Any:
    """Set bad samples of an output to NaN; an output without samples becomes NaN if any sample is bad."""
    if not isinstance(output, Tensor) or not output.is_floating_point():
        return output
    is_of_samples = output.ndim > 0 and output.shape[0] == wrong.shape[0]
    where = wrong.view(-1, *[1] * (output.ndim - 1)) if is_of_samples else wrong.any()
    return output.masked_fill(where, torch.nan)
