"""Both forms of the gradients, `qconv.grad` and `qconv.grad_composed`, against autograd and nested loops.

At the end: what the composed form can do besides, be differentiated again and take integers.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qconv import grad
from qconv.grad import composed as grad_composed

FORMS = [pytest.param(grad, id="aten"), pytest.param(grad_composed, id="composed")]
Draw = Callable[[Sequence[int]], Tensor]
FORWARD = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)

# torch's warning of a copy, in the reference of an even kernel.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


class Case(NamedTuple):
    """One convolution; the tuples are cut to n."""

    n: int
    groups: int = 1
    stride: int | tuple[int, ...] = 1
    dilation: int | tuple[int, ...] = 1
    padding: int | tuple[int, ...] | str = 0
    kernel: tuple[int, ...] = (3, 3, 3)
    size: tuple[int, ...] = (5, 7, 8)
    channels: tuple[int, int] = (4, 8)
    transposed: bool = False
    output_padding: int | tuple[int, ...] = 0
    batch: int | None = 2

    def cut(self, value: Any) -> Any:
        return value[: self.n] if isinstance(value, tuple) else value

    @property
    def geometry(self) -> dict[str, Any]:
        names = ("stride", "padding", "dilation", "groups") + ("output_padding",) * self.transposed
        return {name: self.cut(getattr(self, name)) for name in names}

    @property
    def keywords(self) -> dict[str, Any]:
        """Those of `conv_backward`."""
        return {**self.geometry, "transposed": self.transposed}

    def forward(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        function: Callable[..., Tensor] = (TRANSPOSED if self.transposed else FORWARD)[self.n - 1]
        return function(input, weight, bias, **self.geometry)

    def sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        c_in, c_out = self.channels
        first = (c_in, c_out // self.groups) if self.transposed else (c_out, c_in // self.groups)
        batch = () if self.batch is None else (self.batch,)
        return (*batch, c_in, *self.cut(self.size)), (*first, *self.cut(self.kernel))

    def tensors(self, draw: Draw) -> tuple[Tensor, Tensor, Tensor]:
        """grad_output, input and weight, each entry drawn by `draw`."""
        input, weight = (draw(size) for size in self.sizes())
        return draw(self.forward(input.double(), weight.double()).shape), input, weight


def normal(dtype: torch.dtype = torch.float64) -> Draw:
    generator = torch.Generator().manual_seed(0)
    return lambda size: torch.randn(tuple(size), generator=generator, dtype=torch.float64).to(dtype)


def uniform(bits: int, dtype: torch.dtype = torch.int64) -> Draw:
    """Integers in [−2^(bits − 1), 2^(bits − 1)); 64 bits are all of int64."""
    generator = torch.Generator().manual_seed(0)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    return lambda size: torch.randint(low, high, tuple(size), generator=generator).to(dtype)


def autograd(case: Case, grad_output: Tensor, input: Tensor, weight: Tensor) -> list[Tensor]:
    """The reference: PyTorch's own gradients of input, weight and bias."""
    bias = weight.new_zeros(case.channels[1])
    leaves = [leaf.detach().clone().requires_grad_() for leaf in (input, weight, bias)]
    return list(torch.autograd.grad(case.forward(leaves[0], leaves[1], leaves[2]), leaves, grad_output))


def gradients(form: Any, case: Case, *tensors: Tensor, **options: Any) -> list[Any]:
    return list(form.conv_backward(*tensors, **case.keywords, **options))


def one_by_one(form: Any, case: Case, grad_output: Tensor, input: Tensor, weight: Tensor) -> list[Tensor]:
    """The gradients of input and weight from the per-dimension functions."""
    name = f"conv{'_transpose' * case.transposed}{case.n}d"
    grad_input = getattr(form, f"{name}_input")(input.shape, weight, grad_output, **case.geometry)
    grad_weight = getattr(form, f"{name}_weight")(input, weight.shape, grad_output, **case.geometry)
    return [grad_input, grad_weight]


def check_close(given: Sequence[Tensor | None], expected: Sequence[Tensor]) -> None:
    for g, e in zip(given, expected, strict=True):
        assert g is not None
        assert (g.shape, g.dtype) == (e.shape, e.dtype)
        assert torch.allclose(g, e, rtol=1e-12, atol=1e-12)  # a tenth of assert_close's time, which the grid would feel


def check_equal(given: Sequence[Tensor | None], expected: Sequence[Tensor]) -> None:
    for g, e in zip(given, expected, strict=True):
        assert g is not None
        assert g.dtype == e.dtype
        assert torch.equal(g, e)


def steps(case: Case, grad_output: Tensor, input: Tensor, weight: Tensor) -> Iterator[tuple[Any, ...]]:
    """Indices into output, input and weight of every product of a batched convolution, by the definition."""
    n, groups = case.n, case.groups
    stride, dilation = (value if isinstance(value, tuple) else (value,) * 3 for value in (case.stride, case.dilation))
    kernel = weight.shape[2:]
    if case.padding == "same":
        padding: Sequence[int] = [d * (k - 1) // 2 for d, k in zip(dilation, kernel, strict=False)]
    elif case.padding == "valid":
        padding = (0,) * n
    else:
        padding = case.padding if isinstance(case.padding, tuple) else (int(case.padding),) * n
    small, large = (input, grad_output) if case.transposed else (grad_output, input)
    per_small, per_large = small.shape[1] // groups, large.shape[1] // groups
    for sample, group, a, b in product(range(len(input)), range(groups), range(per_small), range(per_large)):
        for position in product(*map(range, small.shape[2:])):
            for offset in product(*map(range, kernel)):
                at = tuple(stride[i] * position[i] + dilation[i] * offset[i] - padding[i] for i in range(n))
                if all(0 <= x < length for x, length in zip(at, large.shape[2:], strict=True)):
                    in_small = (sample, group * per_small + a, *position)
                    in_large = (sample, group * per_large + b, *at)
                    in_weight = (group * per_small + a, b, *offset)
                    yield (in_large, in_small, in_weight) if case.transposed else (in_small, in_large, in_weight)


def nested_loops(case: Case, grad_output: Tensor, input: Tensor, weight: Tensor) -> list[np.ndarray]:
    """The slow oracle, in Python's own numbers: its integers know no overflow."""
    g, x, w = (np.array(t.tolist(), dtype=object) for t in (grad_output, input, weight))
    grad_input, grad_weight = x * 0, w * 0
    for in_output, in_input, in_weight in steps(case, grad_output, input, weight):
        grad_input[in_input] += w[in_weight] * g[in_output]
        grad_weight[in_weight] += x[in_input] * g[in_output]
    return [grad_input, grad_weight, g.sum(axis=(0, *range(2, g.ndim)))]


def wrap(integers: np.ndarray, dtype: torch.dtype) -> Tensor:
    """Python integers modulo 2^bits."""
    half = 2 ** (torch.iinfo(dtype).bits - 1)
    return torch.tensor(((integers + half) % (2 * half) - half).tolist(), dtype=dtype)


GRID = [
    Case(n, groups, stride, dilation, padding, kernel)
    for n, groups, stride, dilation, padding, kernel in product(
        (1, 2, 3),
        (1, 2, 4),
        (1, 2, (3, 1, 2)),
        (1, 2, (1, 3, 2)),
        (0, (1, 2, 0), "same", "valid"),
        ((3,) * 3, (2, 1, 4)),
    )
    if not (padding == "same" and stride != 1)
]
GRID += [Case(n, 4, channels=(4, 4), batch=1) for n in (1, 2, 3)]  # depthwise, a multiplier of 1
GRID += [Case(n, 2, padding=5, channels=(6, 2)) for n in (1, 2, 3)]  # padding beyond the kernel
TRANSPOSED_GRID = [
    Case(n, groups, stride, dilation, padding, kernel, (4, 3, 3), transposed=True, output_padding=output_padding)
    for n, groups, stride, dilation, padding, kernel, output_padding in product(
        (1, 2, 3), (1, 2, 4), (1, 2, (3, 1, 2)), (1, 2, (1, 3, 2)), (0, 1, (1, 0, 1)), ((3,) * 3, (2, 3, 4)), (0, 1)
    )
    if not (output_padding and (stride == 1 or stride == (3, 1, 2)) and dilation in (1, (1, 3, 2)))
]
SMALL = [
    Case(1, 2, 2, 2, 1, (3,), (9,), (4, 6)),
    Case(1, 1, 1, 3, "same", (2,), (5,), (2, 3)),
    Case(2, 2, (1, 2), 1, (1, 0), (3, 2), (5, 5), (4, 2)),
    Case(2, 3, 1, (2, 1), "same", (2, 4), (4, 5), (3, 3)),
    Case(3, 2, 2, 1, 1, (2, 3, 1), (3, 4, 3), (4, 4)),
    Case(3, 1, 1, (1, 1, 2), "same", (2, 1, 2), (3, 2, 3), (2, 1)),
    Case(1, 2, 2, 1, 1, (3,), (4,), (4, 6), True, 1),
    Case(2, 2, (2, 3), (1, 2), (0, 1), (3, 2), (3, 2), (2, 4), True, (1, 2)),
    Case(3, 1, 2, 1, 0, (2, 1, 2), (2, 2, 3), (2, 2), True, (1, 0, 1)),
]


def name(case: Case) -> str:
    """Such as "2d-g2-s1-d(1, 3)-psame-k(2, 1)"."""
    cut = case.cut
    parts = [f"{case.n}d", f"g{case.groups}", f"s{cut(case.stride)}", f"d{cut(case.dilation)}", f"p{cut(case.padding)}"]
    parts += [f"k{cut(case.kernel)}"]
    if case.transposed:
        parts = ["T", *parts, f"o{cut(case.output_padding)}"]
    return "-".join(parts)


@pytest.mark.parametrize("case", GRID + TRANSPOSED_GRID, ids=name)
def test_both_forms_equal_autograd(case: Case) -> None:
    for batch in (case.batch, None):
        shaped = case._replace(batch=batch)
        tensors = shaped.tensors(normal())
        expected = autograd(shaped, *tensors)
        for form in (grad, grad_composed):
            check_close(gradients(form, shaped, *tensors), expected)
            check_close(one_by_one(form, shaped, *tensors), expected[:2])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", SMALL, ids=name)
def test_equals_nested_loops(form: Any, case: Case) -> None:
    tensors = case.tensors(normal())
    expected = [torch.tensor(e.tolist(), dtype=torch.float64) for e in nested_loops(case, *tensors)]
    check_close(gradients(form, case, *tensors), expected)
    check_close(one_by_one(form, case, *tensors), expected[:2])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("case", SMALL, ids=name)
def test_composed_integers_equal_nested_loops_modulo_2_to_bits(case: Case, dtype: torch.dtype) -> None:
    tensors = case.tensors(uniform(64, dtype))
    loops = nested_loops(case, *tensors)
    if dtype == torch.uint8:
        expected = [torch.tensor((e % 256).tolist(), dtype=dtype) for e in loops]
    else:
        expected = [wrap(e, dtype) for e in loops]
    check_equal(gradients(grad_composed, case, *tensors), expected)
    check_equal(one_by_one(grad_composed, case, *tensors), expected[:2])


def test_composed_gradients_of_16_bits_where_torch_convolves_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    strides: dict[str, Any] = {"stride": (3, 2, 1), "padding": (0, 1, 1), "dilation": (3, 3, 2)}
    case = Case(
        3,
        transposed=True,
        size=(8, 6, 6),
        kernel=(2, 4, 1),
        channels=(1, 1),
        batch=3,
        output_padding=(1, 0, 1),
        **strides,
    )
    tensors = case.tensors(normal(torch.bfloat16))
    expected = gradients(grad_composed, case, *(tensor.double() for tensor in tensors))[1]
    dtypes: set[torch.dtype] = set()  # not every processor has the fault
    convolution = torch.convolution
    monkeypatch.setattr(torch, "convolution", lambda *a: dtypes.add(a[0].dtype) or convolution(*a))
    error = (gradients(grad_composed, case, *tensors)[1].double() - expected).abs().max()
    assert error <= 2**-8 * expected.abs().max()
    assert dtypes == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True], ids=["conv", "transposed"])
def test_error_is_at_most_twice_that_of_autograd(form: Any, dtype: torch.dtype, n: int, transposed: bool) -> None:
    case = Case(n, 2, 2, 1, 1, size=(17, 9, 9), channels=(8, 16), transposed=transposed, batch=4)
    tensors = case.tensors(normal(dtype))
    exact = autograd(case, *(t.double() for t in tensors))
    for ours, plain, e in zip(gradients(form, case, *tensors), autograd(case, *tensors), exact, strict=True):
        assert ours.dtype == dtype
        assert (ours.double() - e).norm() <= 2 * (plain.double() - e).norm()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("padding", [1, "same"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64], ids=str)
def test_empty_batch(form: Any, n: int, padding: int | str, dtype: torch.dtype) -> None:
    case = Case(n, 2, 1, 1, padding, kernel=(2, 2, 2), batch=0)
    cases = [case] if padding == "same" else [case, case._replace(transposed=True)]
    for each in cases:
        tensors = [t.to(dtype) for t in each.tensors(normal())]
        if form is grad and dtype == torch.int64:
            with pytest.raises(TypeError, match="floating point"):
                gradients(form, each, *tensors)
            continue
        grad_input, grad_weight, grad_bias = gradients(form, each, *tensors)
        assert grad_input.shape == tensors[1].shape
        assert torch.equal(grad_weight, torch.zeros_like(tensors[2]))
        assert torch.equal(grad_bias, torch.zeros(each.channels[1], dtype=dtype))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "case", [Case(2, 2, padding="same", kernel=(2, 3)), Case(1), Case(2), Case(3, stride=2), Case(2, transposed=True)]
)
def test_output_mask_leaves_none_and_changes_nothing_else(case: Case, form: Any) -> None:
    tensors = case.tensors(normal(torch.float32))  # of which aten computes more than it is asked for
    whole = gradients(form, case, *tensors)
    for mask in product((False, True), repeat=3):
        for part, full, wanted in zip(gradients(form, case, *tensors, output_mask=mask), whole, mask, strict=True):
            assert (part is not None) == wanted
            if wanted:
                torch.testing.assert_close(part, full)


@pytest.mark.parametrize("transposed", [False, True], ids=["conv", "transposed"])
@pytest.mark.parametrize(
    ("n", "memory_format"), [(2, torch.channels_last), (3, torch.channels_last_3d)], ids=["2d", "3d"]
)
@pytest.mark.parametrize("kernel", [3, 2], ids=["odd", "even"])
def test_memory_formats_are_those_of_autograd(
    n: int, memory_format: torch.memory_format, kernel: int, transposed: bool
) -> None:
    case = Case(n, 2, 1, 1, 1 if transposed else "same", (kernel,) * 3, transposed=transposed)
    tensors = case.tensors(normal(torch.float32))
    for formats in product((torch.contiguous_format, memory_format), repeat=3):
        formatted = [t.contiguous(memory_format=f) for t, f in zip(tensors, formats, strict=True)]
        ours = gradients(grad, case, *formatted)
        assert [g.stride() for g in ours] == [e.stride() for e in autograd(case, *formatted)]
        if formats[1] == memory_format:
            assert ours[0].is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize(
    "case",
    [Case(1, 2, padding=1), Case(2, 2, 2, padding=1), Case(2, padding="same", kernel=(2, 4)), SMALL[8]],
    ids=name,
)
def test_compiles_to_one_graph(case: Case) -> None:
    tensors = case.tensors(normal(torch.float32))
    compiled = torch.compile(partial(grad.conv_backward, **case.keywords), fullgraph=True, backend="aot_eager")
    check_equal(list(compiled(*tensors)), gradients(grad, case, *tensors))
    alone = torch.compile(partial(one_by_one, grad, case), fullgraph=True, backend="aot_eager")
    check_equal(alone(*tensors), one_by_one(grad, case, *tensors))


def test_traces_with_dynamic_sizes_and_without_recompiling() -> None:
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    case = Case(2, 2, 2, padding=1)
    compiled = torch.compile(partial(grad.conv_backward, **case.keywords), fullgraph=True, dynamic=True, backend=count)
    for batch, size in ((5, 13), (6, 17), (9, 12)):  # the first sizes equal none of the weight's: dynamo joins equals
        tensors = case._replace(batch=batch, size=(size, size)).tensors(normal())
        check_close(list(compiled(*tensors)), gradients(grad, case, *tensors))
    assert len(graphs) == 1


def test_neither_per_dimension_function_reads_what_it_differentiates_by() -> None:
    case = Case(2, 2, 2, padding=1)
    grad_output, input, weight = case.tensors(normal())
    for form in (grad, grad_composed):
        expected = autograd(case, grad_output, input, weight)
        check_close(one_by_one(form, case, grad_output, input, torch.full_like(weight, torch.nan))[1:], expected[1:2])
        check_close(one_by_one(form, case, grad_output, torch.full_like(input, torch.nan), weight)[:1], expected[:1])
        assert isinstance(form.conv2d_input(list(input.shape), weight, grad_output, [2, 2], [1, 1], [1, 1], 2), Tensor)


WRONG: dict[str, Callable[[Case, Tensor, Tensor, Tensor], list[Tensor]]] = {
    "flipped kernel": lambda case, g, x, w: gradients(grad, case, g, x, w.flip(2)),
    "transposed kernel": lambda case, g, x, w: gradients(grad, case, g, x, w.transpose(2, 3)),
    "group order": lambda case, g, x, w: gradients(grad, case, g, x, w.roll(w.shape[0] // case.groups, 0)),
    "grad_output's groups interleaved": lambda case, g, x, w: gradients(
        grad, case, g.unflatten(1, (case.groups, -1)).transpose(1, 2).flatten(1, 2), x, w
    ),
    "one group": lambda case, g, x, w: gradients(grad, case, g, x.roll(x.shape[1] // case.groups, 1), w),
    "one element": lambda case, g, x, w: gradients(grad, case, g, x + 1e-9 * (x == x.max()), w),
    "bias not summed over the batch": lambda case, g, x, w: [*gradients(grad, case, g, x, w)[:2], g[0].sum((1, 2))],
    "no bias": lambda case, g, x, w: gradients(grad, case, g, x, w)[:2],
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_the_checks_reject_a_wrong_gradient(wrong: Callable[..., list[Tensor]]) -> None:
    case = Case(2, 2, 1, 1, 1, size=(5, 5), channels=(4, 4))
    tensors = case.tensors(normal())
    loops = [torch.tensor(e.tolist(), dtype=torch.float64) for e in nested_loops(case, *tensors)]
    given = wrong(case, *tensors)
    for expected in (autograd(case, *tensors), loops):
        check_close(gradients(grad, case, *tensors), expected)
        with pytest.raises((AssertionError, ValueError)):
            check_close(given, expected)


SIZES: dict[str, Any] = {"grad_output": (2, 4, 5, 5), "input": (2, 4, 7, 7), "weight": (4, 4, 3, 3)}
ERRORS: dict[str, tuple[dict[str, Any], str]] = {
    "groups": ({"groups": 3}, r"groups \(=3\) must divide in_channels \(=4\)"),
    "groups of 0": ({"groups": 0}, r"groups \(=0\) must be at least 1"),
    "groups of the weight": (
        {"groups": 2, "weight": (3, 2, 3, 3)},
        r"groups \(=2\) must divide weight_size\[0\] \(=3\)",
    ),
    "channels": (
        {"weight": (4, 3, 3, 3)},
        r"input_size \(=\(2, 4, 7, 7\)\) must have 3 channels for weight_size \(=\(4, 3, 3, 3\)\) and groups \(=1\)",
    ),
    "channels transposed": (
        {"weight": (6, 2, 3, 3), "transposed": True},
        r"input_size \(=\(2, 4, 7, 7\)\) must have 6 channels for weight_size \(=\(6, 2, 3, 3\)\) and groups \(=1\)",
    ),
    "grad_output's size": (
        {"grad_output": (2, 4, 6, 5)},
        r"grad_output's size \(=\(2, 4, 6, 5\)\) must be \(2, 4, 5, 5\) for input_size \(=\(2, 4, 7, 7\)\)",
    ),
    "grad_output's batch": ({"grad_output": (3, 4, 5, 5)}, r"\(=\(3, 4, 5, 5\)\) must be \(2, 4, 5, 5\)"),
    "grad_output's channels": ({"grad_output": (2, 1, 5, 5)}, r"\(=\(2, 1, 5, 5\)\) must be \(2, 4, 5, 5\)"),
    "grad_output's size, same": ({"padding": "same"}, r"\(=\(2, 4, 5, 5\)\) must be \(2, 4, 7, 7\) for input_size"),
    "grad_output's size, transposed": ({"transposed": True}, r"\(=\(2, 4, 5, 5\)\) must be \(2, 4, 9, 9\)"),
    "too small": ({"dilation": 4}, r"input_size \(=\(2, 4, 7, 7\)\) is too small for weight_size"),
    "weight's dimensions": ({"weight": (4, 4)}, r"weight \(of size \(4, 4\)\) must have 3, 4 or 5 dimensions"),
    "input's dimensions": ({"input": (7, 7)}, r"input_size \(=\(7, 7\)\) must have 3 or 4 dimensions"),
    "grad_output's dimensions": (
        {"grad_output": (4, 5, 5)},
        r"grad_output \(of size \(4, 5, 5\)\) must have 4 dimensions, as input",
    ),
    "stride of 0": ({"stride": (1, 0)}, r"stride \(=\(1, 0\)\) must be at least 1"),
    "stride's length": ({"stride": (1, 1, 1)}, r"stride \(=\(1, 1, 1\)\) must be an int or 2 ints"),
    "dilation": ({"dilation": 0}, r"dilation \(=0\) must be at least 1"),
    "negative padding": ({"padding": -1}, r"padding \(=-1\) must be at least 0"),
    "named padding": ({"padding": "full"}, r"padding \(='full'\) must be 'same', 'valid' or ints"),
    "same with a stride": (
        {"padding": "same", "stride": 2},
        r"padding='same' requires stride 1, not stride \(=\(2, 2\)\)",
    ),
    "named padding, transposed": (
        {"padding": "same", "transposed": True},
        r"padding \(='same'\) of a transposed convolution must be an int or 2 ints",
    ),
    "output_padding": (
        {"output_padding": 2, "stride": 2, "transposed": True},
        r"output_padding \(=\(2, 2\)\) must be smaller than stride \(=\(2, 2\)\) or dilation \(=\(1, 1\)\)",
    ),
    "output_padding, not transposed": (
        {"output_padding": 1},
        r"output_padding \(=\(1, 1\)\) must be 0 unless transposed",
    ),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("changes", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_value_errors(form: Any, changes: dict[str, Any], message: str) -> None:
    arguments = {**SIZES, **changes}
    tensors = {name: torch.zeros(arguments.pop(name)) for name in SIZES}
    with pytest.raises(ValueError, match=message):
        form.conv_backward(**tensors, **arguments)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("kind", ["conv", "conv_transpose"])
def test_errors_of_the_per_dimension_functions(form: Any, n: int, kind: str) -> None:
    input_gradient, weight_gradient = (getattr(form, f"{kind}{n}d_{which}") for which in ("input", "weight"))
    input, weight, grad_output = (torch.zeros(1, 1, *(length,) * n) for length in (4, 1, 4))
    with pytest.raises(ValueError, match=rf"weight \(of size .*\) must have {n + 2} dimensions"):
        input_gradient(input.shape, weight[None], grad_output)
    with pytest.raises(ValueError, match=rf"weight_size \(=.*\) must have {n + 2} dimensions"):
        weight_gradient(input, weight.shape[1:], grad_output)
    with pytest.raises(ValueError, match=rf"input_size \(=.*\) must have {n + 1} or {n + 2} dimensions"):
        input_gradient((1, *input.shape), weight, grad_output)
    with pytest.raises(ValueError, match=r"grad_output's size \(=.*4.*\) must be .*5.* for input_size \(=.*5.*\)"):
        input_gradient((1, 1, *(5,) * n), weight, grad_output)
    with pytest.raises(ValueError, match=r"groups \(=2\) must divide in_channels \(=1\)"):
        weight_gradient(input, weight.shape, grad_output, groups=2)


@pytest.mark.parametrize("form", FORMS)
def test_mixed_dtypes_and_devices(form: Any) -> None:
    tensors = {name: torch.zeros(size) for name, size in SIZES.items()}
    for name in SIZES:
        with pytest.raises(TypeError, match=r"grad_output, input and weight \(=.*torch.float64.*\) must have the same"):
            form.conv_backward(**{**tensors, name: tensors[name].double()})
        with pytest.raises(ValueError, match=r"grad_output, input and weight \(=.*meta.*\) must be on the same device"):
            form.conv_backward(**{**tensors, name: tensors[name].to("meta")})


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.complex64, torch.bool], ids=str)
def test_aten_form_refuses_what_is_not_floating_point(dtype: torch.dtype) -> None:
    grad_output, input, weight = (torch.zeros(size).to(dtype) for size in SIZES.values())
    with pytest.raises(TypeError, match=rf"dtype \(={dtype}\) must be floating point"):
        grad.conv_backward(grad_output, input, weight)
    with pytest.raises(TypeError, match=rf"dtype \(={dtype}\) must be floating point"):
        grad.conv2d_input(input.shape, weight, grad_output)
    with pytest.raises(TypeError, match=rf"dtype \(={dtype}\) must be floating point"):
        grad.conv2d_weight(input, weight.shape, grad_output)


TWICE = [
    Case(1, 2, 2, 1, 1, (3,), (6,), (2, 4), batch=2),
    Case(1, 1, 1, 1, "same", (2,), (4,), (2, 1), batch=None),
    Case(2, 2, (2, 1), (1, 2), (1, 0), (2, 2), (4, 4), (4, 2), batch=1),
    Case(2, 1, 1, 1, "same", (2, 3), (3, 3), (1, 2), batch=2),
    Case(3, 2, 2, 1, 1, (2, 1, 2), (3, 2, 3), (2, 2), batch=1),
    Case(2, 2, (2, 3), 1, (1, 0), (2, 2), (2, 2), (2, 4), True, (1, 2), batch=1),
    Case(1, 1, 1, 2, 0, (2,), (3,), (2, 1), True, 1),
]


@pytest.mark.parametrize("case", TWICE, ids=name)
def test_second_derivatives_equal_those_of_autograd(case: Case) -> None:
    grad_output, input, weight = (t.requires_grad_() for t in case.tensors(normal()))
    first = torch.autograd.grad(case.forward(input, weight), (input, weight), grad_output, create_graph=True)
    composed = gradients(grad_composed, case, grad_output, input, weight)[:2]
    directions = [torch.cos(torch.arange(f.numel(), dtype=f.dtype)).view_as(f) for f in first]
    of = (grad_output, input, weight)
    check_close(torch.autograd.grad(composed, of, directions), torch.autograd.grad(first, of, directions))


def test_gradients_of_an_empty_batch_stay_in_the_graph() -> None:
    tensors = [t.requires_grad_() for t in Case(2, 2, padding=1, batch=0).tensors(normal())]
    total = sum(g.sum() for g in gradients(grad_composed, Case(2, 2, padding=1, batch=0), *tensors))
    assert isinstance(total, Tensor)
    assert [g.shape for g in torch.autograd.grad(total, tensors)] == [t.shape for t in tensors]


def test_gradients_of_secret_shares_add_up_to_the_gradient_of_the_whole() -> None:
    """Modulo 2^64; each share alone is random."""
    case = Case(2, 2, 2, padding=1)
    grad_output, input, weight = case.tensors(uniform(16))
    share, other = (uniform(64)(tensor.shape) for tensor in (grad_output, input))
    backward = partial(gradients, grad_composed, case)
    parts = [backward(g, x, weight)[1] for g in (share, grad_output - share) for x in (other, input - other)]
    assert torch.equal(torch.stack(parts).sum(0), backward(grad_output, input, weight)[1])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool], ids=str)
def test_refuses_complex_and_bool(dtype: torch.dtype) -> None:
    tensors = [t.to(dtype) for t in Case(1).tensors(normal())]
    with pytest.raises(TypeError, match=rf"dtype \(={dtype}\) must be floating point or integer"):
        gradients(grad_composed, Case(1), *tensors)


def test_refuses_integers_off_the_cpu() -> None:
    tensors = [t.long().to("meta") for t in Case(1).tensors(normal())]
    with pytest.raises(ValueError, match=r"device \(=meta\) of integer tensors must be cpu"):
        gradients(grad_composed, Case(1), *tensors)
