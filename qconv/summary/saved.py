"""Bytes that training stores per sample for the backward, by module, also in a lean model."""

import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..layers import QuantizedLayer
from ..lean import is_lean, keep_format, lean, why_float
from ..quantizers import Quantizer

REFUSED = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)


@dataclass
class Kept:
    """Bytes that one forward keeps, by the names of modules, and why one keeps a float of the size of its input."""

    bytes: Counter[str] = field(default_factory=Counter)
    floats: dict[str, str] = field(default_factory=dict)


def kept_in_training(
    model: nn.Module, modules: Mapping[str, nn.Module], modes: Mapping[nn.Module, bool], size: Sequence[int]
) -> tuple[Kept, Kept]:
    """Return the bytes that a forward keeps for one sample, before and after `qconv.lean`; ``model`` is changed.

    ``modules`` are counted, and ``modes`` says whether each module is in training.
    """
    for module in model.modules():
        module.training = modes[module] and not isinstance(module, nn.SyncBatchNorm)  # which waits for other processes
        if isinstance(module, QuantizedLayer):
            for part in module.input_quantizer.modules():
                if "calibrated" in part._buffers:  # its range stays: calibration would wait for other processes
                    cast(Quantizer, part).calibrated = True
    before = {module for module in model.modules() if is_lean(module)}
    kept = _of_sample(model, modules, size)
    lean(model, exact=any(module.__dict__["lean"] == "exact" for module in before))
    keep_format(model)  # it takes no other bytes, and to choose it is another forward
    if before == {module for module in model.modules() if is_lean(module)}:
        return kept, kept
    return kept, _of_sample(model, modules, size)


def _of_sample(model: nn.Module, modules: Mapping[str, nn.Module], size: Sequence[int]) -> Kept:
    """Run one sample; if batch norm refuses a single value per channel, run two and halve the bytes."""
    try:
        return _of_batch(model, modules, (1, *size))
    except REFUSED:
        kept = _of_batch(model, modules, (2, *size))
        return Kept(Counter({name: -(-count // 2) for name, count in kept.bytes.items()}), kept.floats)


def _of_batch(model: nn.Module, modules: Mapping[str, nn.Module], shape: tuple[int, ...]) -> Kept:
    batch = sample_of(model, shape, random=True)
    with _Calls(modules) as calls, warnings.catch_warnings(), torch.enable_grad():
        warnings.simplefilter("ignore")
        if any(map(is_lean, model.modules())):  # under hooks lean layers keep more
            output = model(batch)  # held while nodes are read: in torch 2.11 those of Functions do not hold themselves
            count = _Count(model, calls)
            if all(count.of_node(node) for node in _nodes(output)):
                return count.finished()
        count = _Count(model, calls)
        with saved_tensors_hooks(lambda tensor: count.of_tensor(tensor, calls.now), lambda tensor: tensor):
            model(batch)
        return count.finished()


def _nodes(output: Any) -> list[Any]:
    """Return autograd's nodes in the order of the forward; None if the graph is out of reach."""
    ends = [leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.grad_fn is not None]
    seen: set[Any] = set()
    todo: list[Any] = list(ends)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += [other for other, _ in node.next_functions if other is not None]
    return sorted(seen, key=lambda node: node._sequence_nr()) or [None]


@dataclass
class _Call:
    """A call of a module: its name, the number of values in its input, and why it would store a float."""

    name: str
    values: int = 0
    why: str = ""


class _Calls:
    """Context manager: record which module runs, and from which node of autograd's graph on."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self.modules, self.running = modules, [_Call("")]
        self.begins, self.calls = [0], [self.running[0]]
        self.handles: list[RemovableHandle] = []

    def __enter__(self) -> "_Calls":
        for name, module in self.modules.items():
            enter, leave = partial(self._enter, name), self._leave
            self.handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
            self.handles.append(module.register_forward_hook(leave, with_kwargs=True, always_call=True))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()

    @property
    def now(self) -> _Call:
        return self.running[-1]

    def of_node(self, node: Any) -> _Call:
        """Return the call that created a node."""
        return self.calls[bisect_right(self.begins, node._sequence_nr()) - 1]

    def _begin(self) -> None:
        self.begins.append(torch._C._autograd._get_sequence_nr())  # pyright: ignore[reportAttributeAccessIssue]
        self.calls.append(self.now)

    def _enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        input = _input(args, kwargs)
        self.running.append(_Call(name, input.numel() if isinstance(input, Tensor) else 0))
        self._begin()

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self.running.pop().why = why_float(module, _input(args, kwargs), output)
        self._begin()


class _Count:
    """Counts storages once, for the call that saves them first."""

    def __init__(self, model: nn.Module, calls: _Calls) -> None:
        self.calls, self.kept = calls, Kept()
        self.with_floats: list[_Call] = []
        # The storages themselves, not their addresses: a freed address can be another tensor's.
        self.known = {tensor.untyped_storage() for tensor in (*model.parameters(), *model.buffers())}

    def of_tensor(self, tensor: Tensor, call: _Call) -> Tensor:
        """Count a tensor, unless its storage is known."""
        storage = tensor.untyped_storage()
        if storage not in self.known:
            self.known.add(storage)
            self.kept.bytes[call.name] += storage.nbytes()
            if tensor.is_floating_point() and tensor.numel() >= call.values:
                self.with_floats.append(call)
        return tensor

    def of_node(self, node: Any) -> bool:
        """Count the tensors that a node saves; return whether they are visible: hooks of checkpoints hide them."""
        if node is None:
            return False
        call = self.calls.of_node(node)
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                saved = getattr(node, name)
                for each in saved if isinstance(saved, (tuple, list)) else (saved,):
                    try:
                        each.register_hooks(lambda tensor: self.of_tensor(tensor, call), lambda tensor: tensor)
                    except RuntimeError as error:
                        if "None" not in str(error):
                            return False
        return True

    def finished(self) -> Kept:
        """Return the counts, and why calls keep floats."""
        self.kept.floats = {call.name: call.why for call in self.with_floats if call.why}
        return self.kept


def _input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get("input")


def sample_of(model: nn.Module, shape: tuple[int, ...], random: bool = False) -> Tensor:
    """Return zeros, or numbers from 0 to 1, the same in each call, in the dtype and on the device of the model."""
    floats = (tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point())
    like = next(floats, torch.zeros(()))
    if not random:
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    # Not zeros, for a clamp keeps nothing where its gradient passes everywhere.
    return torch.rand(shape, generator=torch.Generator().manual_seed(0), device="cpu").to(like.device, like.dtype)
