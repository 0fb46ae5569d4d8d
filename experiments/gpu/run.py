"""Measures training steps on a GPU: float, quantized and lean networks; eager, compiled, CUDA graphs.

    uv run experiments/gpu/run.py [--minutes 8] [--out FOLDER]

Rows are appended to steps.csv as they come. Each group of rows is measured in a process of its own, float and the
others in turn. `--warm` only compiles: the groups then take what is in torch's cache. `--device cpu` shows that every
line runs.
"""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import ProfilerActivity, profile

import qconv
from qconv import models, schemes
from qconv.bench.peak import on_gpu
from qconv.bench.rows import quartiles
from qconv.ground.environment import commit, machine, versions
from qconv.ground.table import append_csv

HERE = Path(__file__).parent
STEPS = 5  # between two looks at the clock: in a training nothing waits after each


def resnet18(scheme: str) -> nn.Module:
    """torchvision's, with `Hardtanh` in front of signs."""
    return models.torchvision_resnet()


def birealnet18(scheme: str) -> nn.Module:
    """Without activations where signs follow."""
    return models.birealnet18(3, 1000, activation=nn.ReLU if scheme == "float" else nn.Identity)


def reactnet18(scheme: str) -> nn.Module:
    """The same network in float."""
    return models.reactnet18(3, 1000, activation=models.RPReLU)


SCHEMES: dict[str, Callable[[], qconv.Scheme]] = {
    "bnn": schemes.bnn,
    "bireal": schemes.bireal,
    "reactnet": schemes.reactnet,
    "lsq 4/4": partial(schemes.lsq, 4, 4),
    "dorefa": schemes.dorefa,
    "minmax 8/8": partial(schemes.minmax, 8, 8),
    "shift_q": schemes.shift_q,
}


class Group(NamedTuple):
    """Networks that are measured in turn; names of schemes, with `lean` in front for lean training."""

    build: Callable[[str], nn.Module]
    mode: str
    batch: int
    sides: tuple[str, ...]


RESNET = resnet18, ("float", "bnn", "lean bnn", "lsq 4/4", "lean lsq 4/4", "dorefa", "minmax 8/8", "shift_q")
BIREAL = birealnet18, ("float", "bireal", "lean bireal")
REACT = reactnet18, ("float", "reactnet", "lean reactnet")
FEW = resnet18, ("float", "bnn", "lean bnn", "lsq 4/4")
GROUPS = [
    *(Group(build, "eager", batch, sides) for batch in (64, 256) for build, sides in (RESNET, BIREAL, REACT)),
    *(Group(build, mode, 64, sides) for mode in ("default", "reduce-overhead") for build, sides in (FEW, BIREAL)),
]


def made(options: argparse.Namespace, group: Group, side: str) -> tuple[nn.Module, Callable[[], None]]:
    """A network and its training step: cross-entropy, SGD, channels_last, on a GPU bfloat16."""
    torch.manual_seed(0)
    is_lean, scheme = side.startswith("lean "), side.removeprefix("lean ")
    model = group.build(scheme)
    if scheme != "float":
        model = qconv.lean(qconv.convert(model, SCHEMES[scheme]()), is_lean)
    model = model.to(options.device, memory_format=torch.channels_last)
    called: Any = model
    images = torch.randn(group.batch, 3, options.size, options.size, device=options.device)
    images = images.to(memory_format=torch.channels_last)
    if group.mode != "eager":
        qconv.calibrate(model, [images])
        called = torch.compile(model, fullgraph=True, mode=group.mode, dynamic=False)
    labels = torch.randint(1000, (group.batch,), device=options.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    if scheme != "float":
        qconv.after_every_step(optimizer, model)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad()
        with torch.autocast(options.device, torch.bfloat16, enabled=options.device != "cpu"):
            output = called(images)
        F.cross_entropy(output.float(), labels).backward()
        optimizer.step()

    return model, step


def wait(options: argparse.Namespace) -> None:
    """Until the device has done what it was given."""
    if options.device != "cpu":
        torch.cuda.synchronize()


def seconds(options: argparse.Namespace, step: Callable[[], None]) -> float:
    """Of one of several steps."""
    wait(options)
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    wait(options)
    return (time.perf_counter() - start) / STEPS


def measure(options: argparse.Namespace, group: Group) -> None:
    """Write a row for each side; ratios are to float in the same round."""
    pairs = [made(options, group, side) for side in options.sides or group.sides]
    for _, step in pairs:
        for _ in range(4):
            step()
    if options.warm:
        return
    steps = [step for _, step in pairs]
    times = [[seconds(options, step) for step in steps] for _ in range(options.rounds)]
    for place, side in enumerate(group.sides):
        lower, middle, upper = quartiles([each[place] / each[0] for each in times])
        kernels, busy = launches(options, steps[place]) if options.device != "cpu" else (None, None)
        row = {
            "network": group.build.__name__,
            "scheme": side,
            "mode": group.mode,
            "batch": group.batch,
            "size": options.size,
            "ms": round(1e3 * statistics.median(each[place] for each in times), 3),
            "ratio": round(middle, 3),
            "quartiles": f"{lower:.3f} {upper:.3f}",
            "launches": kernels,
            "busy_ms": busy,
            "peak_mib": round(on_gpu(steps[place], options.device)) if options.device != "cpu" else None,
            **machine(),
            "torch": versions()["torch"],
            "commit": options.commit or commit(),
        }
        append_csv(row, options.out / "steps.csv")
        print({name: row[name] for name in (*list(row)[:6], "ratio", "launches", "busy_ms", "peak_mib")}, flush=True)


def launches(options: argparse.Namespace, step: Callable[[], None]) -> tuple[int, float]:
    """The kernels of a step, and the milliseconds that the GPU worked for them."""
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        step()
        wait(options)
    events = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    events = [event for event in events if not event.name.startswith("Optimizer.")]  # the range of a step
    return len(events), round(sum(event.device_time for event in events) / 1e3, 3)


def main() -> None:
    """Measure all groups within the time, or one of them."""
    parser = argparse.ArgumentParser(description="Measure training steps on a GPU.")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the program out")
    parser.add_argument("--minutes", type=float, default=8, help="for everything")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of steps.csv")
    parser.add_argument("--size", type=int, default=224, help="of the images")
    parser.add_argument("--batch", type=int, help="images of a step, for all groups")
    parser.add_argument("--rounds", type=int, default=7, help=f"of {STEPS} steps")
    parser.add_argument("--commit", help="where there is no repository")
    parser.add_argument("--groups", type=int, nargs="+", default=[*range(len(GROUPS))], help="some alone")
    parser.add_argument("--sides", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--warm", action="store_true", help="compile all sides side by side, and measure nothing")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.device != "cpu" and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no GPU here; --device cpu tries the program out without one")
    if options.alone:
        group = GROUPS[options.groups[0]]
        measure(options, group._replace(batch=options.batch or group.batch))
        return
    end = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    alone = [sys.executable, __file__, *sys.argv[1:], "--alone", "--groups"]
    if options.warm:
        compiled = [index for index in options.groups if GROUPS[index].mode != "eager"]
        calls = [[*alone, str(index), "--sides", side] for index in compiled for side in GROUPS[index].sides]
        for process in [subprocess.Popen(call) for call in calls]:
            process.wait(end - time.monotonic())
        return
    for index in options.groups:
        if (left := end - time.monotonic()) < 5:
            print(f"group {index}: no time left", flush=True)
            continue
        try:
            subprocess.run([*alone, str(index)], timeout=left, check=False)
        except subprocess.TimeoutExpired:
            print(f"group {index}: stopped after {left:.0f} s", flush=True)


if __name__ == "__main__":
    main()
