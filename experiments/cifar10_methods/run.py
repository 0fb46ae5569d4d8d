"""Trains every method of the study, one after another, and writes `results.csv`, `summary.csv` and `accuracy.png` here.

    uv run experiments/cifar10_methods/run.py /data/cifar10-jpeg [METHOD…] [--seeds 1 2 3] [--epochs 5]

A run that was interrupted goes on from its last checkpoint; one that is done is not run again.
"""

import argparse
import math
import statistics
import sys
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from scipy.stats import t as student_t

from qconv.ground.table import Column, lines, read_csv, write_csv
from qconv.runs.run_files import RESULT

sys.path.append(str(Path(__file__).parent.parent))
from trainings import (
    APOT_RULES,
    BFLOAT16,
    BINARY,
    EWGS_RULES,
    ROOT,
    bits,
    chosen,
    figures,
    train,
)  # beside the folders of the experiments

HERE = Path(__file__).parent
RUNS = ROOT / "outputs/cifar10_methods"
RESULTS, SUMMARY = HERE / "results.csv", HERE / "summary.csv"
EPOCHS = 5
CONFIDENCE = 0.95
# Name: bits of weights and inputs, overrides.
METHODS: dict[str, tuple[str, list[str]]] = {
    "float": ("32/32", []),
    "STE": ("1/1", [*BINARY, "scheme=bireal", "scheme.surrogate={_target_:qconv.quantizers.HardClip,_partial_:true}"]),
    "Bi-Real": ("1/1", [*BINARY, "scheme=bireal"]),
    "IR-Net": ("1/1", [*BINARY, "scheme=irnet", "scheme.t_min=0.001"]),
    "ReCU": ("1/1", [*BINARY, "scheme=recu"]),
    "ReSTE": ("1/1", [*BINARY, "scheme=reste"]),
    "FDA": ("1/1", [*BINARY, "scheme=fda"]),
    "BiPer": ("1/1", [*BINARY, "scheme=biper"]),
    "SiMaN": ("1/1", [*BINARY, "scheme=siman", "optimizer.rules={binary_weights:{weight_decay:0}}"]),
    "OvSW": ("1/1", [*BINARY, "scheme=bireal", "step_rules=[{_target_:qconv.optim.OvSW}]"]),
    "StoMPP": (
        "1/1",
        [
            *(*BINARY, "scheme=layerwise", "scheme.scheme._target_=qconv.schemes.bireal"),
            *("scheme.inputs=[0,0.3]", "scheme.weights=[0.3,0.6]", "scheme.ramp=0.2"),  # binary in the last of 5 epochs
        ],
    ),
    "XNOR, exact gradient": ("1/1", [*BINARY, "scheme=xnor"]),
    "BWN": ("1/32", ["scheme=bwn", "scheme.numel_gradient=true"]),
    "TWN": ("1.58/32", ["scheme=twn"]),
    "DeepShift-Q": ("5/32", ["scheme=shift_q"]),
    "LSQ 2/2": ("2/2", bits("lsq", 2)),
    "LSQ, dampened 2/2": ("2/2", [*bits("lsq", 2), "dampening=0.1"]),
    "LSQ, frozen 2/2": ("2/2", [*bits("lsq", 2), "step_rules=[{_target_:qconv.optim.Oscillations,freeze:[0.1,0.01]}]"]),
    "EWGS 2/2": ("2/2", [*bits("ewgs", 2), EWGS_RULES]),
    "SAWB+ 2/2": ("2/2", [*bits("sawb", 2), "scheme.alpha=8", "scheme.plus=true"]),
    "DoReFa 2/2": ("2/2", bits("dorefa", 2)),
    "LSQ 4/4": ("4/4", bits("lsq", 4)),
    "DoReFa 4/4": ("4/4", bits("dorefa", 4)),
    "APoT 4/4": ("4/4", [*bits("apot", 4), APOT_RULES]),
}


def folder(method: str, epochs: int | str, seed: int | str) -> Path:
    """Return where the files of a run are; "*" stands for any number."""
    name = method.replace("/", "-").replace(" ", "_").replace(",", "")
    return RUNS / f"{name}-{epochs}epochs-seed{seed}"


def rows() -> list[dict[str, Any]]:
    """Return a row for each run that is done; those of runs whose folders are elsewhere stay as they are.

    `float_gap` is the test accuracy of the float network with the same epochs and seed minus that of the method.
    """
    written = {
        (row["method"], row["epochs"], row["seed"]): row for row in read_csv(RESULTS) if row["method"] in METHODS
    }
    for method, (width, _) in METHODS.items():
        for place in RUNS.glob(folder(method, "*", "*").name):
            if not (place / RESULT).is_file():
                continue
            row = {"method": method, "bits": width, **figures(place)}
            epochs, seed = str(row["epochs"]), str(row["seed"])
            if place == folder(method, epochs, seed):  # and no copy, nor a run that was made longer
                written[method, epochs, seed] = row
    for (_, epochs, seed), row in written.items():
        reference = written.get(("float", epochs, seed))
        gap = None if reference is None else float(reference["test_accuracy"]) - float(row["test_accuracy"])
        row["float_gap"] = gap
    order = list(METHODS)
    return sorted(written.values(), key=lambda row: (int(row["epochs"]), order.index(row["method"]), int(row["seed"])))


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each method and number of epochs, the most accurate first: see `spread`.

    The gap to the float network is taken seed by seed, over the seeds that both have.
    """
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["bits"], int(row["epochs"])), []).append(row)
    result = [
        {
            "method": method,
            "bits": width,
            "epochs": epochs,
            "seeds": len(own),
            **spread("test_accuracy", [float(row["test_accuracy"]) for row in own]),
            **spread("float_gap", [float(row["float_gap"]) for row in own if row["float_gap"] not in (None, "")]),
        }
        for (method, width, epochs), own in groups.items()
    ]
    return sorted(result, key=lambda row: (row["epochs"], -row["test_accuracy"]))


def spread(name: str, values: list[float]) -> dict[str, float | None]:
    """Return the mean, the standard deviation, and bounds of the mean by Student's t at a confidence of 95 %.

    Bounds are given from three values on: of two they would lie 9 deviations from the mean.
    """
    count = len(values)
    mean = statistics.fmean(values) if values else None
    deviation = statistics.stdev(values) if count > 1 else None
    low = high = None
    if mean is not None and deviation is not None and count > 2:
        half = float(student_t.ppf(0.5 + CONFIDENCE / 2, count - 1)) * deviation / math.sqrt(count)
        low, high = mean - half, mean + half
    return {name: mean, f"{name}_deviation": deviation, f"{name}_low": low, f"{name}_high": high}


def draw(rows: list[dict[str, Any]]) -> None:
    """Write `accuracy.png`: each method's mean and its interval, the most accurate first; a panel for each budget."""
    budgets = sorted({row["epochs"] for row in rows})
    panels = {epochs: [row for row in reversed(rows) if row["epochs"] == epochs] for epochs in budgets}
    counts = [len(own) for own in panels.values()]
    figure = Figure(figsize=(7, 0.9 * len(panels) + 0.3 * sum(counts)), layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(len(panels), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": counts})[:, 0]
    for axes, (epochs, own) in zip(places, panels.items(), strict=True):
        for y, row in enumerate(own):
            mean, low, high = (row[f"test_accuracy{end}"] for end in ("", "_low", "_high"))
            color = "tab:orange" if row["bits"] == "1/1" else "tab:blue"
            if low is not None:
                axes.plot([100 * low, 100 * high], [y, y], color=color, linewidth=5, alpha=0.3, solid_capstyle="butt")
            axes.plot([100 * mean], [y], marker="o", color=color, markersize=5)
            place = (100 * (high or mean), y)
            axes.annotate(in_percent(row), place, xytext=(6, 0), textcoords="offset points", va="center")
        names = [f"{row['method'].removesuffix(row['bits']).strip()}  {row['bits']}" for row in own]
        axes.set_yticks(range(len(names)), names)
        axes.set(title=f"ResNet-20, {epochs} epochs; bits of weights/activations", ylim=(-0.6, len(names) - 0.4))
        axes.margins(x=0.2)
        axes.grid(axis="x", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    places[-1].set_xlabel(
        "test accuracy, %: mean over the seeds ± standard deviation\n"
        "orange: 1/1; bars: 95 % intervals of the mean, of 3 seeds or more"
    )
    figure.savefig(HERE / "accuracy.png", dpi=120)


def in_percent(row: dict[str, Any]) -> str:
    """Return the mean, and the deviation if there is one."""
    deviation = row["test_accuracy_deviation"]
    return f"{100 * row['test_accuracy']:.2f}" + ("" if deviation is None else f" ± {100 * deviation:.2f}")


def text(rows: list[dict[str, Any]]) -> str:
    """Return the table to print."""
    columns = [
        Column("method"),
        Column("bits"),
        *(Column(head, True) for head in ("epochs", "seeds")),
        Column("test, %"),
    ]
    cells = [(row["method"], row["bits"], str(row["epochs"]), str(row["seeds"]), in_percent(row)) for row in rows]
    return "\n".join(lines(cells, columns))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train the methods of the study one after another.")
    parser.add_argument("data", help="folder of the images, train/<class>/* and test/<class>/*")
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"some of: {', '.join(METHODS)}; all by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="1 by default")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"{EPOCHS} by default")
    options = parser.parse_intermixed_args()
    for seed in options.seeds:
        for method in chosen(parser, "METHOD", options.methods, METHODS):
            words = ["experiment=cifar10_methods", BFLOAT16, f"trainer.max_epochs={options.epochs}", f"seed={seed}"]
            train([*words, f"data.root='{options.data}'", *METHODS[method][1]], folder(method, options.epochs, seed))
            done = rows()
            means = summary(done)
            write_csv(done, RESULTS)
            write_csv(means, SUMMARY)
            draw(means)
            print(text(means), flush=True)
