"""Distillation losses against slow formulas in float64, and the recorder of features."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qconv.distillation import Features, attention_matching_loss, distribution_loss

FORMS = ("norm", "mean_square")


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def gradient(loss: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs)


# The loss of the outputs


def slow_distribution_loss(student: Tensor, teacher: Tensor, temperature: float) -> tuple[float, list[list[float]]]:
    """Value and gradient, one number at a time."""

    def softmax(row: list[float]) -> list[float]:
        powers = [math.exp(value / temperature) for value in row]
        return [power / sum(powers) for power in powers]

    total, grads = 0.0, []
    for s_row, t_row in zip(student.tolist(), teacher.tolist(), strict=True):
        s, t = softmax(s_row), softmax(t_row)
        total -= sum(b * math.log(a) for a, b in zip(s, t, strict=True))
        grads.append([(a - b) / temperature / len(student) for a, b in zip(s, t, strict=True)])
    return total / len(student), grads


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (5, 3), (2, 17)])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 4.0])
def test_distribution_loss(shape: tuple[int, int], temperature: float) -> None:
    student, teacher = leaf(*shape), leaf(*shape)
    loss = distribution_loss(student, teacher, temperature)
    expected, grads = slow_distribution_loss(student, teacher, temperature)
    torch.testing.assert_close(loss.item(), expected, rtol=1e-13, atol=1e-15)
    (grad,) = torch.autograd.grad(loss, student, retain_graph=True)
    wanted = torch.tensor(grads, dtype=torch.float64)
    torch.testing.assert_close(grad, wanted, rtol=1e-12, atol=1e-15)
    assert torch.autograd.grad(loss, teacher, allow_unused=True) == (None,)
    if shape[1] > 1:
        with pytest.raises(AssertionError):
            torch.testing.assert_close(grad, wanted * temperature**2 * 1.01, rtol=1e-12, atol=1e-15)
    (grad,) = gradient(distribution_loss(student, student, 1.0), student)  # of an equal student
    torch.testing.assert_close(grad, torch.zeros_like(grad), rtol=0, atol=1e-16)


def test_second_derivatives_and_the_default() -> None:
    student, teacher = leaf(4, 5), torch.randn(4, 5, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda x: distribution_loss(x, teacher, 3.0), student)
    assert distribution_loss(student, teacher).equal(distribution_loss(student, teacher, 1.0))
    student, teacher = leaf(2, 3, 2, 2), torch.randn(2, 4, 2, 2, dtype=torch.float64)
    for form in FORMS:
        loss: Any = partial(attention_matching_loss, teacher_features=teacher, form=form)
        assert torch.autograd.gradgradcheck(loss, student)


def test_hard_teachers_are_labels() -> None:
    student, labels = leaf(4, 5), torch.tensor([0, 3, 2, 4])
    teacher = torch.full((4, 5), -math.inf, dtype=torch.float64)
    teacher[range(4), labels] = 0.0
    torch.testing.assert_close(distribution_loss(student, teacher), nn.functional.cross_entropy(student, labels))


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.bfloat16,) * 2, (torch.float64, torch.half)])
def test_dtypes_of_logits(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    student, teacher = leaf(3, 4, dtype=dtypes[0]), leaf(3, 4, dtype=dtypes[1])
    loss = distribution_loss(student, teacher, 2.0)
    assert loss.dtype == (torch.float64 if dtypes[0] == torch.float64 else torch.float32)
    expected = distribution_loss(student.double(), teacher.double(), 2.0)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    assert gradient(loss, student)[0].dtype == dtypes[0]


# The loss of the attention maps


def textbook(students: list[Tensor], teachers: list[Tensor], form: str) -> Tensor:
    """The formula, image by image; no image may be zero."""
    total = torch.zeros((), dtype=torch.float64)
    for student, teacher in zip(students, teachers, strict=True):
        values: list[Tensor] = []
        for s, t in zip(student, teacher, strict=True):
            s_map, t_map = [
                sum((channel**2 for channel in each), torch.zeros(())).flatten() for each in (s, t.detach())
            ]
            difference = s_map / (s_map**2).sum().sqrt() - t_map / (t_map**2).sum().sqrt()
            squares = (difference**2).sum()
            values.append(squares.sqrt() if form == "norm" else squares / len(difference))
        total = total + torch.stack(values).mean()
    return total


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "shapes",
    [
        [((1, 1, 2), (1, 1, 2))],
        [((3, 4, 5, 3), (3, 7, 5, 3))],
        [((2, 3, 4, 4), (2, 1, 4, 4)), ((2, 5, 2, 2), (2, 5, 2, 2)), ((2, 2, 7), (2, 3, 7))],
        [((2, 3, 2, 3, 2), (2, 2, 2, 3, 2))],
    ],
)
def test_attention_matching(form: Any, shapes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> None:
    students, teachers = [leaf(*shape[0]) for shape in shapes], [leaf(*shape[1]) for shape in shapes]
    loss, expected = attention_matching_loss(students, teachers, form), textbook(students, teachers, form)
    torch.testing.assert_close(loss, expected, rtol=1e-13, atol=0)
    grads, wanted = gradient(loss, *students), gradient(expected, *students)
    torch.testing.assert_close(grads, wanted, rtol=1e-11, atol=1e-14)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(grads, tuple(grad * 1.001 for grad in wanted), rtol=1e-11, atol=1e-14)
    assert torch.autograd.grad(loss, teachers, allow_unused=True) == (None,) * len(teachers)
    if len(students) == 1:
        assert attention_matching_loss(students[0], teachers[0], form).equal(loss)


def test_golden_attention() -> None:
    # Q = (9, 16) / norm and (1, 0): by hand
    student = torch.tensor([[[3.0, 0.0], [0.0, 4.0]]], dtype=torch.float64)
    teacher = torch.tensor([[[-2.0, 0.0]]], dtype=torch.float64)
    norm = math.sqrt(81 + 256)
    squares = (9 / norm - 1) ** 2 + (16 / norm) ** 2
    assert attention_matching_loss(student, teacher).item() == pytest.approx(math.sqrt(squares), rel=1e-14)
    assert attention_matching_loss(student, teacher, "mean_square").item() == pytest.approx(squares / 2, rel=1e-14)
    student[0, 0, 0] = math.nan  # stays visible
    assert attention_matching_loss(student, teacher).isnan()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_zero_maps(form: Any, dtype: torch.dtype) -> None:
    student, teacher = torch.randn(4, 3, 2, 2).to(dtype), torch.randn(4, 5, 2, 2).to(dtype)
    student[0] = 0
    teacher[1] = 0
    student[2], teacher[2] = 0, 0
    student.requires_grad_()
    loss = attention_matching_loss(student, teacher, form)
    (grad,) = gradient(loss, student)
    assert grad.isfinite().all()
    assert grad[0].eq(0).all()
    assert grad[2].eq(0).all()
    assert grad[3].ne(0).any()
    alone = attention_matching_loss(student[3:], teacher[3:], form)  # the others are at distance 1, 1 and 0
    expected = (alone + (2.0 if form == "norm" else 2.0 / 4)) / 4
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize("form", FORMS)
def test_equal_maps(form: Any) -> None:
    student = leaf(2, 3, 4, 4)
    loss = attention_matching_loss(student, student.detach().clone().flip(1) * -3, form)
    assert loss.item() < 1e-15
    loss = attention_matching_loss(student, student, form)
    assert loss.item() == 0
    assert gradient(loss, student)[0].eq(0).all()


@pytest.mark.parametrize("factor", [1e-200, 1e-20, 1e20, 1e200])
@pytest.mark.parametrize("form", FORMS)
def test_the_size_of_a_map_has_no_effect(form: Any, factor: float) -> None:
    student, teacher = leaf(2, 3, 4, 4), leaf(2, 5, 4, 4)
    loss = attention_matching_loss(student, teacher, form)
    scaled = (student.detach() * factor).requires_grad_()
    other = attention_matching_loss(scaled, teacher * factor, form)
    torch.testing.assert_close(other, loss, rtol=1e-13, atol=0)
    (grad,) = gradient(other, scaled)
    torch.testing.assert_close(grad * factor, gradient(loss, student)[0], rtol=1e-11, atol=1e-16)


def test_16_bit_features_are_computed_with_in_float32() -> None:
    student, teacher = leaf(2, 300, 4, 4, dtype=torch.float16), torch.randn(2, 3, 4, 4)
    loss = attention_matching_loss(student * 100, teacher)  # squares beyond float16
    assert loss.dtype == torch.float32
    expected = attention_matching_loss(student.double() * 100, teacher.double())
    torch.testing.assert_close(loss.double(), expected, rtol=2e-3, atol=0)
    assert gradient(loss, student)[0].dtype == torch.float16


# The recorder


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval()


def test_features_are_the_outputs() -> None:
    model, input = network(), torch.randn(2, 3, 8, 8)
    with Features(model, ["2", "0"]) as features:
        output = model(input)
    first = model[0](input)
    assert features["0"].equal(first)
    assert features["2"].equal(model[1](first).relu())
    assert [each.shape[1] for each in features.tensors()] == [4, 4]
    assert features.tensors()[0] is features["2"]
    model(torch.randn(1, 3, 8, 8))  # nothing is recorded after the block
    assert features["0"].equal(first)
    (grad,) = torch.autograd.grad(features["0"].sum(), model.get_parameter("0.bias"))
    assert grad.tolist() == [72.0] * 4
    assert output.shape == (2, 2, 4, 4)
    with Features(model, [""]) as whole:
        model(input)
    assert whole[""].equal(output)


def test_the_latest_call_counts_and_the_next_block_forgets() -> None:
    model = network()
    features = Features(model, ["0"])
    with features:
        for size in (5, 6, 7):
            model(torch.randn(1, 3, size, size))
    assert features["0"].shape == (1, 4, 5, 5)
    with features:
        pass
    with pytest.raises(RuntimeError, match="module '0' was not called in the latest block"):
        features.tensors()


def test_hooks_are_removed_whatever_happens() -> None:
    model = network()
    features = Features(model, ["0", "3"])
    with pytest.raises(ZeroDivisionError), features:
        raise ZeroDivisionError
    assert not any(module._forward_hooks for module in model.modules())
    with features, pytest.raises(RuntimeError, match="can't be entered twice at once"), features:
        pass
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_outputs_overwritten_in_place_are_refused(mode: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True))
    with mode(), Features(model, ["0", "1"]) as features:
        output = model(torch.randn(2, 3, 8, 8))
    assert features["1"] is output
    with pytest.raises(RuntimeError, match="output of module '0' was overwritten in place"):
        features["0"]


def test_a_teacher_in_inference_mode() -> None:
    model, input = network(), torch.randn(2, 3, 8, 8)
    with torch.inference_mode(), Features(model, ["2"]) as features:
        model(input)
    student = leaf(2, 4, 6, 6, dtype=torch.float32)
    assert gradient(attention_matching_loss(student, features["2"]), student)[0].isfinite().all()


def test_names_that_are_refused() -> None:
    model = network()
    for names, error, message in (
        (["0", "layer1"], ValueError, "names: 'layer1' is not a module of the model; there are 0, 1, 2, 3"),
        (["0", "0"], ValueError, r"names \(=\['0', '0'\]\) must hold at least one name, and each once"),
        ([], ValueError, r"names \(=\[\]\) must hold at least one name"),
        ("0", TypeError, r"names \(='0'\) must be a sequence of names, such as \['0'\]"),
    ):
        with pytest.raises(error, match=message):
            Features(model, names)
    with pytest.raises(KeyError, match="'1' is not recorded; there are 0, 2"):
        Features(model, ["0", "2"])["1"]
    gru = nn.GRU(3, 4)
    with Features(gru, [""]), pytest.raises(TypeError, match=r"module '' must return a tensor .* not tuple"):
        gru(torch.randn(2, 3))


def test_a_model_that_was_compiled_before_is_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    compiled: Any = torch.compile(model, backend="eager")
    compiled(torch.randn(2, 3, 5, 5))
    features = Features(compiled, ["_orig_mod.0"])
    with features:
        compiled(torch.randn(2, 3, 5, 5))
    with pytest.raises(RuntimeError, match="a compiled model skips hooks that were added after its first call"):
        features["_orig_mod.0"]
