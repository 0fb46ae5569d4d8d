"""One training step of a quantized layer or network, lean or not, against its float twin's."""

import copy
import os
import re
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..convert import convert
from ..ground.checks import check_at_least_one, check_not_negative
from ..ground.environment import commit, machine, versions
from ..ground.table import Column
from ..lean import lean as made_lean
from ..loop.optimizer_step import after_every_step
from ..models import resnet18, resnet20
from ..scheme import Scheme, identity
from .peak import Step, peak_mib
from .rows import Row, quartiles

Lean = Literal["exact", "fast"]
"""The gradients of a lean model (`qconv.lean`)."""

_NETWORKS = {"resnet18": resnet18, "resnet20": resnet20}


@dataclass(frozen=True)
class Settings:
    """The settings of both sides."""

    batch_size: int = 64
    rounds: int = 15
    warmup: int = 3
    device: str = "cpu"
    autocast: bool = False
    channels_last: bool = False
    compile: bool = False
    peak: bool = False

    def __post_init__(self) -> None:
        check_at_least_one(batch_size=self.batch_size, rounds=self.rounds)
        check_not_negative(warmup=self.warmup)
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device (={self.device}) is not available: torch finds no GPU")


@dataclass(frozen=True)
class Case:
    """A measured case: `build` makes the float model, which takes `channels` × `size` × `size`.

    A network has 10 classes and is quantized except for its first and last layer. A single layer is quantized itself.
    """

    name: str
    channels: int
    size: int
    is_layer: bool
    build: Callable[[], nn.Module]

    @classmethod
    def named(cls, name: str) -> "Case":
        """Parse ``CHANNELS@SIZE``, a 3×3 convolution, ``resnet18`` or ``resnet20``, the CIFAR networks."""
        if name in _NETWORKS:
            return cls(name, 3, 32, False, partial(_NETWORKS[name], in_channels=3, num_classes=10))
        match = re.fullmatch(r"(\d+)@(\d+)", name)
        if match is None:
            raise ValueError(f"case (={name}) must be CHANNELS@SIZE, such as 128@16, resnet18 or resnet20")
        channels, size = map(int, match.groups())
        if min(channels, size) < 1:
            raise ValueError(f"case (={name}) must have at least 1 channel and 1 pixel")
        return cls(name, channels, size, True, partial(nn.Conv2d, channels, channels, 3, padding=1, bias=False))

    def quantized(self, model: nn.Module, scheme: Scheme, lean: Lean | None = None) -> nn.Module:
        """A quantized copy; lean if asked for."""
        quantized = convert(copy.deepcopy(model), scheme, skip=() if self.is_layer else ("first", "last"))
        return quantized if lean is None else made_lean(quantized, exact=lean == "exact")


@dataclass(frozen=True)
class Result(Row):
    """One row of the table and of the CSV file; times in milliseconds, memory in MiB."""

    columns = (
        Column("case", width=10),
        Column("scheme", width=34),
        Column("lean", width=5),
        *(Column(f"{side} ms", is_right=True, width=9) for side in ("float", "quant")),
        Column("ratio", is_right=True, width=6),
        Column("[quartiles]", width=14),
        *(Column(head, is_right=True, width=9) for head in ("saved MiB", "quantized", "peak MiB", "quantized")),
    )

    case: str
    scheme: str
    lean: Lean | None
    dtype: str
    memory_format: str
    compiled: bool
    device: str
    batch_size: int
    rounds: int
    float_ms: float
    quantized_ms: float
    ratio: float
    ratio_lower_quartile: float
    ratio_upper_quartile: float
    float_saved_mib: float
    quantized_saved_mib: float
    float_peak_mib: float | None
    quantized_peak_mib: float | None

    def cells(self) -> tuple[str, ...]:
        times = self.float_ms, self.quantized_ms
        memory = self.float_saved_mib, self.quantized_saved_mib, self.float_peak_mib, self.quantized_peak_mib
        spread = f"[{self.ratio_lower_quartile:.3f}, {self.ratio_upper_quartile:.3f}]"
        names = self.case, self.scheme, self.lean or "-"
        return *names, *map(_tenths, times), f"{self.ratio:.3f}", spread, *map(_tenths, memory)

    def recorded(self) -> dict[str, Any]:
        here = machine()
        return {
            **asdict(self),
            "machine": str(here["cpu"] if self.device == "cpu" else here["gpu"]),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": versions()["torch"],
            "malloc": os.environ.get("GLIBC_TUNABLES", "default"),
            "commit": commit(),
        }


def measure(case: Case, scheme: Scheme, settings: Settings, lean: Lean | None = None) -> Result:
    """Check that the quantized side is right, then time both sides in turn.

    With ``settings.peak``, the peak memory of a step of each side is measured in separate processes
    (`qconv.bench.peak`): a model that has run leaves memory behind in which the next one runs.

    Raises:
        RuntimeError: the identity scheme does not give the float twin's output and gradients, or the exact lean model
            not those of the model that is not lean.
    """
    torch.manual_seed(0)
    reference = _placed(case.build(), settings)
    check(case, reference, settings)
    if lean == "exact":
        _equal(
            case, [case.quantized(reference, scheme, kind) for kind in (None, lean)], settings, "the exact lean model"
        )
    quantized = case.quantized(reference, scheme, lean)
    sides = [training_step(case, model, settings) for model in (reference, quantized)]
    saved = [saved_mib(step, model) for step, model in zip(sides, (reference, quantized), strict=True)]
    if settings.compile:
        compiled = [cast(nn.Module, torch.compile(model, fullgraph=True)) for model in (reference, quantized)]
        sides = [training_step(case, model, settings) for model in compiled]
    peaks = (_float_peak(case, settings), _peak(case, scheme, settings, lean)) if settings.peak else (None, None)
    times = interleaved(sides, settings)
    ratios = [ours / theirs for theirs, ours in times]
    lower, middle, upper = quartiles(ratios)
    return Result(
        case=case.name,
        scheme=scheme.name,
        lean=lean,
        dtype="bfloat16 autocast" if settings.autocast else "float32",
        memory_format="channels_last" if settings.channels_last else "contiguous",
        compiled=settings.compile,
        device=settings.device,
        batch_size=settings.batch_size,
        rounds=settings.rounds,
        float_ms=round(statistics.median(theirs for theirs, _ in times) * 1e3, 2),
        quantized_ms=round(statistics.median(ours for _, ours in times) * 1e3, 2),
        ratio=round(middle, 4),
        ratio_lower_quartile=round(lower, 4),
        ratio_upper_quartile=round(upper, 4),
        float_saved_mib=round(saved[0], 1),
        quantized_saved_mib=round(saved[1], 1),
        float_peak_mib=peaks[0],
        quantized_peak_mib=peaks[1],
    )


def check(case: Case, reference: nn.Module, settings: Settings) -> None:
    """Raise a RuntimeError unless the identity scheme gives the float twin's output and gradients exactly."""
    sides = [copy.deepcopy(reference), case.quantized(reference, identity())]
    _equal(case, sides, settings, "the identity scheme", "torch.nn")


def _equal(
    case: Case, models: list[nn.Module], settings: Settings, ours: str, theirs: str = "the model that is not lean"
) -> None:
    with torch.random.fork_rng(devices=[]):
        input = _pictures(case, settings)
        gradients = []
        for model in models:
            output = _forward(model, input, settings)
            output.float().square().mean().backward()
            gradients.append([output.detach(), *(parameter.grad for parameter in model.parameters())])
    for first, second in zip(*gradients, strict=True):
        if first is None or second is None or not torch.equal(first, second):
            raise RuntimeError(f"case {case.name}: {ours} differs from {theirs}; nothing was timed")


@cache
def _float_peak(case: Case, settings: Settings) -> float | None:
    """Return the MiB of the float side, equal for every scheme."""
    return _peak(case, None, settings, None)


def _peak(case: Case, scheme: Scheme | None, settings: Settings, lean: Lean | None) -> float | None:
    found = peak_mib(partial(_made_step, case, scheme, settings, lean), settings.device)
    return None if found is None else round(found, 1)


def _made_step(case: Case, scheme: Scheme | None, settings: Settings, lean: Lean | None) -> Step:
    """Return the step of a new model; of the float one if ``scheme`` is None."""
    model = _placed(case.build(), settings)
    if scheme is not None:
        model = case.quantized(model, scheme, lean)
    if settings.compile:
        model = cast(nn.Module, torch.compile(model, fullgraph=True))
    return training_step(case, model, settings)


def _tenths(number: float | None) -> str:
    return "-" if number is None else f"{number:.1f}"


def training_step(case: Case, model: nn.Module, settings: Settings) -> Step:
    """Return a layer's forward and backward, with the input's gradient; a network's step with cross-entropy and SGD."""
    input = _pictures(case, settings)
    if case.is_layer:
        input.requires_grad_()
        with torch.no_grad():
            grad_output = torch.randn_like(_forward(model, input, settings))

        def layer_step() -> None:
            model.zero_grad()
            input.grad = None
            _forward(model, input, settings).backward(grad_output)

        return layer_step

    labels = torch.randint(10, (settings.batch_size,), device=settings.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    after_every_step(optimizer, model)

    def network_step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(_forward(model, input, settings).float(), labels).backward()
        optimizer.step()

    return network_step


def interleaved(sides: list[Step], settings: Settings) -> list[tuple[float, ...]]:
    """Return the seconds of all sides in each round; every other round reverses the order."""
    times = []
    for turn in range(settings.warmup + settings.rounds):
        taken = [0.0] * len(sides)
        for side in range(len(sides)) if turn % 2 == 0 else reversed(range(len(sides))):
            taken[side] = _timed(sides[side], settings.device)
        if turn >= settings.warmup:
            times.append(tuple(taken))
    return times


def _timed(step: Step, device: str) -> float:
    synchronize = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    synchronize()
    start = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - start


def saved_mib(step: Step, model: nn.Module) -> float:
    """Return the MiB that autograd keeps for the backward: distinct storages, parameters excluded.

    A lean model saves tensors in the backward too, where it computes something again: these do not count.
    """
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    sizes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        is_forward = torch._C._current_graph_task_id() == -1  # pyright: ignore
        if is_forward and storage.data_ptr() not in parameters:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        step()
    return sum(sizes.values()) / 2**20


def _forward(model: nn.Module, input: Tensor, settings: Settings) -> Tensor:
    device = torch.device(settings.device).type
    with torch.autocast(device, torch.bfloat16) if settings.autocast else nullcontext():
        return model(input)


def _pictures(case: Case, settings: Settings) -> Tensor:
    pictures = torch.randn(settings.batch_size, case.channels, case.size, case.size, device=settings.device)
    return pictures.to(memory_format=torch.channels_last) if settings.channels_last else pictures


def _placed(model: nn.Module, settings: Settings) -> nn.Module:
    model = model.to(settings.device)
    return model.to(memory_format=torch.channels_last) if settings.channels_last else model
