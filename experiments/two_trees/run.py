"""Times training steps and frozen models of two checkouts against each other: writes `results.csv`.

    uv run experiments/two_trees/run.py BEFORE AFTER

Both are folders with an environment of their own (`uv sync` in each). One process runs in each; they take turns, one
turn at a time, in an order that changes, so that what else the machine does falls on both. A ratio is the median over
the rounds of the two times of a round.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROUNDS = 15
SECONDS = 0.08  # of a turn, in which short calls are repeated
FROZEN = ("bnn", "xnor", "reactnet", "lsq", "minmax", "dorefa", "apot", "shift_q", "pact", "adabin", "fp8")


def serve() -> None:
    """The worker: reads ``[kind, scheme]`` a line, makes it once, runs it for a turn, writes seconds a call."""
    import torch
    from torch import nn

    import qconv
    from qconv import models

    torch.set_num_threads(2)
    known: dict[tuple[str, str], Any] = {}

    def made(kind: str, name: str) -> Any:
        torch.manual_seed(0)
        model = qconv.convert(models.resnet20(num_classes=10), getattr(qconv.schemes, name)())
        images, labels = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
        qconv.set_progress(model, 0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
        qconv.after_every_step(optimizer, model)

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()

        if kind == "step":
            return step
        step()
        qconv.set_progress(model, 1.0)
        frozen, batch = qconv.freeze(model.eval()), images[: int(kind.removeprefix("frozen "))]

        def run() -> None:
            with torch.inference_mode():
                frozen(batch)

        return run

    for line in sys.stdin:
        key = tuple(json.loads(line))
        if key not in known:
            known.clear()
            run = made(*key)
            for _ in range(3):
                run()
            start = time.perf_counter()
            run()
            known[key] = run, max(1, round(SECONDS / (time.perf_counter() - start)))
        run, count = known[key]
        start = time.perf_counter()
        for _ in range(count):
            run()
        sys.stdout.write(f"{(time.perf_counter() - start) / count}\n")
        sys.stdout.flush()


def schemes(folder: Path) -> list[str]:
    """The schemes of a checkout that need no arguments."""
    words = folder / ".venv/bin/python", "-c", "import qconv; print(*qconv.schemes.__all__)"
    names = subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True).stdout.split()
    return [name for name in names if name not in ("Scheme", "staged", "two_stage", "layerwise")]


def commit(folder: Path) -> str:
    """The commit of a checkout."""
    words = "git", "rev-parse", "--short", "HEAD"
    return subprocess.run(words, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def main(before: Path, after: Path, rounds: int, only: list[str]) -> None:
    """Compare, and write a row for each scheme and kind."""
    workers = [
        subprocess.Popen(
            [folder / ".venv/bin/python", "-W", "ignore", __file__, "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
        )
        for folder in (before, after)
    ]

    def timed(worker: Any, key: list[str]) -> float:
        worker.stdin.write(json.dumps(key) + "\n")
        worker.stdin.flush()
        return float(worker.stdout.readline())

    from qconv.ground.environment import machine, versions
    from qconv.ground.table import append_csv

    plain = [name for name in schemes(after) if name in schemes(before)]
    rows = [["step", name] for name in plain] + [[f"frozen {n}", name] for name in FROZEN for n in (1, 16)]
    results = HERE / "results.csv"
    results.unlink(missing_ok=True)
    for key in rows:
        if only and key[1] not in only:
            continue
        for worker in workers:
            timed(worker, key)
        times: list[tuple[float, float]] = []
        for turn in range(rounds):
            order = (0, 1) if turn % 2 else (1, 0)
            seconds = {side: timed(workers[side], key) for side in order}
            times.append((seconds[0], seconds[1]))
        ratio = statistics.median(late / early for early, late in times)
        early, late = (1e3 * statistics.median(side) for side in zip(*times, strict=True))
        figures = dict(ms_before=f"{early:.3f}", ms_after=f"{late:.3f}", ratio=f"{ratio:.3f}", rounds=rounds)
        about = dict(threads=2, seed=0, before=commit(before), after=commit(after), cpu=machine()["cpu"])
        row = dict(kind=key[0], scheme=key[1]) | figures | about | dict(torch=versions()["torch"])
        append_csv(row, results)
        print(f"{key[0]:10} {key[1]:12} {early:9.2f} {late:9.2f} ms  {ratio:.3f}", flush=True)
    for worker in workers:
        worker.stdin.close()  # pyright: ignore[reportOptionalMemberAccess]


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
        parser.add_argument("before", type=Path)
        parser.add_argument("after", type=Path)
        parser.add_argument("--rounds", type=int, default=ROUNDS)
        parser.add_argument("--only", nargs="*", default=[], help="schemes")
        options = parser.parse_args()
        main(options.before.resolve(), options.after.resolve(), options.rounds, options.only)
