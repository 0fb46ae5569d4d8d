"""ONNX files for images of any size, compared at sizes other than the example's."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..layers.copies import copied
from .runtime import load

_IMAGES = 2  # all that are computed in other sizes
_MORE = 4  # times the error at the example's size
_LEAST = 0.01  # of the outputs' mean magnitude: a smaller error may come from codes at an edge


def sides(example: Tensor) -> dict[int, str]:
    """The names of the dimensions behind the channels."""
    names = ("height", "width") if example.ndim == 4 else [f"side_{place}" for place in range(1, example.ndim - 1)]
    return dict(enumerate(names, 2))


def of_other_sizes(model: nn.Module, example: Tensor) -> list[Tensor]:
    """Return the example in the other sizes that the model takes: a little larger, and two or three times as large.

    Raises:
        ValueError: the model takes neither of them.
    """
    if example.ndim < 3:
        raise ValueError(f"any_size: example (of shape {tuple(example.shape)}) has no height and width")
    trained, found, reason = copied(model).eval().cpu(), [], ""
    places = list(enumerate(example.shape[2:]))
    for size in ([side + 1 + 2 * place for place, side in places], [side * (2 + place % 2) for place, side in places]):
        other = example[:_IMAGES]
        for dim, side in enumerate(size, 2):
            other = torch.cat([other] * -(-side // other.shape[dim]), dim).narrow(dim, 0, side)
        with _called(trained) as names:
            try:
                trained(other)
                found.append(other)
            except (RuntimeError, ValueError, IndexError, AssertionError) as error:
                where = f"'{names[-1]}'" if names[-1] else "its forward"
                words = (str(error) or type(error).__name__).splitlines()[0]
                reason = f"with {_by(other)}, {where} raises: {words}"
    if not found:
        raise ValueError(
            f"any_size: model ({type(model).__name__}) takes no images of another size than {_by(example)}: {reason}"
        )
    return found


def compare_sizes(model: nn.Module, content: bytes, example: Tensor, others: list[Tensor]) -> None:
    """Compare the outputs of a file with the trained model's, for images of other sizes.

    Raises:
        ValueError: an output has another shape or is off by more than at the example's size and than codes at an edge
            explain; or ONNX Runtime fails.
    """
    trained, session = copied(model).eval().cpu(), load(content, torch.get_num_threads(), optimized=False)

    def error_of(images: Tensor) -> float:
        wanted = trained(images)
        try:
            got = torch.from_numpy(session.run(None, {session.get_inputs()[0].name: images.numpy()})[0])
        except Exception as error:  # its own kinds
            reason = str(error).splitlines()[0]
            raise ValueError(f"any_size: the file would fail for images of {_by(images)}: {reason}") from error
        if got.shape != wanted.shape:
            raise ValueError(
                f"any_size: for images of {_by(images)} the file would return shape {tuple(got.shape)}, and model "
                f"({type(model).__name__}) {tuple(wanted.shape)}"
            )
        return float((got - wanted).abs().mean() / wanted.abs().mean().clamp(min=1e-30))

    usual = error_of(example[:_IMAGES])
    for other in others:
        error = error_of(other)
        if not error <= max(_MORE * usual, _LEAST):
            raise ValueError(
                f"any_size: for images of {_by(other)} the file's outputs would be off by {error:.2%} of those of "
                f"model ({type(model).__name__}), and by {usual:.2%} at the example's size ({_by(example)}): "
                "torch's exporter wrote an operator for this size only, such as AdaptiveAvgPool2d to more than "
                "one number"
            )


def _by(images: Tensor) -> str:
    return "x".join(map(str, images.shape[2:]))


@contextmanager
def _called(model: nn.Module) -> Iterator[list[str]]:
    """Record the modules with a running forward, the innermost last."""
    names: list[str] = []

    def enter(name: str) -> Any:
        return lambda *_: names.append(name)

    def leave(*_: Any) -> None:
        names.pop()

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.callback(module.register_forward_pre_hook(enter(name)).remove)
            stack.callback(module.register_forward_hook(leave).remove)
        yield names
