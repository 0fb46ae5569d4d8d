"""Replacing activations that pass only one sign on before a sign, and putting them back.

A quantizer whose only edge is at 0 (`Quantizer.splits_at_zero`) makes one value of everything that a ReLU outputs.
`one_signed` finds these activations. One that is a module stays the same object, with another class. A function called
in a module's forward is replaced only there, by a subclass of that module's class. The module remembers what was there
before, so it survives copying and pickling.
"""

import dis
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..layers.subclass import subclass_of

BeforeSign = Literal["identity", "hardtanh", "prelu", "leaky", "keep"]
CHOICES: tuple[str, ...] = get_args(BeforeSign)
SLOPE = 2.0**-10
"""The slope of "leaky" below 0: it keeps the sign of all but the smallest float16 numbers, and hardly any magnitude."""

_RECORD = "replaced_activation"


@dataclass(frozen=True)
class Replaced:
    """The state of a module before its activation was replaced.

    Attributes:
        kind: its class.
        choice: what the activation became.
        calls: whether the activation is a function that the module calls, rather than the module itself.
        arguments: the attributes that were overwritten.
        added: the attributes that did not exist before.
    """

    kind: type[nn.Module]
    choice: str
    calls: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    added: tuple[str, ...] = ()


def is_one_signed(module: nn.Module) -> bool:
    """Whether it is an activation of `torch.nn` that cuts off negative values and can be replaced."""
    if type(module) is nn.Hardtanh:
        return module.min_val >= 0
    return type(module) in (nn.ReLU, nn.ReLU6)


def replaced(module: nn.Module) -> Replaced | None:
    """Return the former state of the module, if its activation has been replaced."""
    return module.__dict__.get(_RECORD)


def replace_(module: nn.Module, choice: str, like: nn.Module | None = None) -> None:
    """Turn ``module``, an activation, into ``choice``; a learned slope goes on the device of ``like``."""
    new = _made(choice, bool(getattr(module, "inplace", False)))
    common = nn.Module().__dict__
    attributes = {name: value for name, value in new.__dict__.items() if name not in common}
    old = {name: module.__dict__[name] for name in attributes if name in module.__dict__}
    added = (*(name for name in attributes if name not in old), *new._parameters)
    record = Replaced(type(module), choice, False, old, added)
    module.__class__ = type(new)
    module.__dict__.update(attributes)
    module.__dict__[_RECORD] = record
    weight = None if like is None else like.weight
    for name, parameter in new.named_parameters():
        value = parameter.detach() if not isinstance(weight, Tensor) else parameter.detach().to(weight)
        module.register_parameter(name, nn.Parameter(value))


def replace_calls_(module: nn.Module, choice: str) -> None:
    """Make ``module``, whose forward calls functions such as ``F.relu``, call the function of ``choice`` instead."""
    if not calls_relu(type(module)) or choice == "prelu":
        raise ValueError(f"{type(module).__name__} calls no function that can be replaced by {choice!r}")
    record = Replaced(type(module), choice, calls=True)
    module.__class__ = _with_calls(type(module), choice)
    module.__dict__[_RECORD] = record


def restore_(module: nn.Module) -> None:
    """Undo `replace_` or `replace_calls_`, if one was called."""
    record = replaced(module)
    if record is None:
        return
    for name in (*record.added, _RECORD):
        delattr(module, name)
    module.__dict__.update(record.arguments)
    module.__class__ = record.kind


def _made(choice: str, inplace: bool) -> nn.Module:
    if choice == "hardtanh":
        return nn.Hardtanh(inplace=inplace)
    if choice == "prelu":
        return nn.PReLU()
    if choice == "leaky":
        return nn.LeakyReLU(SLOPE, inplace=inplace)
    return nn.Identity()


def _hardtanh(input: Tensor, inplace: bool = False) -> Tensor:
    return F.hardtanh(input, inplace=inplace)


def _leaky(input: Tensor, inplace: bool = False) -> Tensor:
    return F.leaky_relu(input, SLOPE, inplace=inplace)


def _identity(input: Tensor, inplace: bool = False) -> Tensor:
    return input


_FUNCTIONS: dict[str, Callable[..., Tensor]] = {"hardtanh": _hardtanh, "leaky": _leaky, "identity": _identity}
RELUS: dict[Any, type[nn.Module]] = {
    **dict.fromkeys((F.relu, F.relu_, torch.relu, torch.relu_), nn.ReLU),
    F.relu6: nn.ReLU6,
}
"""The functions that cut off negative values, and the modules that contain them."""
_MODULES: tuple[ModuleType, ...] = (torch, torch.nn, F)
_CLASSES: dict[tuple[type[nn.Module], str], type[nn.Module]] = {}


def calls_relu(kind: type[nn.Module]) -> bool:
    """Whether a method of the class calls ``F.relu``, ``torch.relu`` or the like by a global name.

    Not that of a `torch.fx.GraphModule`, which is made anew from its graph whenever the module is copied.
    """
    return not issubclass(kind, fx.GraphModule) and any(_called(method) for method in methods_of(kind).values())


def methods_of(kind: type[nn.Module]) -> dict[str, FunctionType]:
    """The plain methods of the class that may be part of its forward, without those of `torch.nn`."""
    own = [base for base in kind.__mro__ if not base.__module__.startswith("torch.nn.") and base is not object]
    every = {name: value for base in reversed(own) for name, value in vars(base).items()}
    plain = {name: value for name, value in every.items() if isinstance(value, FunctionType)}
    return {name: value for name, value in plain.items() if name != "__init__"}


def _called(method: FunctionType) -> dict[str, Any]:
    """The global names by which the method may reach a ReLU, and their values; none if it can't be changed."""
    every, scope = list(codes_of(method.__code__)), method.__globals__
    uses = {(instruction.argval, instruction.opname) for code in every for instruction in dis.get_instructions(code)}
    names = {name for name, way in uses if way == "LOAD_GLOBAL"}
    functions = {name: scope[name] for name in names if any(scope.get(name) is relu for relu in RELUS)}
    if any(relu.__name__ in code.co_names for relu in RELUS for code in every):
        functions |= {name: scope[name] for name in names if any(scope.get(name) is part for part in _MODULES)}
    # A code object has one list of names, for globals and for attributes.
    return {} if any(name in functions and way != "LOAD_GLOBAL" for name, way in uses) else functions


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """Yield the code and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_of(constant)


def _with_calls(kind: type[nn.Module], choice: str) -> type[nn.Module]:
    """Return a subclass of ``kind``, with the same name, whose methods call another function in place of a ReLU.

    Its methods are those of ``kind`` except for the names of the globals that they look up, so ``F`` is another module
    there. Children, helper functions and other modules of that class keep their ReLUs, and whatever traces, compiles or
    copies the module sees a plain method. (A `torch.overrides.TorchFunctionMode`, which intercepts calls during a
    forward, would also act in the forwards of the children; and `torch.fx` does not ask it about ``x.relu()``, the case
    that would need it, so a graph would have the ReLU again. Such calls are reported, not replaced.)
    """
    if (kind, choice) not in _CLASSES:

        def reduce(self: nn.Module, protocol: Any) -> Any:
            _, _, *rest = super(_CLASSES[kind, choice], self).__reduce_ex__(protocol)
            return _blank, (kind, choice), *rest

        changed: dict[str, Any] = {
            name: _with_others(method, called, choice)
            for name, method in methods_of(kind).items()
            if (called := _called(method))
        }
        described = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        attributes = changed | described | {"__reduce_ex__": reduce}
        _CLASSES[kind, choice] = subclass_of(kind, kind.__name__, attributes)
    return _CLASSES[kind, choice]


def _blank(kind: type[nn.Module], choice: str) -> nn.Module:
    """Return an empty module to be filled by copying or unpickling."""
    made = _with_calls(kind, choice)
    return made.__new__(made)


def _with_others(method: FunctionType, called: dict[str, Any], choice: str) -> FunctionType:
    """Return the same method with other functions in place of ``called``.

    They stand next to the originals in the method's own globals, under unique names: a copy of the globals would miss
    later changes of the others.
    """
    names = {name: f"_qconv_{choice}_for_{name}" for name in called}
    for name, value in called.items():
        method.__globals__[names[name]] = _instead(value, choice)
    code = _renamed(method.__code__, names)
    copy = FunctionType(code, method.__globals__, method.__name__, method.__defaults__, method.__closure__)
    copy.__kwdefaults__ = method.__kwdefaults__
    copy.__dict__.update(method.__dict__)
    copy.__qualname__, copy.__doc__, copy.__annotations__ = method.__qualname__, method.__doc__, method.__annotations__
    return copy


def _renamed(code: CodeType, names: Mapping[str, str]) -> CodeType:
    """Rename globals in the code and in the functions in it."""
    consts = tuple(
        _renamed(constant, names) if isinstance(constant, CodeType) else constant for constant in code.co_consts
    )
    return code.replace(co_names=tuple(names.get(name, name) for name in code.co_names), co_consts=consts)


def _instead(value: Any, choice: str) -> Any:
    """Return another function for a ReLU, or for a module a proxy with other ReLUs."""
    if value is F.relu_ or value is torch.relu_:
        return partial(_FUNCTIONS[choice], inplace=True)
    if any(value is relu for relu in RELUS):
        return _FUNCTIONS[choice]
    made = ModuleType(value.__name__)
    made.__dict__["__getattr__"] = partial(getattr, value)
    made.__dict__.update(
        {
            name: _instead(member, choice)
            for name, member in vars(value).items()
            if any(member is other for other in (*RELUS, *(part for part in _MODULES[1:] if part is not value)))
        }
    )
    return made
