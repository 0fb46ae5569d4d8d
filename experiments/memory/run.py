"""Measures what training keeps for the backward, and the peak memory of a step: writes the CSV files and the figure.

    uv run experiments/memory/run.py

Saved bytes are the distinct storages that saved-tensor hooks see, without parameters, each counted for the layer that
saved it first. A peak is that of one step (forward, cross-entropy, backward, SGD) above what the process holds before
it, after two steps of a batch of 2; each is measured in a process of its own.
"""

import argparse
import csv
import ctypes
import gc
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import qconv
from qconv import models, schemes
from qconv.ground.environment import commit, machine, versions

HERE = Path(__file__).parent
NETWORKS: dict[str, tuple[Any, Any, int]] = {
    # network with its float activation, the same with that of the binary one and its scheme, size of an image
    "ResNet-18, bnn": (
        lambda kind: models.resnet18(3, 10, activation=nn.ReLU if kind == "float" else nn.Hardtanh),
        schemes.bnn,
        32,
    ),
    "Bi-Real ResNet-18, bireal": (
        lambda kind: models.resnet18(
            3, 10, activation=nn.ReLU if kind == "float" else nn.Identity, shortcut="per_conv"
        ),
        schemes.bireal,
        32,
    ),
    "ImageNet ResNet-18, bnn": (
        lambda kind: models.torchvision_resnet(),
        schemes.bnn,
        224,
    ),
    "Bi-Real-18, bireal": (
        lambda kind: models.birealnet18(3, 1000, activation=nn.ReLU if kind == "float" else nn.Identity),
        schemes.bireal,
        224,
    ),
}
KINDS = ("float", "today", "lean, exact", "lean")
BATCHES = {32: (64,), 224: (4, 8, 16)}


def build(network: str, kind: str) -> nn.Module:
    """The network, float or with the scheme's layers, and lean if asked for."""
    torch.manual_seed(0)
    make, scheme, _ = NETWORKS[network]
    model = make(kind)
    if kind == "float":
        return model
    model = qconv.convert(model, scheme())
    return qconv.lean(model, kind.startswith("lean"), exact=kind.endswith("exact"))


def batch(network: str, count: int) -> tuple[Tensor, Tensor]:
    """Random images and labels."""
    size = NETWORKS[network][2]
    return torch.randn(count, 3, size, size), torch.randint(10, (count,))


def saved(model: nn.Module, images: Tensor, labels: Tensor) -> Counter[str]:
    """Bytes that autograd keeps, for each layer."""
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: Counter[str] = Counter()
    alive: list[Tensor] = []
    running: list[str] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            known.add(storage.data_ptr())
            alive.append(tensor)
            found[running[-1] if running else "loss"] += storage.nbytes()
        return tensor

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda module, args, name=name: running.append(name))
        module.register_forward_hook(leave)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        F.cross_entropy(model(images), labels).backward()
    return found


def peak(network: str, kind: str, count: int) -> float:
    """MiB of one step, in this process, above what it holds."""
    model = build(network, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    def now(field: str) -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024

    data, warm = batch(network, count), batch(network, 2)
    for _ in range(2):
        step(*warm)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = now("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    step(*data)
    return now("VmHWM") - before


def peak_elsewhere(network: str, kind: str, count: int) -> float:
    """`peak` in a process of its own, whose large blocks go back to the system when they are freed."""
    command = [sys.executable, __file__, "--peak", network, kind, str(count)]
    tunables = {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"}
    return float(subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | tunables).stdout)


def main() -> None:
    """Measure, or do what the arguments say."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--peak", nargs=3, metavar=("NETWORK", "KIND", "BATCH"), help="print one peak")
    parser.add_argument("--draw", action="store_true", help="draw the figure from the files")
    arguments = parser.parse_args()
    given = arguments.peak
    torch.set_num_threads(2)
    if arguments.draw:
        draw()
    elif given:
        print(peak(given[0], given[1], int(given[2])))
    else:
        measure()


def measure() -> None:
    """Write the files, then draw."""
    where = {**machine(), "torch": versions()["torch"], "commit": commit()}
    with (HERE / "layers.csv").open("w") as file:
        layers = csv.writer(file, lineterminator="\n")
        layers.writerow(["network", "kind", "batch", "layer", "saved_mib"])
        for network in NETWORKS:
            for kind in KINDS:
                count = 64 if NETWORKS[network][2] == 32 else 8
                for layer, size in saved(build(network, kind), *batch(network, count)).items():
                    layers.writerow([network, kind, count, layer, round(size / 2**20, 4)])
    with (HERE / "peaks.csv").open("w") as file:
        peaks = csv.writer(file, lineterminator="\n")
        peaks.writerow(["network", "kind", "batch", "peak_mib", *where])
        for network in NETWORKS:
            for count in BATCHES[NETWORKS[network][2]]:
                for kind in KINDS:
                    size = peak_elsewhere(network, kind, count)
                    peaks.writerow([network, kind, count, round(size, 1), *where.values()])
                    file.flush()
                    print(network, kind, count, round(size), flush=True)
    draw()


def draw() -> None:
    """Draw what each layer of the first network keeps, and peaks against batches of the larger ones."""
    import matplotlib.pyplot as plt

    def rows(name: str) -> list[dict[str, str]]:
        with (HERE / name).open() as file:
            return list(csv.DictReader(file))

    colors = dict(zip(KINDS, ("tab:gray", "tab:red", "tab:cyan", "tab:blue"), strict=True))
    figure, places = plt.subplots(1, 3, figsize=(15, 4.5), width_ratios=(2, 1, 1), layout="constrained")
    first, *_, third, fourth = NETWORKS
    layers = [row for row in rows("layers.csv") if row["network"] == first]
    names = list(dict.fromkeys(row["layer"] for row in layers))
    for offset, kind in enumerate(("float", "today", "lean")):
        sizes = {row["layer"]: float(row["saved_mib"]) for row in layers if row["kind"] == kind}
        at = [index + (offset - 1) * 0.27 for index in range(len(names))]
        label = f"{kind}: {sum(sizes.values()):.1f} MiB"
        places[0].bar(at, [sizes.get(name, 0) for name in names], 0.27, color=colors[kind], label=label)
    places[0].set_xticks(range(len(names)), names, rotation=90, fontsize=5)
    places[0].set(title=f"kept for the backward: {first}, batch 64", ylabel="MiB")
    places[0].legend()
    for place, network in zip(places[1:], (third, fourth), strict=True):
        for kind in KINDS:
            points = [row for row in rows("peaks.csv") if row["network"] == network and row["kind"] == kind]
            x, y = [int(row["batch"]) for row in points], [float(row["peak_mib"]) for row in points]
            place.plot(x, y, marker="o", color=colors[kind], label=kind)
        place.set(title=f"peak: {network}", xlabel="batch", ylabel="MiB")
        place.legend()
    figure.savefig(HERE / "memory.png", dpi=110)


if __name__ == "__main__":
    main()
