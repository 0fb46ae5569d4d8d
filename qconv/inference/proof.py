"""Finding modules of a network that can become graphs because they compute the same there, bit for bit."""

import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ..layers import QuantizedLayer
from ..layers.observed_run import trial
from ..packed.shapes import usual_shapes
from ..packed.tensors import joined
from .parts import FrozenPart, ReadBeside
from .tracing import NotTraceable, trace

_LOOKED_AT = "the forward around it uses more than its output"
_NOT_REACHED = "the forward around it calls it by another reference, such as one in a list"


LARGE = 64
"""The longest side of images that are also tried at twice their size."""
Flat = tuple[list[Any], Any]
"""What a forward gives: the leaves, and how they are put together, with the keys of dictionaries."""


class _Run(NamedTuple):
    """The output of a network, and the parts whose graphs differ from their modules, with the reason."""

    output: Flat
    unequal: dict[str, str]


class Parts:
    """The parts of a network that become graphs, as large as possible.

    Attributes:
        graphs: by the name of the module; "" for the network itself.
        reasons: why other modules stay as they are, by name.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.graphs: dict[str, FrozenPart] = {}
        self.reasons: dict[str, str] = {}
        self._modules: dict[str, nn.Module] = {}
        self._called: set[str] = set()
        self._split("", network)

    def _split(self, name: str, module: nn.Module) -> None:
        """Make a graph of the module, or of the modules inside it."""
        kinds = QuantizedLayer, _ConvNd
        if not any(isinstance(inner, kinds) for inner in module.modules()) or module in self._modules.values():
            return
        is_layer = isinstance(module, QuantizedLayer)
        if isinstance(module, _ConvNd) and not is_layer:
            return
        if name not in self.reasons:
            try:
                graph = trace(nn.Sequential(module) if is_layer else module)
            except NotTraceable as error:
                self.reasons[name] = str(error)
            else:
                self.graphs[name] = FrozenPart(graph, module, name, is_layer)
                self._modules[name] = module
                return
        for key, child in () if is_layer else module.named_children():
            self._split(joined(name, key), child)

    def _leave(self, name: str, reason: str) -> None:
        self.reasons[name] = reason
        del self.graphs[name]
        self._split(name, self._modules.pop(name))

    @torch.no_grad()
    def prove(self, sample: Tensor) -> None:
        """Undo the graphs that give other outputs, call other layers, or call layers with other inputs.

        If the network's own forward stays Python, it may tell its modules more than it gives them, such as the size of
        an image in a dictionary that they share: inputs of another size are compared, too, if it accepts them.
        """
        self._prove(sample)
        if self.graphs and "" not in self.graphs and (other := _of_another_size(self.network, sample)) is not None:
            self._prove(other)

    def _prove(self, sample: Tensor) -> None:
        self._called.clear()
        with trial(self.network, keep_state=True):
            while (run := self._compared(sample)).unequal:
                for name, reason in run.unequal.items():
                    self._leave(name, reason)
        while self.graphs and "" not in self.graphs:
            for name, reason in self._misused(sample, run.output).items():
                self._leave(name, reason)
                break
            else:
                return

    def _compared(self, sample: Tensor) -> _Run:
        """Run the network, and each graph on the inputs of its module."""
        unequal: dict[str, str] = {}
        with ExitStack() as hooks:
            for name, part in self.graphs.items():
                watch = _Watch(part, self._modules[name], unequal)
                for handle in (*watch.hooks(), self._modules[name].register_forward_pre_hook(self._noting(name))):
                    hooks.callback(handle.remove)
            return _Run(_flat(self.network(sample.clone())), unequal)

    def _misused(self, sample: Tensor, wanted: Flat) -> dict[str, str]:
        """Return the parts that can't replace their modules in the network, the most certain one first."""
        every = dict.fromkeys(sorted(self.graphs, key=lambda name: self.graphs[name]._is_single), _LOOKED_AT)
        before, self._called = self._called, set()
        handles = [part.register_forward_pre_hook(self._noting(name)) for name, part in self.graphs.items()]
        self.place()
        try:
            with trial(self.network, keep_state=True):
                got = _flat(self.network(sample.clone()))
        except ReadBeside as error:
            return {error.name: str(error).partition(":")[0]}
        except Exception:  # noqa: BLE001  # of a forward that is not ours: what it does with modules is found by leaving them
            return every
        finally:
            self._put({id(part): self._modules[name] for name, part in self.graphs.items()})
            for handle in handles:
                handle.remove()
            reached, self._called = self._called, before
        if not _equal(wanted, got):
            return every
        return dict.fromkeys((name for name in self.graphs if name in before and name not in reached), _NOT_REACHED)

    def _noting(self, name: str) -> Callable[..., None]:
        return lambda *_: self._called.add(name)

    def place(self) -> nn.Module:
        """Return the network with its parts."""
        if "" in self.graphs:
            return self.graphs[""]._graph
        self._put({id(self._modules[name]): part for name, part in self.graphs.items()})
        return self.network

    def shared(self) -> dict[nn.Module, nn.Module | None]:
        """The modules that several graphs call; they are not replaced."""
        called = Counter(module for part in self.graphs.values() for module in called_modules(part._graph))
        return {module: None for module, times in called.items() if times > 1}

    def _put(self, new: dict[int, nn.Module]) -> None:
        for module in list(self.network.modules()):
            for key, child in module._modules.items():
                if child is not None and id(child) in new:
                    module._modules[key] = new[id(child)]


class _Watch:
    """Hooks that run and compare the graph of a module when the module is called."""

    def __init__(self, part: FrozenPart, module: nn.Module, unequal: dict[str, str]) -> None:
        self.part, self.module, self.unequal = part, module, unequal
        self.calls: list[tuple[Any, ...]] = []
        self.given: list[Any] = []
        self.leaves = called_modules(part._graph)

    def hooks(self) -> Iterator[Any]:
        """The handles of all hooks."""
        for leaf in self.leaves:
            if leaf is not self.module:
                yield leaf.register_forward_pre_hook(self._log, with_kwargs=True)
        yield self.module.register_forward_pre_hook(self._begin, with_kwargs=True)
        yield self.module.register_forward_hook(self._compare)

    def _log(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.calls.append((id(module), *(_digest(leaf) for leaf in tree_leaves((args, kwargs)))))

    def _begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.given and self.given[-1] is None:  # the graph of a single layer calls it
            return
        self.calls.clear()
        self.given.append((_cloned((args, kwargs)), torch.get_rng_state()))

    def _compare(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.given[-1] is None:
            return
        ((args, kwargs), drawn), called, after = self.given.pop(), self.calls.copy(), torch.get_rng_state()
        wanted = _flat(output)
        self.calls.clear()
        self.given.append(None)
        torch.set_rng_state(drawn)
        try:
            is_equal = _equal(wanted, _flat(self.part(*args, **kwargs)))
            if not is_equal or called != self.calls:
                what = "calls other layers" if is_equal else "gives another result"
                self.unequal[self.part._path] = f"its trace {what}"
        except ReadBeside as error:
            self.unequal[self.part._path] = str(error).partition(":")[0]
        except Exception as error:  # noqa: BLE001  # any failure of the trace is its own, for the module worked
            self.unequal[self.part._path] = f"its trace fails: {str(error).partition(chr(10))[0]}"
        finally:
            self.given.pop()
            torch.set_rng_state(after)


def called_modules(graph: fx.GraphModule) -> set[nn.Module]:
    """The modules that a graph calls."""
    targets = {str(node.target) for node in graph.graph.nodes if node.op == "call_module"}
    return {graph.get_submodule(target) for target in targets}


def takes(network: nn.Module, sample: Tensor) -> None:
    """Raise the network's own error for these inputs, if there is one; leave the network unchanged."""
    with trial(network, keep_state=True):
        network(sample.clone())


def _of_another_size(network: nn.Module, sample: Tensor) -> Tensor | None:
    """The first sample with other dimensions behind the channels, or of another length; None if none is taken.

    They are twice as long, or half as long where that would take much more memory.
    """
    one, places = sample[:1], [tuple(range(2, sample.ndim))]
    if sample.ndim == 3:
        places.append((1,))  # of sequences
    for dims in filter(None, places):
        if max(sample.shape[dim] for dim in dims) <= LARGE:
            other = one.repeat([2 if dim in dims else 1 for dim in range(sample.ndim)])
        else:
            other = one[tuple(slice((side + 1) // 2 if dim in dims else None) for dim, side in enumerate(one.shape))]
        if _accepts(network, other):
            return other
    return None


def find_sample(network: nn.Module) -> Tensor | None:
    """Return random inputs that the network accepts, if a usual shape does."""
    generator = torch.Generator("cpu").manual_seed(0)
    for shape in usual_shapes(network):
        sample = torch.randn(2, *shape, generator=generator, dtype=torch.float32, device="cpu")
        if _accepts(network, sample):
            return sample
    return None


def _accepts(network: nn.Module, sample: Tensor) -> bool:
    try:
        takes(network, sample)
    except Exception:  # noqa: BLE001  # of a forward that is not ours: it takes inputs of another shape
        return False
    return True


def _flat(output: Any) -> Flat:
    """The output's leaves, of which tensors are copied, and its structure."""
    leaves, structure = tree_flatten(output)
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure


def _equal(first: Flat, second: Flat) -> bool:
    """Whether tensors are equal bit for bit, apart from the payload of NaN; other leaves must have the same type."""
    if first[1] != second[1]:
        return False
    for one, other in zip(first[0], second[0], strict=True):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            if type(one) is not type(other):
                return False
        elif (one.shape, one.dtype) != (other.shape, other.dtype) or not bool(
            ((one == other) | ((one != one) & (other != other))).all()
        ):
            return False
    return True


def _cloned(tree: Any) -> Any:
    return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def _digest(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.is_sparse or value.is_quantized:
        return type(value).__name__
    flat = value.detach().contiguous().reshape(-1)
    return tuple(value.shape), value.dtype, zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0
