"""Recipes: how the backward computes a tensor of the forward again, so that it need not be stored.

The layers of a lean model (`qconv.lean`) hang the recipe of their output on its node in autograd's graph. A layer that
needs its input for its own backward looks the recipe up there, and saves the few tensors of the recipe in place of its
input. A sum of two tensors with recipes, as at the end of a residual block, has one as well: the graph shows it.

The graph shows which operation made a tensor, but not whether its values were changed since, in place under
``no_grad``. So a recipe counts only while the version counters of all tensors on the way say that nothing was. A change
through ``.data`` counts no version; for this, a few samples of the values are compared in the backward, which raises.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from .held import Held
from .streams import Place

_KEY = "qconv.recipe"
_BITS = "qconv.bits"
_MOST = 8
"""The convolutions to compute again for one tensor, at most: a chain of more starts from a tensor that is kept."""
_SAMPLES = 32
_ROUNDING = 1e-3
"""The rounding errors of a stream that is computed backwards lie far below this part of its values."""
_ROUNDINGS = 8
"""Or below so many of the dtype's: those of bfloat16 are larger."""
_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


Term = tuple[Callable[..., Tensor], int, int]
"""How a term of a sum is computed, and which of the tensors of the sum's recipe it takes."""


class Recipe(NamedTuple):
    """A function and its tensors: ``compute(*tensors)`` is the described tensor, bit for bit.

    Attributes:
        tensors: what a backward saves in place of the tensor.
        compute: a pure function of them.
        convolutions: the number of them that it computes.
        rough: a faster function that gives the tensor up to rounding errors; None if there is none.
        affine: a function of a factor and a summand for each channel, and then of the tensors, that gives the tensor
            times the one plus the other, up to rounding errors, at no further cost; None if there is none.
    """

    tensors: tuple[Tensor, ...]
    compute: Callable[..., Tensor]
    convolutions: int = 0
    rough: Callable[..., Tensor] | None = None
    affine: Callable[..., Tensor] | None = None


class Saved(NamedTuple):
    """The saved form of a tensor: those of its recipe, or the tensor itself, and what gives it from them."""

    tensors: tuple[Tensor, ...]
    restore: Callable[..., Tensor]


class _Hung:
    """A recipe on a node of the graph, with the version of the tensor that it describes.

    Tensors with a node of their own are referred to weakly, for some hold this one; the layer that made the recipe has
    saved them. With hooks for saved tensors (activation checkpointing, offloading) it has saved something else, and
    whether they still live is up to chance: a recipe with such tensors is not used then. In a checkpoint none is used:
    its forward is repeated when other backwards have dropped recipes, and must save the same tensors again.
    """

    def __init__(self, x: Tensor, recipe: Recipe) -> None:
        self.tensors = [tensor if tensor.grad_fn is None else TensorWeakRef(tensor) for tensor in recipe.tensors]
        self.of_tensors = recipe[1:]
        self.form, self.place_in_node = (x.shape, x.dtype), x.output_nr  # a node may have several outputs, as chunk's
        self.version, self.address = x._version, x.data_ptr()
        self.counter = x.detach()
        self.counter.data = torch.empty(0, dtype=x.dtype, device=x.device)  # keeps the counter, but not the memory
        self.terms: tuple[_Hung, _Hung] | None = None
        self.place: Place | None = None
        self.last: Term | None = None

    def recipe(self) -> Recipe | None:
        hooks = _hooks()
        if hooks is not None and (
            _is_checkpoint(hooks) or any(not isinstance(tensor, Tensor) for tensor in self.tensors)
        ):
            return None
        tensors = tuple(tensor if isinstance(tensor, Tensor) else tensor() for tensor in self.tensors)
        present = tuple(tensor for tensor in tensors if tensor is not None)
        return Recipe(present, *self.of_tensors) if len(present) == len(tensors) else None

    @property
    def rough(self) -> Callable[..., Tensor]:
        """Return the fastest function of the tensors that gives this tensor."""
        compute, _, rough, _ = self.of_tensors
        return rough or compute

    def placed(self) -> tuple[Place, Term | None]:
        """Return the tensor's place in its stream, and its last term if it is a sum with one in the stream."""
        if self.place is None:
            self.place = Place()
            one, other = self.terms or (None, None)
            if one is not None and other is not None and (before := other.place or one.place) is not None:
                self.place.follow(before)
                count = len(one.tensors)
                is_first = before is other.place
                self.last = (one.rough, 0, count) if is_first else (other.rough, count, len(self.tensors))
        self.terms = None
        return self.place, self.last

    @property
    def is_unchanged(self) -> bool:
        return self.counter._version == self.version

    def became(self, x: Tensor) -> bool:
        """Whether one operation in place has turned the tensor into ``x``."""
        return self.counter._version == x._version == self.version + 1 and self.address == x.data_ptr()


def runs_as_written() -> bool:
    """Whether Python runs each call: none is compiled, exported, traced by `torch.jit` or changed by `torch.func`."""
    if torch.compiler.is_compiling():
        return False
    transformed = torch._C._functorch.peek_interpreter_stack() is not None  # pyright: ignore
    return not (transformed or torch.jit.is_tracing())  # pyright: ignore[reportPrivateImportUsage]


def is_recorded() -> bool:
    """Whether a forward may keep bits for its backward: also when compiled, but not in a graph to be exported."""
    if torch.compiler.is_compiling():
        return torch.is_grad_enabled() and not torch.compiler.is_exporting()
    return torch.is_grad_enabled() and runs_as_written()


def hang(x: Tensor, recipe: Recipe) -> Tensor:
    """Attach a recipe to the node of ``x``, if it has one; return ``x``."""
    if runs_as_written() and x.grad_fn is not None and type(x) is Tensor:
        _metadata(x.grad_fn)[_KEY] = _Hung(x, recipe)
    return x


def recipe_of(x: Tensor) -> Recipe | None:
    """Return a recipe of ``x`` in its present version; None if there is none."""
    if not runs_as_written() or not torch.is_grad_enabled() or x.grad_fn is None or type(x) is not Tensor:
        return None
    hung = _metadata(x.grad_fn).get(_KEY)
    if hung is not None:
        is_of_x = hung.is_unchanged and hung.form == (x.shape, x.dtype) and hung.place_in_node == x.output_nr
        return hung.recipe() if is_of_x else None
    found = _of_sum(x)
    if found is None or found[0].convolutions > _MOST:
        return None
    recipe, terms = found
    hang(x, recipe)
    _metadata(x.grad_fn)[_KEY].terms = terms
    return recipe


def forget(node: Any) -> None:
    """Drop the recipes of the output and of the inputs of a Function whose backward runs, given its context."""
    if torch.compiler.is_compiling():
        return
    for other in (node, *(function for function, _ in node.next_functions)):
        if other is not None:
            _metadata(other).pop(_KEY, None)


def saved(x: Tensor, name: Callable[[], str], exact: bool = True, is_own: bool = False) -> Saved:
    """Return what a Function saves so that its backward has ``x``.

    If it is ``x`` itself, then sums with ``x`` have recipes.

    Args:
        x: the tensor.
        name: gives that of the layer that needs it, for the error message.
        exact: whether ``x`` is needed bit for bit; else it may be computed from the next tensor of its stream, with
            rounding errors.
        is_own: whether the Function may write to what it gets, unless that is ``x`` itself.

    Returns:
        Tensors without gradients, and the function that makes ``x`` of them. It raises a RuntimeError if samples of the
        values differ.
    """
    recipe = recipe_of(x)
    if recipe is None:
        hang(x, Recipe((x,), itself))
        return Saved((x.detach(),), itself)
    compute: Callable[..., Tensor] = recipe.compute
    if not exact:
        compute = partial(_of_stream, recipe.rough or compute, *_metadata(x.grad_fn)[_KEY].placed())
    elif isinstance(compute, Held):
        compute.users += 1
        compute = partial(compute.taken, is_own)
    samples = _samples(x) if x.device.type == "cpu" else x.new_empty(0)  # elsewhere they are not compared
    tensors = samples, *(tensor.detach() for tensor in recipe.tensors)
    tolerance = 0.0 if exact else max(_ROUNDING, _ROUNDINGS * torch.finfo(x.dtype).eps)
    return Saved(tensors, partial(_checked, compute, None if exact else recipe.compute, name, tolerance))


def _of_stream(compute: Callable[..., Tensor], place: Place, last: Term | None, *tensors: Tensor) -> Tensor:
    is_held = isinstance(compute, Held) and compute.is_held
    x = place.skipped() if is_held else place.value()
    if x is None:
        x = compute.taken(True, *tensors) if isinstance(compute, Held) else compute(*tensors)
    if last is not None:
        term, begin, end = last
        place.hold(x, term, tensors[begin:end])
    return x


def shared(x: Tensor, bits: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return ``bits``, replacing each tensor that another layer already keeps of ``x``, as at a fork, by that one."""
    if torch.compiler.is_compiling() or x.grad_fn is None or x.device.type != "cpu" or type(x) is not Tensor:
        return bits
    known = _metadata(x.grad_fn).setdefault(_BITS, [])
    found = tuple(next((other for ref in known if _is_same(other := ref(), own)), own) for own in bits)
    known.extend(TensorWeakRef(own) for own, other in zip(bits, found, strict=True) if own is other)
    return found


def with_autocast_of_now(function: Callable[..., Tensor], device: torch.device) -> Callable[..., Tensor]:
    """Return ``function`` under the current autocast state, whenever it is called."""
    kind = device.type
    if kind == "meta":  # which has none
        return function
    return partial(_under, function, kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))


def _under(function: Callable[..., Tensor], kind: str, dtype: torch.dtype, enabled: bool, *tensors: Tensor) -> Tensor:
    with torch.autocast(kind, dtype, enabled):
        return function(*tensors)


def _of_sum(x: Tensor) -> tuple[Recipe, tuple[_Hung, _Hung]] | None:
    node: Any = x.grad_fn
    if node.name() != "AddBackward0" or node._saved_alpha != 1:
        return None
    (first, place), (second, other_place) = node.next_functions
    one, other = (None if term is None else _metadata(term).get(_KEY) for term in (first, second))
    if one is None or other is None or one.form != other.form or one.form != (x.shape, x.dtype):
        return None
    if (one.place_in_node, other.place_in_node) != (place, other_place):
        return None
    is_new = x._version == 0 and one.is_unchanged
    if not (is_new or one.became(x)) or not other.is_unchanged:
        return None
    of_one, of_other = one.recipe(), other.recipe()
    if of_one is None or of_other is None:
        return None
    memory_format = torch.channels_last if _is_channels_last(x) else torch.contiguous_format
    count = len(of_one.tensors)
    compute = Held(partial(_sum, of_one.compute, count, of_other.compute, memory_format))
    is_rough = of_one.rough is not None or of_other.rough is not None
    rough = Held(partial(_sum, one.rough, count, other.rough, memory_format)) if is_rough else None
    tensors = *of_one.tensors, *of_other.tensors
    return Recipe(tensors, compute, of_one.convolutions + of_other.convolutions, rough), (one, other)


def _sum(
    one: Callable[..., Tensor],
    count: int,
    other: Callable[..., Tensor],
    memory_format: torch.memory_format,
    *tensors: Tensor,
) -> Tensor:
    return (one(*tensors[:count]) + other(*tensors[count:])).contiguous(memory_format=memory_format)


def _is_same(one: Tensor | None, other: Tensor) -> bool:
    return one is not None and (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(one, other)


def _metadata(node: Any) -> dict[str, Any]:
    """Return the dictionary that autograd keeps for each node of its graph, as long as the node lives."""
    return node.metadata


def _hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the pack and unpack hooks for saved tensors, if any are set."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # pyright: ignore


def _is_checkpoint(hooks: tuple[Callable[..., Any], Callable[..., Any]]) -> bool:
    """Whether the hooks are those of `torch.utils.checkpoint`, in its first forward or in the repeated one."""
    return getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


def has_recipe(x: Tensor) -> bool:
    """Whether the node of ``x`` has a recipe, usable or not; a stored tensor has none."""
    hung = None if x.grad_fn is None else _metadata(x.grad_fn).get(_KEY)
    return hung is not None and hung.of_tensors[0] is not itself


def itself(x: Tensor) -> Tensor:
    """The recipe of a stored tensor: the tensor itself."""
    return x


def _is_channels_last(x: Tensor) -> bool:
    return x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


def _samples(x: Tensor) -> Tensor:
    """Return some values, spread over ``x``."""
    return x.detach()[_places(x.shape, x.device)].clone() if x.numel() else x.detach()


@lru_cache(maxsize=1024)
def _places(shape: torch.Size, device: torch.device) -> tuple[Tensor, ...]:
    order = torch.arange(_SAMPLES)
    places = [order * (size - 1) // (_SAMPLES - 1) for size in shape]
    return tuple(place[order * (2 * dim + 1) % _SAMPLES].to(device) for dim, place in enumerate(places))


def _checked(
    compute: Callable[..., Tensor],
    exact: Callable[..., Tensor] | None,
    name: Callable[[], str],
    tolerance: float,
    samples: Tensor,
    *tensors: Tensor,
) -> Tensor:
    freed = next((x for x in tensors if x.numel() and not x.untyped_storage().nbytes()), None)
    if freed is not None:
        raise RuntimeError(
            f"the input of {name()} can't be computed again: a tensor of shape {tuple(freed.shape)} of a layer before "
            "it was freed; pass modules that hold both layers to fully_shard, or call qconv.lean(model, False)"
        )
    x = compute(*tensors)
    if x.device.type != "cpu" or not x.numel() or _are_equal(_samples(x), samples, tolerance):
        return x
    if exact is not None:  # large terms may have cancelled, as after a batch norm whose variances are small
        x = exact(*tensors)
    if exact is None or not _are_equal(_samples(x), samples, 0.0):
        raise RuntimeError(
            f"the input of {name()} can't be computed again: it, or a tensor that it was made of, was changed through "
            ".data, where autograd can't see it, or holds NaN, which signs don't keep; change it under "
            "torch.no_grad(), or call qconv.lean(model, False)"
        )
    return x


def _are_equal(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether values are equal up to a share of the largest; anything equals a NaN in ``other``, which codes lose."""
    one = torch.where(other.isnan(), other, one)
    if not tolerance:
        dtype = _INTEGER[one.element_size()]
        return torch.equal(one.view(dtype), other.view(dtype))
    largest = other.abs().nan_to_num(0, 0, 0).max().item()
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * largest, equal_nan=True)
