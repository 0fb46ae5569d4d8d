"""Every quantizer against `golden`, its definition written again with loops, at ties too; forward and all gradients."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import golden
import numpy as np
import pytest
import torch
from golden import Array, Entry, Found, Row
from methods import KINDS, SURROGATES, written
from torch import Tensor

from qconv.methods import deepshift
from qconv.quantizers import Quantizer, ShiftPS, Sign, stochastic

RANDOM = np.random.default_rng(0)
FILTERS = {"ties": golden.FILTERS, "random": RANDOM.normal(0.05, 0.8, (3, 4, 3, 2))}
INPUTS = {
    "ties": (golden.INPUTS, 1),
    "random": (RANDOM.normal(0.3, 1.5, (3, 8, 2, 3)), 1),
    "last": (RANDOM.normal(0.3, 1.5, (2, 3, 8)), -1),
    "vector": (RANDOM.normal(0.3, 1.5, 21), -1),
}
GRAD = RANDOM.normal(0, 1, 500)


class Case(NamedTuple):
    """A quantizer, the arguments of its definition, and what both are given."""

    make: Callable[..., Quantizer]
    definition: Callable[..., Found]
    row: Row
    tensors: tuple[float | Array, ...]
    scheduled: tuple[float | Array, ...]
    values: Array
    dim: int


def with_surrogates(kind: type[Quantizer], entry: Entry) -> Iterator[tuple[str, Any, Any, tuple[float | Array, ...]]]:
    """How it is written, what makes the quantizer, its definition, the scheduled tensors: for each surrogate."""
    if "d" not in inspect.signature(entry.definition).parameters:
        yield "", kind, entry.definition, ()
        return
    for name, surrogate in golden.SURROGATES.items():
        for row in surrogate.rows:
            slope = slope_of(surrogate, row)
            make = partial(kind, surrogate=partial(SURROGATES[name], **row.args))
            assert isinstance(row.tensors, tuple)
            yield f" {written(name, row.args)}{row.tensors}", make, partial(entry.definition, d=slope), row.tensors


def slope_of(surrogate: Entry, row: Row) -> Callable[[float], float]:
    assert isinstance(row.tensors, tuple)
    tensors, args = row.tensors, {key: value for key, value in row.args.items() if key != "input"}
    return lambda v: surrogate.definition(v, *tensors, **args)


def given(entry: Entry, row: Row) -> Iterator[tuple[str, Array, int]]:
    if row.values is not None:
        yield "own", row.values, 1
    elif entry.given == "filters":
        yield from ((name, values, 1) for name, values in FILTERS.items())
    else:
        of_channels = any(np.size(tensor) == 8 for tensor in row.tensors) if isinstance(row.tensors, tuple) else False
        yield from ((name, *each) for name, each in INPUTS.items() if name != "vector" or not of_channels)


def cases(name: str) -> Iterator[tuple[str, Case]]:
    entry = golden.QUANTIZERS[name]
    for which, row in enumerate(entry.rows):
        for surrogate, make, definition, scheduled in with_surrogates(KINDS[name], entry):
            for data, values, dim in given(entry, row):
                tensors = row.tensors if isinstance(row.tensors, tuple) else row.tensors(values)
                case = Case(make, definition, row, tensors, scheduled, values, dim)
                yield f"row {which} of {written(name, row.args)}{surrogate}, {data}", case


EACH = pytest.mark.parametrize("name", golden.QUANTIZERS)


def tensor(values: float | Array) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def found(quantizer: Quantizer, v: Array, g: Array, *tensors: Tensor) -> list[Array]:
    """The quantized values and every gradient that isn't None."""
    grads = quantizer.backward(tensor(g), tensor(v), *tensors)
    return [t.numpy() for t in (quantizer.quantize(tensor(v), *tensors), *grads) if t is not None]


def run(case: Case) -> tuple[list[Array], Found]:
    """What qconv finds, and what the definition says."""
    make, definition, row, tensors, scheduled, v, dim = case
    g = GRAD[: v.size].reshape(v.shape) if v.shape != golden.FILTERS.shape else golden.GRAD_FILTERS
    quantizer: Quantizer = make(**row.args)
    quantizer.build(v.shape[dim], dim)
    quantizer.train(row.training)
    context: dict[str, Any] = {"dim": dim, "training": row.training, "noise": None, "progress": row.progress}
    own, latent = tuple(map(tensor, (*tensors, *scheduled))), tensor(v)
    if row.progress is not None:
        quantizer.initialize(latent)
        quantizer.set_progress_(row.progress, latent)
        own = quantizer.tensors()
    elif all(parameter is not None for parameter in quantizer._parameters.values()):
        own = *own, *quantizer.tensors()[len(own) :]  # a random stream, or a mark of training
    if (stream := getattr(quantizer, "stream", None)) is not None:
        context["noise"] = stream.uniform(tensor(v), *stream.tensors()).double().numpy()
    by_rows = v is FILTERS["random"]  # definitions of weights take a row for each filter

    def rows(values: Any) -> Any:
        return values.reshape(len(values), -1) if by_rows and np.shape(values) == v.shape else values

    context = {key: rows(each) for key, each in context.items() if key in inspect.signature(definition).parameters}
    expected = definition(rows(v), rows(g), *map(rows, tensors), **row.args, **context)
    results = found(quantizer, v, g, *own)
    if row.progress is not None:
        np.testing.assert_array_equal(latent.numpy(), results[0])  # the weight itself goes to its level
    return results, tuple(np.reshape(each, v.shape) if np.size(each) == v.size else each for each in expected)


def agree(found: list[Array], expected: Found, name: str = "") -> None:
    assert len(found) == len(expected), name
    for one, other in zip(found, expected, strict=True):
        assert one.shape == np.shape(other), name
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13, err_msg=name)


@EACH
def test_forward_and_every_gradient(name: str) -> None:
    """And an error that is planted in each of them is rejected."""
    for which, case in cases(name):
        results, expected = run(case)
        agree(results, expected, which)
        for index, array in enumerate(results):
            place = np.unravel_index(np.abs(array).argmax(), array.shape)
            wrong = [each.copy() for each in results]
            wrong[index][place] += 1e-9 * (1 + abs(wrong[index][place]))
            with pytest.raises(AssertionError, match="Not equal to tolerance"):
                agree(wrong, expected)


PRINTED = [
    (name, values) for name, entry in (golden.QUANTIZERS | golden.SURROGATES).items() for values in entry.printed
]


@pytest.mark.parametrize(("name", "printed"), PRINTED, ids=[written(name, each.args) for name, each in PRINTED])
def test_printed_values(name: str, printed: golden.Printed) -> None:
    """A surrogate's are those of the gradient alone."""
    args, tensors, results = printed
    surrogate = SURROGATES.get(name)
    quantizer = KINDS[name](**args) if surrogate is None else Sign(partial(surrogate, **args))
    filters = surrogate is None and golden.QUANTIZERS[name].given == "filters"
    v, g = (golden.FILTERS[:1], golden.GRAD_FILTERS[:1]) if filters else (golden.INPUTS[:1], golden.GRAD_INPUTS[:1])
    own = getattr(quantizer.double(), "surrogate", None) if surrogate is None else None
    all_tensors = *map(tensor, tensors), *(own.tensors() if own else ())
    for one, other in zip(found(quantizer, v, g, *all_tensors), results if surrogate is None else (None, *results)):  # noqa: B905
        if other is not None:
            np.testing.assert_allclose(one.squeeze(), other, rtol=1e-12, atol=6e-7)


def test_stochastic_rounding_of_shift_and_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are rounded by numbers of their own."""
    v, g, quantizer = golden.FILTERS, golden.GRAD_FILTERS, ShiftPS(4, "stochastic")
    noises = GRAD[:24].reshape(3, 8) % 1, GRAD[24:48].reshape(3, 8) % 1
    drawn = iter([*noises, *noises])  # forward and backward
    for module in (stochastic, deepshift):
        monkeypatch.setattr(module, "uniform", lambda *_: tensor(next(drawn)))
    assert quantizer.stream is not None
    assert quantizer.is_random is not None
    shift, sign = v - 1.5, v / 2
    results = found(quantizer, v, g, tensor(shift), tensor(sign), *quantizer.stream.tensors(), quantizer.is_random)
    agree(results, golden.shift_ps(v, g, shift, sign, 4, *noises))


def test_no_method_is_left_out() -> None:
    assert KINDS.keys() == golden.QUANTIZERS.keys(), "tests/golden.py: QUANTIZERS has a row of each"
    assert SURROGATES.keys() == golden.SURROGATES.keys(), "tests/golden.py: SURROGATES has a row of each"
