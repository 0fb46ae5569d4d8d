"""Chooses bits for the layers of the zoo's float ResNet-20 in the bytes of 3 and of 4 bits everywhere: `bits.csv`.

uv run experiments/after_training/bits.py /data/cifar10-jpeg
"""

import argparse
import copy
import sys
from pathlib import Path
from typing import Any

import torch

import qconv
from qconv import schemes
from qconv.data import ImageFolderDataModule
from qconv.ground.environment import commit, machine
from qconv.ground.table import write_csv

sys.path.append(str(Path(__file__).parent))
from run import HERE, NETWORK, SAMPLES, accuracy  # the experiment beside this one

BITS = (2, 3, 4, 5, 6, 8)
LOOKED_AT = 128
"""The images, with their classes, by which bits are chosen."""


def run(root: str) -> list[dict[str, Any]]:
    """Return a row for each way to choose bits, with the accuracy after rounding to nearest."""
    data = ImageFolderDataModule(root, augment=(), seed=1)
    data.prepare_data()
    data.setup("fit")
    data.setup("test")
    test = list(data.test_dataloader())
    images, labels = torch.cat([x for x, _ in test]), torch.cat([y for _, y in test])
    few = [batch for batch, _ in zip(data.train_dataloader(), range(-(-SAMPLES // 128)), strict=False)]
    ranges = torch.cat([x for x, _ in few])[:SAMPLES]
    x, y = (torch.cat(parts)[:LOOKED_AT] for parts in zip(*few, strict=True))
    network = qconv.to_float(qconv.load(NETWORK)).eval()

    def row(way: str, budget: int | str, **options: Any) -> dict[str, Any]:
        model = qconv.convert(copy.deepcopy(network), **options)
        qconv.calibrate(model, [ranges])
        size = qconv.summarize(model, (3, 32, 32)).packed_bytes
        return {"bits": way, "max_bytes": budget, "bytes": size, "accuracy": accuracy(model, images, labels)}

    rows = []
    for bits in (3, 4):
        rows.append(row(f"{bits} everywhere", "", scheme=schemes.minmax(bits, 8)))
        most = rows[-1]["bytes"]
        for measure in ("hessian", "measured"):
            choices = [schemes.minmax(each, 8) for each in BITS]
            found = qconv.assign_bits(network, x, y, choices=choices, max_bytes=most, measure=measure, probes=8)
            rows.append(row(measure, most, scheme=choices[-1], overrides=found.overrides))
        print(rows[-3:], flush=True)
    return [{"network": NETWORK, **each, **machine(), "torch": torch.__version__, "commit": commit()} for each in rows]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Choose bits by sensitivity, and quantize without training.")
    parser.add_argument("data", help="folder of the images, train/<class>/* and test/<class>/*")
    write_csv(run(parser.parse_args().data), HERE / "bits.csv")
