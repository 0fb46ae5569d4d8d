"""Trains recipes of `configs/experiment/cifar10` to their end, and writes `results.csv` and `curves.png` here.

    uv run experiments/cifar10_recipes/run.py /data/cifar10-jpeg [RECIPE…]

A run that was interrupted goes on from its last checkpoint; one that is done is not run again.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from qconv.ground.table import read_csv, write_csv
from qconv.runs.run_files import BEST, EVALUATION, LAST, METRICS

sys.path.append(str(Path(__file__).parent.parent))
from trainings import BFLOAT16_IF_NATIVE, ROOT, call, chosen, figures, train  # beside the folders of the experiments

HERE = Path(__file__).parent
RUNS = ROOT / "outputs/cifar10_recipes"
RESULTS, CURVES = HERE / "results.csv", HERE / "curves"
FASTER = ["channels_last=true", "compile=reduce-overhead", BFLOAT16_IF_NATIVE]


class Recipe(NamedTuple):
    """A published recipe.

    Attributes:
        experiment: the config of `configs/experiment/cifar10`.
        bits: of weights and inputs.
        published: the authors' test accuracy on CIFAR-10, and that of their float network.
        starts_from: the recipe whose best network it starts from.
        words: other overrides.
        beside: the recipe of the float network to which the gap is taken.
    """

    experiment: str
    bits: str
    published: tuple[float, float]
    starts_from: str | None = None
    words: tuple[str, ...] = ()
    beside: str = "float"


RECIPES = {
    "float": Recipe("float_resnet20", "32/32", (0.9173, 0.9173)),
    # Without the batch norm that the authors have before the last layer, and from the start that torch draws.
    "AdaBin-no-norm": Recipe(
        "adabin_resnet20", "1/1", (0.881, 0.9173), words=("model.norm_before_fc=false", "weight_init=default")
    ),
    "AdaBin": Recipe("adabin_resnet20", "1/1", (0.881, 0.9173)),
    # The authors of LSQ have no network for CIFAR-10: the gap is that of APoT with 4 bits.
    "LSQ": Recipe("lsq_resnet20_w4a4", "4/4", (0.9245, 0.9296), "float"),
    "SiMaN": Recipe("siman_resnet20", "1/1", (0.874, 0.917)),
    "PACT": Recipe("pact_resnet20_w4a4", "4/4", (0.913, 0.916)),
    "DoReFa": Recipe("dorefa_resnet20_w1a32", "1/32", (0.9054, 0.9213)),
    "TTQ": Recipe("ttq_resnet20", "1.58/32", (0.9113, 0.9177), "float"),
    "DeepShift-Q": Recipe("shift_q_resnet20", "5/32", (0.8985, 0.9179)),
    "float-VGG": Recipe("float_vgg_small", "32/32", (0.9334, 0.9334), beside="float-VGG"),
    # The authors have no float network: the figures are those of the TWN paper, for BWN on VGG-7.
    "BWN": Recipe("bwn_vgg_small", "1/32", (0.9018, 0.9288), beside="float-VGG"),
}


def folder(name: str, seed: int) -> Path:
    """Return where the files of a run are."""
    return RUNS / f"{name.lower()}-seed{seed}"


def words(name: str, seed: int) -> list[str]:
    """Return what stands behind ``qconv train`` in the project's root, but for the folders of images and run."""
    recipe = RECIPES[name]
    chosen = [f"experiment=cifar10/{recipe.experiment}", "data=image_folder", f"seed={seed}", *FASTER, *recipe.words]
    if recipe.starts_from is not None:
        file = folder(recipe.starts_from, seed) / BEST
        if seed == 1 and not file.is_file():  # its folder is elsewhere: the zoo has its network
            file = ROOT / f"qconv/zoo/networks/resnet20-{recipe.starts_from}-cifar10.safetensors"
        chosen.append(f"init_from={file.relative_to(ROOT)}")
    return chosen


def run(name: str, seed: int, data: str) -> None:
    """Train a recipe to its end, and evaluate its last checkpoint, too."""
    place = folder(name, seed)
    train([*words(name, seed), f"data.root='{data}'"], place)
    if not is_evaluated(place):
        call(["evaluate", str(place), "--last"])


def is_evaluated(place: Path) -> bool:
    """Return whether the evaluation of a run is that of its last checkpoint; that of the best one has the same name."""
    file = place / EVALUATION
    return file.is_file() and Path(json.loads(file.read_text())["checkpoint"]).name == LAST.name


def rows() -> list[dict[str, Any]]:
    """Return a row for each run that is done; those of runs whose folders are elsewhere stay as they are.

    A gap is the accuracy of the float network minus that of the recipe: ours with the same seed, and the authors'.
    """
    written = {(row["recipe"], int(row["seed"])): row for row in read_csv(RESULTS)} if RESULTS.is_file() else {}
    for name, recipe in RECIPES.items():
        for place in sorted(RUNS.glob(f"{name.lower()}-seed*")):
            if not is_evaluated(place):
                continue
            row = {"recipe": name, "bits": recipe.bits, **figures(place)}
            row["test_accuracy_final"] = json.loads((place / EVALUATION).read_text())["test_accuracy"]
            written[name, row["seed"]] = row
            CURVES.mkdir(exist_ok=True)
            write_csv(read_csv(place / METRICS), CURVES / f"{place.name}.csv")
    for (name, seed), row in written.items():
        ours = written.get((RECIPES[name].beside, seed))
        published, published_float = RECIPES[name].published
        row["gap"] = None if ours is None else float(ours["test_accuracy"]) - float(row["test_accuracy"])
        row["published_gap"] = published_float - published
    order = list(RECIPES)
    return sorted(written.values(), key=lambda row: (order.index(row["recipe"]), int(row["seed"])))


def draw() -> None:
    """Write `curves.png`: validation accuracy over the epochs, all runs."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for path in sorted(CURVES.glob("*.csv")):
        epochs = read_csv(path)
        axes.plot(
            [int(row["epoch"]) + 1 for row in epochs],
            [100 * float(row["val_accuracy"]) for row in epochs],
            label=path.stem,
            linewidth=1,
        )
    axes.set(xlabel="epoch", ylabel="validation accuracy, %", title="ResNet-20, published recipes")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right")
    figure.savefig(HERE / "curves.png", dpi=120)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train published recipes to their end, one after another.")
    parser.add_argument("data", help="folder of the images, train/<class>/* and test/<class>/*")
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"some of: {', '.join(RECIPES)}; all by default")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], help="1 by default")
    options = parser.parse_intermixed_args()
    for seed in options.seeds:
        for name in chosen(parser, "RECIPE", options.recipes, RECIPES):
            run(name, seed, options.data)
            write_csv(rows(), RESULTS)
            draw()
