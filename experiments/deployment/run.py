"""What a shipped ResNet-20 and ResNet-18 cost: bytes, latency, and agreement with the trained model.

    uv run experiments/deployment/run.py TREE RUNS [METHOD…]

TREE holds CIFAR-10's pictures, ``test/<class>/*``; RUNS the folders of experiments/cifar10_methods. A ResNet-20 has the
weights of its run where there is one. All others are initialized, and see training pictures for their batch norms.
Rows that latency.csv has already are kept.
"""

import csv
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import qconv
from qconv import schemes
from qconv.data import ImageFolderDataModule
from qconv.environment import commit, machine
from qconv.models import resnet18, resnet20
from qconv.onnx import OnnxModel
from qconv.training.finished import FinishedRun

HERE = Path(__file__).parent
METHODS: dict[str, tuple[Any, str]] = {
    "float": (None, "float"),
    "LSQ 8/8": (schemes.lsq(8, 8), ""),
    "LSQ 4/4": (schemes.lsq(4, 4), "LSQ_4-4"),
    "DeepShift-Q": (schemes.shift_q(), "DeepShift-Q"),
    "BWN": (schemes.bwn(), "BWN"),
    "Bi-Real": (schemes.bireal(), "Bi-Real"),
}
NETWORKS: dict[str, Callable[..., nn.Module]] = {"ResNet-20": resnet20, "ResNet-18": resnet18}
BATCHES = 1, 64
SECONDS = 3.0  # of measuring, for each network, method and batch
COLUMNS = [
    "network",
    "method",
    "trained",
    "batch",
    "way",
    "bytes",
    "ms",
    "ratio",
    "decisions",
    "right",
    "pictures",
    "commit",
    "cpu",
]


def main(tree: str, runs: str, *methods: str) -> None:
    """Measure what is missing in latency.csv, and draw it."""
    data = ImageFolderDataModule(root=tree, val_size=0.1, seed=1, batch_size=128)
    data.prepare_data()
    data.setup("fit")
    test, labels = (torch.cat(each)[::20] for each in zip(*data.test_dataloader(), strict=True))
    train = torch.cat([images for _, (images, _) in zip(range(4), data.train_dataloader(), strict=False)])
    path = HERE / "latency.csv"
    rows = list(csv.DictReader(path.open())) if path.is_file() else []
    done = {(row["network"], row["method"]) for row in rows}
    about = {**machine(), "commit": commit()}
    for network in NETWORKS:
        for method in methods or METHODS:
            if (network, method) in done:
                continue
            model, trained = built(network, method, Path(runs), train)
            twin = float_twin(network, train)
            for row in measured(model, twin, train, test, labels):
                rows.append({"network": network, "method": method, "trained": trained, **row, **about})
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
                writer.writeheader()
                writer.writerows(rows)
            print(f"{network} {method} done", flush=True)
    draw(rows, HERE / "latency.png")


def built(network: str, method: str, runs: Path, train: Tensor) -> tuple[nn.Module, str]:
    """The network of a method, and what is said of its weights."""
    scheme, name = METHODS[method]
    folder = runs / f"{name}-seed1"
    if network == "ResNet-20" and name and (folder / "checkpoints/best.ckpt").is_file():
        return FinishedRun(folder).trained(), "yes"
    torch.manual_seed(0)
    model = NETWORKS[network](num_classes=10)
    if scheme is not None:
        qconv.convert(model, scheme)
        qconv.calibrate(model, [train[:128]])
    with torch.no_grad():
        for batch in train.split(128):
            model.train()(batch)
    return model.eval(), "no"


def float_twin(network: str, train: Tensor) -> nn.Module:
    """The float network of the same kind, whose ONNX file is what others are compared with."""
    torch.manual_seed(0)
    model = NETWORKS[network](num_classes=10)
    with torch.no_grad():
        model.train()(train[:128])
    return model.eval()


@torch.no_grad()
def measured(model: nn.Module, twin: nn.Module, train: Tensor, test: Tensor, labels: Tensor) -> list[dict[str, Any]]:
    """A row for each way to run it and each batch, all in turn."""
    wanted = torch.cat([model(batch) for batch in test.split(64)]).argmax(1)
    ways: dict[str, Callable[[Tensor], Tensor]] = {"eager": model.to(memory_format=torch.channels_last)}  # pyright: ignore
    size: dict[str, int] = {"eager": sum(each.numel() * 4 for each in model.parameters())}
    with TemporaryDirectory() as folder:
        for name, source, options in (
            ("ONNX Runtime, float", twin, {}),
            ("ONNX Runtime", model, {}),
            ("ONNX Runtime, rounded", model, {"round_outputs": True}),
        ):
            path = Path(folder) / f"{len(ways)}.onnx"
            qconv.export_onnx(source, path, train, **options)
            ways[name], size[name] = OnnxModel(path), path.stat().st_size
        packed = Path(folder) / "model.safetensors"
        qconv.save_packed(model, packed)
        size["qconv.freeze"] = size["packed"] = packed.stat().st_size
    ways["qconv.freeze"] = qconv.freeze(model)
    torch._dynamo.reset()  # it compiles a class a few times only, and then leaves it eager
    ways["compile"] = torch.compile(model, dynamic=False)
    size["compile"] = size["eager"]
    classes = {
        name: torch.cat([way(batch) for batch in test.split(64)]).argmax(1)
        for name, way in ways.items()
        if name != "ONNX Runtime, float"
    }
    decisions = {name: int((found != wanted).sum()) for name, found in classes.items()}
    right = {name: int((found == labels).sum()) for name, found in classes.items()}
    rows: list[dict[str, Any]] = []
    for batch in BATCHES:
        input = test[:batch].contiguous(memory_format=torch.channels_last)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for way in ways.values():
            way(input)
            way(input)
        stop = time.perf_counter() + SECONDS
        while time.perf_counter() < stop or len(times["eager"]) < 5:
            for name, way in ways.items():
                start = time.perf_counter()
                way(input)
                times[name].append(time.perf_counter() - start)
        medians = {name: statistics.median(values) * 1e3 for name, values in times.items()}
        for name, median in medians.items():
            rows.append(
                {
                    "batch": batch,
                    "way": name,
                    "bytes": size[name],
                    "ms": round(median, 3),
                    "ratio": round(medians["ONNX Runtime, float"] / median, 2),
                    "decisions": decisions.get(name, ""),
                    "right": right.get(name, ""),
                    "pictures": len(test),
                }
            )
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """How many times as fast as the float network in ONNX Runtime."""
    import matplotlib.pyplot as plt

    names = ["eager", "compile", "ONNX Runtime", "ONNX Runtime, rounded", "qconv.freeze"]
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained", sharey=True)
    for row_axes, network in zip(axes, NETWORKS, strict=True):
        for axis, batch in zip(row_axes, BATCHES, strict=True):
            for index, name in enumerate(names):
                found = {
                    row["method"]: float(row["ratio"])
                    for row in rows
                    if (row["network"], row["way"], int(row["batch"])) == (network, name, batch)
                }
                places = [place + 0.16 * (index - 2) for place, method in enumerate(METHODS) if method in found]
                axis.bar(places, [found[method] for method in METHODS if method in found], 0.16, label=name)
            axis.axhline(1, color="0.4", linewidth=0.8)
            axis.set_xticks(range(len(METHODS)), list(METHODS), fontsize=8)
            axis.set_title(f"{network}, batch {batch}", fontsize=10)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].legend(frameon=False, fontsize=8)
    figure.supylabel("times as fast as the float network in ONNX Runtime")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
