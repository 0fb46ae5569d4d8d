"""Measures on a GPU: the tests, memory and steps of networks, the largest batches, an epoch of the study.

    uv run experiments/gpu/run.sh [--minutes 10] [--out FOLDER]

Each piece runs in a process of its own with a share of the time: one that fails or takes too long costs no other one.
Rows are appended to CSV files as they come. Called again, the program does what is not done yet at this commit. On a
CPU (`--device cpu`) it only shows that every line runs: there the bytes that are kept stand for the peak.
"""

import argparse
import gc
import importlib.util
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
if importlib.util.find_spec("qconv") is None:  # not installed, so without its C kernels
    sys.path.insert(0, str(ROOT))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))

from qconv.environment import commit, machine, versions  # noqa: E402
from qconv.table import append_csv, read_csv  # noqa: E402

NETWORKS = "ImageNet ResNet-18, bnn", "Bi-Real-18, bireal"
KINDS = "float", "today", "lean"
STUDY = {"float": ("float", "false"), "today": ("Bi-Real", "false"), "lean": ("Bi-Real", "true")}
PIECES: dict[str, tuple[tuple[str, ...], int]] = {
    # name: arguments of its function, seconds at most
    "tests": ((), 150),
    **{f"steps, {network}": ((network, "eager", *KINDS), 60) for network in NETWORKS},
    **{f"epoch, {kind}": ((kind,), 80) for kind in STUDY},
    **{f"batches, {network}": ((network,), 60) for network in NETWORKS},
    **{
        f"steps, {network}, compiled, {kind}": ((network, "compiled", "float", kind), 100)
        for kind in ("lean", "today")
        for network in NETWORKS
    },
}


def parsed() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description="Measure on a GPU what the README lists.")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu to try the program out")
    parser.add_argument("--minutes", type=float, default=10, help="for everything; what is left is done next time")
    parser.add_argument("--slack", type=float, default=1, help="times the share of each piece: more on a CPU")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the CSV files and of log.txt")
    parser.add_argument("--size", type=int, default=224, help="of the images of the networks")
    parser.add_argument("--batch", type=int, default=64, help="images of a step")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps")
    parser.add_argument("--memory-gib", type=float, default=8, help="that the largest batches may take")
    parser.add_argument("--data", help="folder of the study's images; else some are made")
    parser.add_argument("--pictures", type=int, default=20000, help="that are made for the study")
    parser.add_argument("--tests", default="-m cuda tests", help="arguments of pytest")
    parser.add_argument("--pieces", nargs="+", default=list(PIECES), choices=PIECES, metavar="PIECE", help="some alone")
    parser.add_argument("--piece", choices=PIECES, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run the pieces that are not done, or in a process of its own one of them."""
    options = parsed()
    if options.piece:
        arguments, _ = PIECES[options.piece]
        FUNCTIONS[options.piece.partition(",")[0]](options, *arguments)
        return
    import torch

    if options.device != "cpu" and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} sees no GPU here; --device cpu tries the program out without one")
    options.out.mkdir(parents=True, exist_ok=True)
    end, now = time.monotonic() + 60 * options.minutes, commit()
    asked = {name: str(getattr(options, name)) for name in ("device", "size", "batch", "rounds", "memory_gib")}
    done = [
        row for row in read_csv(options.out / "pieces.csv") if row["status"] == "done" and row["commit"] == str(now)
    ]
    known = {row["piece"] for row in done if asked.items() <= row.items()}
    for piece in options.pieces:
        share = min(options.slack * PIECES[piece][1], end - time.monotonic())
        if piece in known or share < 5:
            print(f"{piece}: {'done before' if piece in known else 'no time left'}", flush=True)
            continue
        start = time.monotonic()
        status = in_time(piece, share, options.out / "log.txt")
        seconds = round(time.monotonic() - start, 1)
        row = {
            "piece": piece,
            "status": status,
            "seconds": seconds,
            **asked,
            "commit": now,
            "torch": versions()["torch"],
        }
        append_csv(row, options.out / "pieces.csv")
        print(f"{piece}: {status}, {seconds} s", flush=True)


def in_time(piece: str, seconds: float, log: Path) -> str:
    """Run a piece and all its processes for so long at most; return "done", or what went wrong."""
    with log.open("a") as file:
        file.write(f"\n=== {piece}\n")
        file.flush()
        command = [sys.executable, __file__, "--piece", piece, *sys.argv[1:]]
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, start_new_session=True)
        try:
            code = process.wait(seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return f"stopped after {seconds:.0f} s"
            raise
    return "done" if code == 0 else f"failed with {code}: log.txt says why"


def write(options: argparse.Namespace, name: str, row: dict[str, Any]) -> None:
    """Append a row, with where it was measured."""
    where = {"device": options.device, **machine(), "torch": versions()["torch"], "commit": commit()}
    append_csv({**row, **where}, options.out / f"{name}.csv")
    print(row, flush=True)


def tests(options: argparse.Namespace) -> None:
    """All tests that are marked for CUDA."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-p", "no:cacheprovider", f"--junitxml={report}", *shlex.split(options.tests)]
        start = time.monotonic()
        code = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, check=False).returncode
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    counts = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    write(options, "tests", {**counts, "seconds": round(time.monotonic() - start, 1)})
    sys.exit(code)


def networks() -> Any:
    """The networks of experiments/memory."""
    spec = importlib.util.spec_from_file_location("memory_run", ROOT / "experiments/memory/run.py")
    if spec is None or spec.loader is None:
        raise ImportError("experiments/memory/run.py is missing")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made(options: argparse.Namespace, network: str, kind: str, batch: int, compiled: bool = False) -> Any:
    """A network, its training step, and their settings: channels_last, and on a GPU bfloat16."""
    import torch

    from qconv.bench import train_step

    settings = train_step.Settings(
        *(batch, options.rounds, 3, options.device), autocast=options.device != "cpu", channels_last=True
    )
    build = partial(networks().build, network, kind)
    case = train_step.Case(network, 3, options.size, False, build)
    model: Any = build().to(options.device, memory_format=torch.channels_last)
    model = torch.compile(model, fullgraph=True) if compiled else model
    return model, train_step.training_step(case, model, settings), settings


def steps(options: argparse.Namespace, network: str, mode: str, *kinds: str) -> None:
    """Bytes that are kept, peaks, and times of steps in turn; ratios are to the first kind."""
    from qconv.bench import peak, train_step
    from qconv.bench.rows import quartiles

    is_eager = mode == "eager"
    sides = [made(options, network, kind, options.batch, not is_eager) for kind in kinds]
    kept = [train_step.saved_mib(step, model) if is_eager else None for model, step, _ in sides]
    times = train_step.interleaved([step for _, step, _ in sides], sides[0][2])
    for place, kind in enumerate(kinds):
        lower, middle, upper = quartiles([each[place] / each[0] for each in times])
        top = peak.on_gpu(sides[place][1], options.device) if options.device != "cpu" else kept[place]
        row = {
            "network": network,
            "kind": kind,
            "mode": mode,
            "size": options.size,
            "batch": options.batch,
            "rounds": options.rounds,
            "ms": round(1e3 * statistics.median(each[place] for each in times), 3),
            "ratio": round(middle, 4),
            "lower_quartile": round(lower, 4),
            "upper_quartile": round(upper, 4),
            "kept_mib": kept[place],
            "peak_mib": top,
        }
        write(options, "steps", row)


def batches(options: argparse.Namespace, network: str) -> None:
    """The largest batch of each kind whose step takes no more than the given memory, to a sixteenth."""
    for kind in KINDS:
        low, high = 0, options.batch
        while fits(options, network, kind, high):
            low, high = high, 2 * high
        while high - low > max(1, low // 16):
            middle = (low + high) // 2
            low, high = (middle, high) if fits(options, network, kind, middle) else (low, middle)
        row = {"network": network, "kind": kind, "size": options.size, "memory_gib": options.memory_gib, "batch": low}
        write(options, "batches", row)


def fits(options: argparse.Namespace, network: str, kind: str, batch: int) -> bool:
    """Whether two steps, the network and its optimizer take no more than the given memory."""
    import torch

    from qconv.bench import train_step

    if options.device == "cpu":
        model, step, _ = made(options, network, kind, batch)
        return train_step.saved_mib(step, model) <= 1024 * options.memory_gib
    gc.collect()  # of the last try
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(options.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, options.memory_gib * 2**30 / total), options.device)
    try:
        _, step, _ = made(options, network, kind, batch)
        step()
        step()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return False
    return True


def epoch(options: argparse.Namespace, kind: str) -> None:
    """One epoch of the study's ResNet-20: seconds and accuracy."""
    spec = importlib.util.spec_from_file_location("study_run", ROOT / "experiments/cifar10_methods/run.py")
    if spec is None or spec.loader is None:
        raise ImportError("experiments/cifar10_methods/run.py is missing")
    study: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(study)
    method, lean = STUDY[kind]
    with tempfile.TemporaryDirectory() as folder:
        data = options.data or some_pictures(Path(folder) / "pictures", options.pictures)
        words = [
            *("experiment=cifar10_methods", f"data.root='{data}'", f"run_dir='{folder}/run'", f"lean={lean}"),
            *("compile=false", "trainer.max_epochs=1", f"trainer={'cpu' if options.device == 'cpu' else 'gpu'}"),
            *(f"+data.cache='{folder}/cache'", *study.METHODS[method][1]),
        ]
        subprocess.run([sys.executable, str(ROOT / "train.py"), *words], cwd=ROOT, check=True)
        result = json.loads((Path(folder) / "run/result.json").read_text())
    about = {"method": method, "kind": kind, "data": options.data or f"{options.pictures} made images"}
    write(options, "epochs", {**about, "seconds": result["seconds"], "test_accuracy": result["test_accuracy"]})


def some_pictures(root: Path, count: int) -> Path:
    """Write random images of 10 classes, a tenth of them to test; return their folder."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    for index in range(count):
        folder = root / ("test" if index // 10 % 10 == 0 else "train") / str(index % 10)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / f"{index}.png")
    return root


FUNCTIONS = {"tests": tests, "steps": steps, "epoch": epoch, "batches": batches}

if __name__ == "__main__":
    main()
