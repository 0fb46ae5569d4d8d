"""Trains every method of the study, one after another, and writes `results.csv` and `accuracy.png` beside this file.

    uv run experiments/cifar10_methods/run.py /data/cifar10-jpeg [METHOD…]

A run that was interrupted goes on from its last checkpoint; one that is done is not run again.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from qconv.run_files import RESULT
from qconv.table import read_csv, write_csv

sys.path.append(str(Path(__file__).parent.parent))
from trainings import APOT_RULES, BINARY, ROOT, bits, figures, train  # beside the folders of the experiments

HERE = Path(__file__).parent
RUNS = ROOT / "outputs/cifar10_methods"
RESULTS, STEP_TIMES = HERE / "results.csv", HERE / "step_times.csv"
SEED = 1
# Name: bits of weights and inputs, overrides.
METHODS: dict[str, tuple[str, list[str]]] = {
    "float": ("32/32", []),
    "XNOR, exact gradient": ("1/1", [*BINARY, "scheme=xnor"]),
    "STE": ("1/1", [*BINARY, "scheme=bireal", "scheme.surrogate={_target_:qconv.quantizers.HardClip,_partial_:true}"]),
    "LSQ 4/4": ("4/4", bits("lsq", 4)),
    "BWN": ("1/32", ["scheme=bwn", "scheme.numel_gradient=true"]),
    "IR-Net": ("1/1", [*BINARY, "scheme=irnet", "scheme.t_min=0.001"]),
    "DoReFa 4/4": ("4/4", bits("dorefa", 4)),
    "Bi-Real": ("1/1", [*BINARY, "scheme=bireal"]),
    "LSQ 2/2": ("2/2", bits("lsq", 2)),
    "TWN": ("1.58/32", ["scheme=twn"]),
    "ReCU": ("1/1", [*BINARY, "scheme=recu"]),
    "DeepShift-Q": ("5/32", ["scheme=shift_q"]),
    "ReSTE": ("1/1", [*BINARY, "scheme=reste"]),
    "DoReFa 2/2": ("2/2", bits("dorefa", 2)),
    "APoT 4/4": ("4/4", [*bits("apot", 4), APOT_RULES]),
}


def folder(method: str) -> Path:
    """Where the files of a method's run are."""
    return RUNS / f"{method.replace('/', '-').replace(' ', '_').replace(',', '')}-seed{SEED}"


def collect() -> list[dict[str, Any]]:
    """A row for each method that is done.

    `float_gap` is the float network's test accuracy minus the method's, `step_ratio` the time of a training step over
    that of the network with `nn.Conv2d`. The rows of runs whose folders are elsewhere stay as they are.
    """
    rows: list[dict[str, Any]] = []
    written = {row["method"]: row for row in read_csv(RESULTS)}
    ratios = {(row["case"], row["compiled"]): row["ratio"] for row in read_csv(STEP_TIMES)}
    for method, (width, _) in METHODS.items():
        if (folder(method) / RESULT).is_file():
            rows.append({"method": method, "bits": width, **figures(folder(method))})
        elif method in written:
            rows.append(written[method])
    reference = float(rows[0]["test_accuracy"]) if rows[0]["method"] == "float" else None
    for row in rows:
        row["float_gap"] = None if reference is None else reference - float(row["test_accuracy"])
        row["step_ratio"] = ratios.get((row["method"], "False"))
        row["step_ratio_compiled"] = ratios.get((row["method"], "True"))
    return rows


def draw(rows: list[dict[str, Any]]) -> None:
    """Write `accuracy.png`: a bar for each method, the most accurate first."""
    rows = sorted(rows, key=lambda row: float(row["test_accuracy"]))
    figure = Figure(figsize=(7, 0.6 + 0.32 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    names = [f"{row['method'].removesuffix(row['bits']).strip()}  {row['bits']}" for row in rows]
    bars = axes.barh(names, [100 * float(row["test_accuracy"]) for row in rows], color="tab:blue")
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.set(xlabel="test accuracy, %", title="ResNet-20, 15 epochs; bits of weights/activations")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(HERE / "accuracy.png", dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train the methods of the study one after another.")
    parser.add_argument("data", help="folder of the pictures, train/<class>/* and test/<class>/*")
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"some of: {', '.join(METHODS)}; all by default")
    options = parser.parse_args()
    unknown = [method for method in options.methods if method not in METHODS]
    if unknown:
        parser.error(f"METHOD (={unknown[0]!r}) must be one of {', '.join(METHODS)}")
    for method in options.methods or METHODS:
        words = ["experiment=cifar10_methods", f"data.root='{options.data}'", f"seed={SEED}", *METHODS[method][1]]
        train(words, folder(method))
        rows = collect()
        write_csv(rows, RESULTS)
        draw(rows)
