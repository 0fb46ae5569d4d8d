"""Trains the networks of `qconv.zoo`, one after another, and writes their packed files and cards into the package.

    uv run experiments/zoo/run.py /data/cifar10-jpeg [NAME…]

A run that was interrupted goes on from its last checkpoint; one that is done is not run again.
"""

import argparse
import hashlib
import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

from qconv import zoo
from qconv.ground.files import atomic_file
from qconv.images import DecodingError
from qconv.runs.run_files import PACKED
from qconv.zoo import NETWORKS, Card
from qconv.zoo.predict import Predictor

sys.path.append(str(Path(__file__).parent.parent))
from cifar10_recipes import run as cifar10_recipes  # beside this folder
from trainings import APOT_RULES, ROOT, bits, chosen, train

RUNS = ROOT / "outputs/zoo"
DIGITS = "scikit-learn's 1,797 digits of 8×8 pixels: 1,197 train, 240 validate, 360 test"
CIFAR = "CIFAR-10's 60,000 images re-encoded as JPEG (quality 75): 45,000 train, 5,000 validate, 10,000 test"
JPEG = "JPEG costs accuracy: compare the figures of one budget with each other, not with those of the papers."
SGD = "SGD, momentum 0.9 (Nesterov), learning rate 0.1 with a warmup and a cosine, weight decay 1e-4"
STEPS = "SGD, momentum 0.9, learning rate 0.1, a tenth of it after 100 and 150 epochs, weight decay 1e-4"
COSINE = "SGD, momentum 0.9, learning rate 0.1 with a cosine, weight decay 1e-4"
FINE_TUNED = "from the float network; SGD, momentum 0.9, learning rate 0.01 with a cosine, weight decay 1e-4"


class Recipe(NamedTuple):
    """How a network is trained.

    Attributes:
        title: the network, its method and its bits.
        bits: of weights and inputs.
        words: the command line behind ``qconv train``, without the folders of images and run.
        data: the images, and how they are split.
        optimizer: in words.
        notes: for the card.
        in_float32: how many test images the packed file has right, if the run was tested in bfloat16.
        published: its name in `experiments/cifar10_recipes`, if that trains it.
    """

    title: str
    bits: str
    words: list[str]
    data: str = CIFAR
    optimizer: str = SGD
    notes: str = JPEG
    in_float32: int | None = None
    published: str | None = None


def cifar(title: str, bits: str, *words: str) -> Recipe:
    """A ResNet-20 with the budget of `experiment=cifar10_methods`."""
    return Recipe(f"ResNet-20, {title}, CIFAR-10", bits, ["experiment=cifar10_methods", "seed=1", *words])


def published(name: str, optimizer: str, title: str | None = None, in_float32: int | None = None) -> Recipe:
    """A published recipe, to its end, which `experiments/cifar10_recipes` trains; `title` says more than its name."""
    precision = (
        "" if in_float32 is None else f" Tested in bfloat16; the stored file has {in_float32 / 100} % in float32."
    )
    return Recipe(
        f"ResNet-20, {title or name}, CIFAR-10",
        cifar10_recipes.RECIPES[name].bits,
        cifar10_recipes.words(name, 1),
        optimizer=optimizer,
        notes=f"{JPEG} experiments/cifar10_recipes tells of its run, and of a test of its last checkpoint.{precision}",
        in_float32=in_float32,
        published=name,
    )


RECIPES = {
    "smallcnn-bnn-digits": Recipe(
        "Small CNN, BNN, handwritten digits", "1/1", ["seed=1"], DIGITS, "Adam, learning rate with a cosine", ""
    ),
    "resnet20-float-cifar10": published("float", STEPS),
    "resnet20-lsq4-cifar10": published("LSQ", FINE_TUNED, in_float32=8724),
    "resnet20-apot4-cifar10": cifar("APoT", "4/4", *bits("apot", 4), APOT_RULES),
    "resnet20-bwn-cifar10": cifar("BWN", "1/32", "scheme=bwn", "scheme.numel_gradient=true", "compile=false"),
    "resnet20-shift-cifar10": cifar("DeepShift-Q", "5/32", "scheme=shift_q"),
    "resnet20-adabin-cifar10": published("AdaBin", COSINE, in_float32=8337,
                                         title="AdaBin and Maxout, a shortcut around each convolution"),
    "resnet20-reactnet-cifar10": Recipe(
        "ResNet-20, ReActNet's scheme and RPReLU, a shortcut around each convolution, CIFAR-10", "1/1",
        ["experiment=cifar10/fast_binary", "data=image_folder", "seed=1"],
        notes=f"{JPEG} Trained layer by layer, in float32 on a processor without bfloat16 instructions, in several "
        "parts and beside other work."),
}  # fmt: skip


def store(name: str, run: Path) -> Card:
    """Copy the packed file of a finished run into the package, and write its card beside it."""
    recipe, result = RECIPES[name], json.loads((run / "result.json").read_text())
    file = NETWORKS / f"{name}.safetensors"
    shutil.copyfile(run / PACKED, file)
    place = ["data.root=/data/cifar10-jpeg"] if recipe.data == CIFAR else []
    same = ("model", "scheme", "epochs", "seed", "seconds", "test_accuracy", "val_accuracy_best", "val_accuracy_final")
    card = Card(
        name=name,
        title=recipe.title,
        bits=recipe.bits,
        data=recipe.data,
        budget=f"{result['epochs']} epochs; {recipe.optimizer}",
        command=shlex.join(["qconv", "train", *recipe.words, *place]),
        float_bytes=result["float_bytes"],
        packed_bytes=file.stat().st_size,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        commit=result["commit"],
        versions=result["versions"],
        machine=result["machine"],
        notes=recipe.notes,
        **{key: result[key] for key in same},
    )
    with atomic_file(file.with_suffix(".json")) as written:
        written.write((card.model_dump_json(indent=2) + "\n").encode())
    return card


def check(name: str, data: Path) -> None:
    """Classify the test images by the stored file, and print the accuracy beside that of the card.

    Raises:
        SystemExit: they differ by more than rounding does. It decides a few: the compiled, the eager and the integer
            form of one network with 4 bits have 8,361, 8,362 and 8,363 of 10,000 right.
    """
    predictor, right, count = Predictor(zoo.file(name)), 0, 0
    for path, guesses in predictor.many(sorted((data / "test").glob("*/*.jpg")), top=1, batch_size=250):
        right += not isinstance(guesses, DecodingError) and guesses[0].label == Path(path).parent.name
        count += 1
    stated = zoo.card(name).test_accuracy
    print(f"{name}: {right} of {count} test images are right, {100 * stated:.2f} % on the card", flush=True)
    expected = RECIPES[name].in_float32 or stated * count
    if abs(right - expected) > count / 1000:
        raise SystemExit(f"{name}: the stored file is not the network of its card")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train the networks of the zoo one after another.")
    parser.add_argument("data", help="folder of the images, train/<class>/* and test/<class>/*")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(RECIPES)}; all by default")
    parser.add_argument(
        "--runs", type=Path, default=RUNS, help="where the folders of the runs are, but for those of cifar10_recipes"
    )
    parser.add_argument("--check", action="store_true", help="classify the test images by the stored files instead")
    options = parser.parse_intermixed_args()
    RUNS = options.runs.resolve()
    names = chosen(parser, "NAME", options.names, RECIPES)
    if options.check:
        for name in options.names or [name for name in zoo.names() if RECIPES[name].data == CIFAR]:
            check(name, Path(options.data))
        sys.exit()
    for name in names:
        recipe = RECIPES[name]
        if recipe.published is None:
            place = [f"data.root='{options.data}'"] if recipe.data == CIFAR else []
            train([*recipe.words, *place], RUNS / name)
            print(store(name, RUNS / name).markdown())
        else:
            cifar10_recipes.run(recipe.published, 1, options.data)
            print(store(name, cifar10_recipes.folder(recipe.published, 1)).markdown())
