"""Trains binary networks with every choice of `before_sign`, and writes `results.csv` beside this file.

    uv run experiments/before_sign/run.py digits
    uv run experiments/before_sign/run.py cifar10 --pictures /data/cifar10-jpeg

Rows that are there already are not run again. Options choose fewer networks, schemes and choices.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
import torchvision
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor, nn

import qconv
from qconv import models, schemes
from qconv.convert.replacements import CHOICES, BeforeSign
from qconv.ground.environment import commit, machine
from qconv.ground.table import append_csv, read_csv

RESULTS = Path(__file__).parent / "results.csv"
BATCH, SEED = 64, 1

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "torchvision resnet18": lambda: torchvision.models.resnet18(num_classes=10),
    "torchvision mobilenet_v2": lambda: torchvision.models.mobilenet_v2(num_classes=10),
    "torchvision mobilenet_v2, depthwise float": lambda: torchvision.models.mobilenet_v2(num_classes=10),
    "resnet20": lambda: models.resnet20(),
    "resnet20 per_conv": lambda: models.resnet20(shortcut="per_conv"),
}
SKIP: dict[str, tuple[str, ...]] = {
    "torchvision resnet18": (".*downsample.*",),
    "torchvision mobilenet_v2, depthwise float": (r"features\.1\.conv\.0\.0", r"features\.\d+\.conv\.1\.0"),
}
"""Layers that stay float, beside the first and the last one."""
SCHEMES: dict[str, Callable[[], qconv.Scheme]] = {
    "bnn": schemes.bnn,
    "xnor": schemes.xnor,
    "bireal": schemes.bireal,
    "irnet": schemes.irnet,
    "recu": schemes.recu,
    "reste": schemes.reste,
    "reactnet": schemes.reactnet,
    "adabin": schemes.adabin,
}


class Pictures(NamedTuple):
    """Images of 3×32×32 with their classes, for training, validation and test."""

    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def digits() -> Pictures:
    """scikit-learn's 1,797 digits, enlarged from 8×8 pixels: 1,197, 240 and 360 of them."""
    images, classes = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    x = torch.tensor(images[order], dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    x = F.interpolate(x, size=32, mode="bilinear").expand(-1, 3, -1, -1).contiguous()
    return split(x, torch.tensor(classes[order]), 1197, 240)


def cifar10(folder: Path, train: int = 400, val: int = 50, test: int = 100) -> Pictures:
    """The first images of each class of a folder of CIFAR-10: so many of each class."""

    def read(part: str, first: int, count: int) -> tuple[Tensor, Tensor]:
        x, classes = [], []
        for number, kind in enumerate(sorted(each for each in (folder / part).iterdir())):
            for path in sorted(kind.iterdir())[first : first + count]:
                x.append(np.asarray(Image.open(path).convert("RGB"), dtype=np.float32) / 64 - 2)
                classes.append(number)
        return torch.tensor(np.stack(x)).permute(0, 3, 1, 2).contiguous(), torch.tensor(classes)

    return Pictures(read("train", 0, train), read("train", train, val), read("test", 0, test))


def split(x: Tensor, classes: Tensor, train: int, val: int) -> Pictures:
    """The first ``train``, the next ``val``, and the rest."""
    sizes = [train, val, len(x) - train - val]
    return Pictures(*zip(x.split(sizes), classes.split(sizes), strict=True))


def batches(x: Tensor, classes: Tensor, flip: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch in a new order, mirrored at random if ``flip``; the rest of a batch is left out."""
    for index in torch.randperm(len(x)).split(BATCH):
        if len(index) == BATCH:
            chosen = x[index]
            if flip:
                chosen = torch.where(torch.rand(BATCH, 1, 1, 1) < 0.5, chosen.flip(3), chosen)
            yield chosen, classes[index]


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, classes: Tensor) -> float:
    """The share of images that are named rightly."""
    model.eval()
    right = sum(int((model(a).argmax(1) == b).sum()) for a, b in zip(x.split(200), classes.split(200), strict=True))
    return right / len(x)


def train(model: nn.Module, data: Pictures, epochs: int, flip: bool) -> tuple[list[float], float]:
    """Adam with a cosine; the validation accuracy of every epoch, and the last epoch's mean loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    qconv.after_every_step(optimizer, model)
    found, loss = [], 0.0
    for epoch in range(epochs):
        qconv.set_progress(model, epoch / epochs)
        model.train()
        losses = []
        for x, classes in batches(*data.train, flip):
            optimizer.zero_grad()
            each = F.cross_entropy(model(x), classes)
            each.backward()
            optimizer.step()
            losses.append(each.item())
        schedule.step()
        loss = sum(losses) / len(losses)
        found.append(accuracy(model, *data.val))
    return found, loss


def main() -> None:
    """What the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("data", choices=("digits", "cifar10"))
    parser.add_argument("--pictures", type=Path, help="the folder with train/ and test/")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=NETWORKS)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES), choices=SCHEMES)
    parser.add_argument("--choices", nargs="+", default=list(CHOICES), choices=CHOICES)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    data = digits() if options.data == "digits" else cifar10(options.pictures)
    done = {tuple(row.values())[:4] for row in read_csv(options.results)}
    for network in options.networks:
        for scheme in options.schemes:
            for choice in options.choices:
                if (options.data, network, scheme, choice) not in done:
                    row = measured(options.data, network, scheme, choice, data, options.epochs)
                    append_csv(row, options.results)
                    print(*list(row.values())[:9], flush=True)  # a program


def measured(
    kind: str, network: str, scheme: str, choice: BeforeSign, data: Pictures, epochs: int
) -> dict[str, object]:
    """One run's row."""
    torch.manual_seed(SEED)
    model = NETWORKS[network]()
    skip = SKIP.get(network, ())
    qconv.convert(model, SCHEMES[scheme](), skip=("first", "last", *skip), before_sign=choice)
    start = time.perf_counter()
    found, loss = train(model, data, epochs, flip=kind == "cifar10")
    seconds = time.perf_counter() - start
    about = machine()
    return {
        "data": kind,
        "network": network,
        "scheme": scheme,
        "before_sign": choice,
        "val_accuracy_best": round(max(found), 4),
        "val_accuracy_final": round(found[-1], 4),
        "test_accuracy_final": round(accuracy(model, *data.test), 4),
        "train_loss_final": round(loss, 4),
        "seconds": round(seconds, 1),
        "epochs": epochs,
        "train_pictures": len(data.train[0]),
        "seed": SEED,
        "commit": commit(),
        "cpu": about["cpu"],
        "threads": about["threads"],
        "torch": torch.__version__,
    }


if __name__ == "__main__":
    main()
