"""Trains binary networks in little time, with each way to shorten the training; and LSQ and BWN beside float.

    uv run experiments/fast_binary/run.py /data/cifar10-jpeg [VARIANT…]

Writes `results.csv` here. A run that was interrupted goes on from its last checkpoint; one that is done is not run
again.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qconv.ground.table import read_csv, write_csv
from qconv.runs.run_files import RESULT

sys.path.append(str(Path(__file__).parent.parent))
from trainings import (  # beside the folders of the experiments
    BFLOAT16_IF_NATIVE,
    BINARY,
    ROOT,
    bits,
    chosen,
    figures,
    train,
)

HERE = Path(__file__).parent
RUNS = ROOT / "outputs/fast_binary"
RESULTS = HERE / "results.csv"
EPOCHS = 15
"""Epochs of the plain recipe in a quarter of an hour on 2 cores, if a step takes 155 ms."""
PLAIN = [
    "experiment=cifar10_methods",
    *BINARY,
    "scheme=bireal",
    BFLOAT16_IF_NATIVE,
]
FLIP = "{_target_: qconv.data.RandomFlip}"
FLIPS = [f"data.augment=[{FLIP}]"]
REACT = ["scheme=reactnet", "model.activation._target_=qconv.models.RPReLU"]
JOINED = [*REACT, *FLIPS]
ADAM = ["optimizer=adam", "optimizer.lr=3e-3", "optimizer.weight_decay=0"]
LATER = ["scheme=two_stage", "scheme.start=0.5"]
LAYERWISE = ["scheme=layerwise", "scheme.scheme._target_=qconv.schemes.reactnet"]
FLOAT = "{_target_: qconv.models.resnet20, shortcut: normal, activation: {_target_: torch.nn.ReLU, _partial_: true}}"
DISTILLED = [
    "loss=distillation",
    f"loss.teacher={FLOAT}",
    "loss.weights=qconv/zoo/networks/resnet20-float-cifar10.safetensors",
]
HOUR = ["experiment=cifar10/fast_binary", "data=image_folder"]
VGG_SMALL = ["experiment=cifar10/fast_binary_vgg_small", "data=image_folder"]
HALF = ["experiment=cifar10_methods", BFLOAT16_IF_NATIVE]
SMALL = "data.progressive_size={_target_: qconv.data.ProgressiveSize, start: 0.5, grow_from: 0.3, full_from: 0.8}"


class Variant(NamedTuple):
    """A way to train.

    Attributes:
        words: overrides after those of the plain recipe.
        epochs: as many as take about a quarter of an hour, or half of one; None leaves them to the recipe.
        recipe: what comes before.
    """

    words: list[str]
    epochs: int | None = EPOCHS
    recipe: Sequence[str] = PLAIN


VARIANTS = {
    "plain": Variant([]),
    "flips alone": Variant(FLIPS),
    "ReActNet": Variant(REACT),
    "joined": Variant(JOINED),
    "Adam": Variant([*JOINED, *ADAM]),
    "weights later": Variant([*JOINED, *LATER]),
    "layerwise": Variant([*JOINED, *LAYERWISE]),
    "small images first": Variant([*JOINED, SMALL], 22),
    "batches of 64": Variant([*JOINED, "data.batch_size=64", "optimizer.lr=0.05"]),
    "batches of 256": Variant([*JOINED, "data.batch_size=256", "optimizer.lr=0.2"]),
    "label smoothing": Variant([*JOINED, "loss.label_smoothing=0.1"]),
    "linear": Variant([*JOINED, "scheduler=linear", "scheduler.warmup=0.1"]),
    "new norm statistics": Variant([*JOINED, "reestimate_bn=true"]),
    "distilled": Variant([*JOINED, *DISTILLED], 12),
    "moving average": Variant([*JOINED, "callbacks=ema"]),
    "no weight decay": Variant([*JOINED, "optimizer.weight_decay=0"]),
    "an hour": Variant(["scheme=reactnet"], None, HOUR),
    "an hour, layerwise": Variant([], None, HOUR),
    "an hour, layerwise, VGG-small": Variant([], None, VGG_SMALL),
    "float, half an hour": Variant([], 17, HALF),
    "LSQ 4/4, half an hour": Variant(bits("lsq", 4), 14, HALF),
    "BWN, half an hour": Variant(["scheme=bwn", "scheme.numel_gradient=true"], 17, HALF),
}
"""Two things are changed alone and then joined; the others change one thing more in the joined recipe. Adam comes
with a learning rate and a weight decay of its own; the teacher of "distilled" is the zoo's float network, whose
training is not counted; its forward in each step is why there are 12 epochs. "An hour" is the joined recipe for
longer, and then layer by layer, which is the recipe that came of it, on ResNet-20 and on VGG-small. What has half an
hour is not binary throughout: LSQ and BWN are to come close to the float network."""


def folder(name: str) -> Path:
    """Return where the files of a run are."""
    return RUNS / name.replace(" ", "_").replace(",", "").replace("/", "-").lower()


def rows() -> list[dict[str, Any]]:
    """Return a row for each run that is done; those of runs whose folders are elsewhere stay as they are."""
    written = {row["variant"]: row for row in read_csv(RESULTS)} if RESULTS.is_file() else {}
    done = [name for name in VARIANTS if (folder(name) / RESULT).is_file()]
    written |= {name: {"variant": name, **figures(folder(name))} for name in done}
    return [written[name] for name in VARIANTS if name in written]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a binary network in several ways, one after another.")
    parser.add_argument("data", help="folder of the images, train/<class>/* and test/<class>/*")
    parser.add_argument(
        "variants", nargs="*", metavar="VARIANT", help=f"some of: {', '.join(VARIANTS)}; all by default"
    )
    options = parser.parse_args()
    for name in chosen(parser, "VARIANT", options.variants, VARIANTS):
        variant = VARIANTS[name]
        epochs = [] if variant.epochs is None else [f"trainer.max_epochs={variant.epochs}"]
        train([*variant.recipe, *variant.words, *epochs, f"data.root='{options.data}'", "seed=1"], folder(name))
        write_csv(rows(), RESULTS)
