"""Quantizes trained float networks without training them, and writes `results.csv` and `accuracy.png` here.

uv run experiments/after_training/run.py /data/cifar10-jpeg [NETWORK…]
"""

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor, nn

import qconv
from qconv import schemes
from qconv.data import ImageFolderDataModule
from qconv.ground.environment import commit, machine
from qconv.ground.table import read_csv, write_csv

HERE = Path(__file__).parent
RESULTS = HERE / "results.csv"
NETWORK = "resnet20-float-cifar10"
SAMPLES = 512
NEAREST, CORRECTED, LEARNED = "to nearest", "bias corrected", "learned"
COLOURS = {NEAREST: "#b8c4d8", CORRECTED: "#8fb59a", LEARNED: "#4c72b0"}
SCHEMES = {
    "W4A8": schemes.minmax(4, 8),
    "W4A4": schemes.minmax(4, 4),
    "W3A8": schemes.minmax(3, 8),
    "W2A8": schemes.minmax(2, 8),
}


def pictures(root: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return training images without augmentation, and all test images with their classes."""
    data = ImageFolderDataModule(root, augment=(), seed=1)
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    batches = list(data.test_dataloader())
    chosen: list[Tensor] = []
    for images, _ in data.train_dataloader():
        chosen.append(images)
        if sum(map(len, chosen)) >= SAMPLES:
            break
    return torch.cat(chosen)[:SAMPLES], torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of images that are classified correctly."""
    model.eval()
    right = [(model(x).argmax(1) == y).sum() for x, y in zip(images.split(500), labels.split(500), strict=True)]
    return float(torch.stack(right).sum()) / len(labels)


def run(root: str, source: str, iterations: int, of_commit: str | None) -> list[dict[str, Any]]:
    """Return a row for the float network, and three for each number of bits; without iterations none is learned."""
    few, images, labels = pictures(root)
    network = qconv.to_float(qconv.load(source)).eval()
    rows: list[dict[str, Any]] = [{"bits": "float", "rounding": "", "accuracy": accuracy(network, images, labels)}]
    for bits, scheme in SCHEMES.items():
        model = qconv.convert(copy.deepcopy(network), scheme)
        qconv.calibrate(model, [few])
        corrected = copy.deepcopy(model)
        start = time.perf_counter()
        print(qconv.correct_bias(corrected, network, few, max_samples=SAMPLES))
        seconds = {CORRECTED: time.perf_counter() - start}
        found = {NEAREST: model, CORRECTED: corrected}
        if iterations > 0:
            found[LEARNED] = copy.deepcopy(model)
            start = time.perf_counter()
            print(qconv.reconstruct(found[LEARNED], few, iterations=iterations))
            seconds[LEARNED] = time.perf_counter() - start
        for rounding, each in found.items():
            row = {"bits": bits, "rounding": rounding, "accuracy": accuracy(each, images, labels)}
            row["iterations"] = iterations if rounding == LEARNED else ""
            row["seconds"] = round(seconds[rounding], 1) if rounding in seconds else ""
            rows.append(row)
            print(row, flush=True)
    about = {**machine(), "torch": torch.__version__, "samples": SAMPLES, "commit": of_commit}
    name = Path(source).resolve().name  # that of the folder, if it is one
    return [{"network": name, "iterations": "", "seconds": "", **row, **about} for row in rows]


def merged(written: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows with those that were found in place of the ones before them, in the order of the figure."""
    rows = {(row["network"], row["bits"], row["rounding"]): row for row in [*written, *found]}
    orders = [list(dict.fromkeys(key[0] for key in rows)), ["float", *SCHEMES], ["", *COLOURS]]
    return [
        rows[key]
        for key in sorted(rows, key=lambda key: [order.index(e) for order, e in zip(orders, key, strict=True)])
    ]


def draw(rows: list[dict[str, Any]]) -> None:
    """Write `accuracy.png`: for each network bars for each number of bits, and the float one as a line."""
    networks = list(dict.fromkeys(row["network"] for row in rows))
    figure = Figure(figsize=(6, 3.2 * len(networks)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, network in zip(figure.subplots(len(networks), 1, squeeze=False)[:, 0], networks, strict=True):
        own = [row for row in rows if row["network"] == network]
        for place, (rounding, colour) in enumerate(COLOURS.items()):
            heights = {row["bits"]: 100 * float(row["accuracy"]) for row in own if row["rounding"] == rounding}
            places = [list(SCHEMES).index(bits) + 0.28 * place for bits in heights]
            bars = axes.bar(places, list(heights.values()), 0.26, label=rounding, color=colour)
            axes.bar_label(bars, fmt="%.1f", fontsize=8)
        top = 100 * float(own[0]["accuracy"])
        axes.axhline(top, color="#555555", linewidth=0.8, linestyle=":")
        end = (len(SCHEMES) - 0.4, top)
        axes.annotate(f"float {top:.1f}", end, xytext=(0, 10), textcoords="offset points", fontsize=8)
        axes.set_xticks([x + 0.28 for x in range(len(SCHEMES))], list(SCHEMES))
        axes.set(ylabel="test accuracy, %", ylim=(0, 98), xlim=(-0.4, len(SCHEMES) + 0.3))
        axes.set_title(network, fontsize=9, loc="right")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0)
    figure.savefig(HERE / "accuracy.png", dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Quantize trained networks without training them.")
    parser.add_argument("data", help="folder of the images, train/<class>/* and test/<class>/*")
    parser.add_argument(
        "networks",
        nargs="*",
        default=[NETWORK],
        metavar="NETWORK",
        help=f"float networks of the zoo, or folders of runs; {NETWORK} by default",
    )
    parser.add_argument("--iterations", type=int, default=2000, help="for each block; 2000 by default, 0: none")
    options = parser.parse_intermixed_args()
    if files := [source for source in options.networks if Path(source).is_file()]:
        parser.error(f"NETWORK (={files[0]!r}) must be a name of the zoo or the folder of a run")
    now = commit()  # before the files here are written
    for source in options.networks:
        found = run(options.data, source, options.iterations, now)
        rows = merged(read_csv(RESULTS), found)
        write_csv(rows, RESULTS)
        draw(rows)
