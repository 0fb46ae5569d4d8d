"""Learning from a teacher: a loss of its outputs, a loss of its attention maps, and a recorder of features."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


def distribution_loss(student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Cross-entropy of the student's class probabilities with the teacher's, the loss of ReActNet.

    ``−Σ_c softmax(teacher/T)_c · log_softmax(student/T)_c``, the mean over the batch (arXiv:2003.03488).
    ``dstudent = (softmax(student/T) − softmax(teacher/T)) / (T N)``; the teacher receives no gradient.

    ReActNet trains with this loss alone, at T = 1, without the labels. Up to the teacher's entropy, a constant, it is
    the Kullback-Leibler divergence given in the paper. With T > 1 gradients shrink as 1/T². Multiply the loss by T² if
    you add it to others (Hinton et al., arXiv:1503.02531); this function does not.

    Args:
        student_logits: ``(N, classes)``.
        teacher_logits: ``(N, classes)``.
        temperature: T > 0.

    Returns:
        A scalar, float32 or wider: 16-bit logits are converted to float32.

    Raises:
        ValueError: shapes that differ or are not ``(N, classes)``, an empty batch, or T not positive and finite.
        TypeError: logits that are not floating.

    Example:
        >>> distribution_loss(torch.tensor([[0.0, 0.0]]), torch.tensor([[9.0, 1.0]]))
        tensor(0.6931)
    """
    _check_floating("student_logits", student_logits)
    _check_floating("teacher_logits", teacher_logits)
    if student_logits.ndim != 2 or student_logits.numel() == 0:
        raise ValueError(
            f"student_logits has shape {tuple(student_logits.shape)}; it must be (N, classes), N at least 1"
        )
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(
            f"teacher_logits has shape {tuple(teacher_logits.shape)}; it must have the shape of student_logits, "
            f"{tuple(student_logits.shape)}"
        )
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature (={temperature}) must be positive and finite")
    dtype = _wide(student_logits)
    probabilities = F.softmax(teacher_logits.detach().to(dtype) / temperature, dim=1)
    return F.cross_entropy(student_logits.to(dtype) / temperature, probabilities)


def attention_matching_loss(
    student_features: Tensor | Sequence[Tensor],
    teacher_features: Tensor | Sequence[Tensor],
    form: Literal["norm", "mean_square"] = "norm",
) -> Tensor:
    r"""Distance between the places that student and teacher attend to, summed over pairs of feature maps.

    A feature map A ``(N, C, *spatial)`` has the attention map ``Q = Σ_c A_c²``, flattened to ``(N, positions)``;
    ``q = Q / ‖Q‖₂`` for each image, and ``q = 0`` where A is zero. The loss of a pair is

    - ``form="norm"``: ``‖q_student − q_teacher‖₂``, the mean over the batch. This is the formula of both papers:
      Zagoruyko and Komodakis (arXiv:1612.03928, eq. 2 with p = 2, there with a factor β/2) and Real-to-Binary
      (arXiv:2003.11535, section 4.2).
    - ``form="mean_square"``: ``(q_student − q_teacher)²``, the mean over batch and positions. This is what the code of
      Zagoruyko and Komodakis computes, with a factor of β = 1000.

    Both codes take the mean over channels for Q instead of the sum, which does not change q. Larq Zoo's Real-to-Binary
    divides Q by its maximum instead of ‖Q‖₂, and takes mean squares.

    The gradient is that of the formula. It is 0 for an image whose student map is zero and, with "norm", for one whose
    q are equal. The teacher receives none. The magnitude of a map has no effect, down to the smallest numbers.

    Args:
        student_features: ``(N, C, *spatial)``, or a list of them.
        teacher_features: the same number of maps, with the same batch and spatial size; the channels may differ.
        form: ``"norm"`` or ``"mean_square"``.

    Returns:
        A scalar, float32 or wider: 16-bit features are converted to float32.

    Raises:
        ValueError: no pair, numbers of features, batches or spatial sizes that differ, a map that is not
            ``(N, C, *spatial)`` or has no element, or an unknown form.
        TypeError: features that are not floating tensors.
    """
    if form not in ("norm", "mean_square"):
        raise ValueError(f"form (={form!r}) must be 'norm' or 'mean_square'")
    students = [student_features] if isinstance(student_features, Tensor) else list(student_features)
    teachers = [teacher_features] if isinstance(teacher_features, Tensor) else list(teacher_features)
    if not students or len(students) != len(teachers):
        raise ValueError(
            f"student_features ({len(students)}) and teacher_features ({len(teachers)}) must have the same length, "
            "at least 1"
        )
    losses: list[Tensor] = []
    for i, (student, teacher) in enumerate(zip(students, teachers, strict=True)):
        _check_features(f"student_features[{i}]", student)
        _check_features(f"teacher_features[{i}]", teacher)
        if (student.shape[0], *student.shape[2:]) != (teacher.shape[0], *teacher.shape[2:]):
            raise ValueError(
                f"teacher_features[{i}] has shape {tuple(teacher.shape)} and student_features[{i}] "
                f"{tuple(student.shape)}; all but the channels, dimension 1, must be equal"
            )
        difference = _attention(student, _wide(student)) - _attention(teacher.detach(), _wide(student))
        if form == "norm":
            losses.append(torch.linalg.vector_norm(difference, dim=1).mean())
        else:
            losses.append(difference.square().mean())
    return torch.stack(losses).sum()


def _attention(features: Tensor, dtype: torch.dtype) -> Tensor:
    """The normalized attention map, ``(N, positions)``."""
    features = features.to(dtype).flatten(2)
    # A multiple of the features gives the same result, so scale their largest value, as a constant, to 1: no square
    # then overflows or underflows.
    largest = features.detach().abs().amax(dim=(1, 2), keepdim=True)
    return F.normalize((features / largest.masked_fill(largest == 0, 1)).square().sum(1), dim=1)


class Features:
    """Records the outputs of named modules of a model, by forward hooks, inside a ``with`` block.

    After the block ``features["layer1"]`` is the output of the latest call of that module, and ``features.tensors()``
    lists all outputs in the order of ``names``. They keep the graph that they belong to; the next block discards them.
    `torch.utils.checkpoint` needs ``use_reentrant=False``: otherwise the outputs inside belong to no graph.

    Args:
        model: any module.
        names: names of modules, as in ``model.named_modules()``.

    Raises:
        ValueError: a name that does not exist (the message lists those that do), a repeated name, or no name.
        TypeError: ``names`` is a single text, or, in a forward pass, a module does not return a tensor.
        RuntimeError: reading the output of a module that was not called in the block, or that a later operation
            overwrote in place, as ``ReLU(inplace=True)`` and ``out += shortcut`` do; name the module after it.

    Example:
        >>> teacher = student = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        >>> images = torch.randn(2, 3, 8, 8)
        >>> teacher_features, student_features = Features(teacher, ["1"]), Features(student, ["1"])
        >>> with torch.no_grad(), teacher_features:
        ...     _ = teacher(images)
        >>> with student_features:
        ...     _ = student(images)
        >>> attention_matching_loss(student_features.tensors(), teacher_features.tensors()).item()
        0.0
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        if isinstance(names, str):
            raise TypeError(f"names (={names!r}) must be a sequence of names, such as [{names!r}]")
        modules = dict(model.named_modules(remove_duplicate=False))
        for name in names:
            if name not in modules:
                known = ", ".join(name for name in modules if name)
                raise ValueError(f"names: {name!r} is not a module of the model; there are {known}")
        if not names or len(set(names)) != len(names):
            raise ValueError(f"names (={list(names)}) must hold at least one name, and each once")
        self.modules = {name: modules[name] for name in names}
        self._outputs: dict[str, tuple[Tensor, int | None]] = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "Features":
        if self._handles:
            raise RuntimeError("Features is already recording: its block can't be entered twice at once")
        self._outputs.clear()
        self._handles = [module.register_forward_hook(self._hook(name)) for name, module in self.modules.items()]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.modules:
            raise KeyError(f"{name!r} is not recorded; there are {', '.join(self.modules)}")
        if name not in self._outputs:
            raise RuntimeError(
                f"module {name!r} was not called in the latest block of Features; a compiled model skips hooks that "
                "were added after its first call: record the model before torch.compile, or call it first in the block"
            )
        output, version = self._outputs[name]
        if version is not None and output._version != version:
            raise RuntimeError(
                f"the output of module {name!r} was overwritten in place after it was recorded; "
                "name the module that overwrites it, or make that one not inplace"
            )
        return output

    def tensors(self) -> list[Tensor]:
        """Return all recorded outputs, in the order of ``names``."""
        return [self[name] for name in self.modules]

    def _hook(self, name: str) -> Any:
        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            if not isinstance(output, Tensor):
                raise TypeError(f"module {name!r} must return a tensor to be recorded, not {type(output).__name__}")
            # tensors of torch.inference_mode count no versions
            self._outputs[name] = (output, None if output.is_inference() else output._version)

        return record


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _check_floating(name: str, value: Any) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} ({kind}) must be a floating tensor")


def _check_features(name: str, value: Any) -> None:
    _check_floating(name, value)
    if value.ndim < 3 or value.numel() == 0:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be (N, C, *spatial), and none of them 0")
