"""What a shipped ResNet-20 and ResNet-18 cost, and whether they decide as trained: `latency.csv`, `agreement.csv`.

    uv run --with openvino==2026.4.1 experiments/deployment/run.py TREE RUNS [METHOD…]

TREE holds CIFAR-10's images, ``test/<class>/*``; RUNS the folders of runs (README.md has the commands). A network
without one is initialized, and sees training images for its batch norms. Rows that the files have already are kept.
With AMX, and without AVX-512, the files are others: `latency_amx.csv`, `latency_avx2.csv`.
"""

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
from qconv.ground.environment import commit, machine
from qconv.ground.table import read_csv, write_csv
from qconv.kernels import native
from qconv.models import resnet18, resnet20
from qconv.onnx import OnnxModel
from qconv.training.finished import FinishedRun

HERE = Path(__file__).parent
CPUINFO = Path("/proc/cpuinfo")
SET = "amx" if CPUINFO.exists() and "amx_int8" in CPUINFO.read_text() else native.instruction_sets()[-1]
END = "" if SET == "avx512" else f"_{SET}"  # of the files: each set of instructions has its own
LATENCY, AGREEMENT = HERE / f"latency{END}.csv", HERE / f"agreement{END}.csv"
METHODS: dict[str, schemes.Scheme | None] = {
    "float": None,
    "LSQ 8/8": schemes.lsq(8, 8),
    "LSQ 4/4": schemes.lsq(4, 4),
    "DeepShift-Q": schemes.shift_q(),
    "BWN": schemes.bwn(),
    "Bi-Real": schemes.bireal(),
}
BINARY: dict[str, Any] = {"shortcut": "per_conv", "activation": nn.Hardtanh}  # as the study's
# How it is built, and the folder of its run.
NETWORKS: dict[str, tuple[Callable[..., nn.Module], str]] = {
    "ResNet-20": (resnet20, "{}-5epochs-seed1"),
    "ResNet-18": (resnet18, "ResNet-18_{}-seed1"),
}
FLOAT = "ONNX Runtime, float"  # the others are compared with it
INT8 = "ONNX Runtime, int8", "OpenVINO, int8"  # the float network, quantized after training by ONNX Runtime's tools
BATCHES = 1, 64
SECONDS = 6.0  # of measuring, for each network, method and batch
TURN = 0.1  # seconds of each way
Ways = dict[str, Callable[[Tensor], Tensor]]
Rows = list[dict[str, Any]]


def main(tree: str, runs: str, *methods: str) -> None:
    """Measure what is missing in the files, and draw it."""
    data = ImageFolderDataModule(root=tree, val_size=0.1, seed=1, batch_size=128)
    data.prepare_data()
    data.setup("fit")
    test, labels = (torch.cat(each)[::20] for each in zip(*data.test_dataloader(), strict=True))
    train = torch.cat([images for _, (images, _) in zip(range(4), data.train_dataloader(), strict=False)])
    for network, (build, folder) in NETWORKS.items():
        for method in methods or METHODS:
            run = Path(runs) / folder.format(method.replace("/", "-").replace(" ", "_"))
            about = {"network": network, "method": method}
            if has_row(LATENCY, about) and has_row(AGREEMENT, about):
                continue
            model, epochs = built(build, method, run, train)
            ways, sizes = shipped(model, initialized(build, None, train), train, peers=method == "float")
            if not has_row(LATENCY, about):
                append(LATENCY, about, latency(ways, sizes, test))
            if not has_row(AGREEMENT, about):
                append(AGREEMENT, {**about, "epochs": epochs}, agreement(ways, test, labels))
            print(f"{network} {method} done", flush=True)
    draw(read_csv(LATENCY), LATENCY.with_suffix(".png"))


def built(build: Callable[..., nn.Module], method: str, run: Path, train: Tensor) -> tuple[nn.Module, int]:
    """The network of a method, and for how many epochs it was trained."""
    if (run / "checkpoints/best.ckpt").is_file():
        finished = FinishedRun(run)
        return finished.trained(), finished.cfg.trainer.max_epochs
    return initialized(build, METHODS[method], train, **(BINARY if method == "Bi-Real" else {})), 0


def initialized(
    build: Callable[..., nn.Module], scheme: schemes.Scheme | None, train: Tensor, **options: Any
) -> nn.Module:
    """A network that has seen images, and was not trained."""
    torch.manual_seed(0)
    model = build(num_classes=10, **options)
    if scheme is not None:
        qconv.convert(model, scheme)
        qconv.calibrate(model, [train[:128]])
    with torch.no_grad():
        for batch in train.split(128):
            model.train()(batch)
    return model.eval()


@torch.no_grad()
def shipped(model: nn.Module, twin: nn.Module, train: Tensor, peers: bool) -> tuple[Ways, dict[str, int]]:
    """The ways to run a network, and the bytes of each; the float one is its `twin`, which `peers` quantize, too."""
    ways: Ways = {"eager": model.to(memory_format=torch.channels_last)}  # pyright: ignore[reportCallIssue]
    sizes = {"eager": sum(each.numel() * 4 for each in model.parameters())}
    with TemporaryDirectory() as folder:
        for name, source, is_rounded in (
            (FLOAT, twin, False),
            ("ONNX Runtime", model, False),
            ("ONNX Runtime, rounded", model, True),
        ):
            path = Path(folder) / f"{len(ways) - 1}.onnx"
            qconv.export_onnx(source, path, train, round_outputs=is_rounded)
            ways[name], sizes[name] = OnnxModel(path), path.stat().st_size
        if peers:
            path = quantized_by_onnx_runtime(Path(folder) / "0.onnx", train[:128])
            for name, way in zip(INT8, (OnnxModel(path), of_openvino(path)), strict=True):
                ways[name], sizes[name] = way, path.stat().st_size
        packed = Path(folder) / "model.safetensors"
        qconv.save_packed(model, packed)
        ways["qconv.freeze"], sizes["qconv.freeze"] = qconv.freeze(model), packed.stat().st_size
    torch._dynamo.reset()  # it compiles a class a few times only, and then leaves it eager
    ways["compile"], sizes["compile"] = torch.compile(model, dynamic=False), sizes["eager"]
    return ways, sizes


def quantized_by_onnx_runtime(path: Path, images: Tensor) -> Path:
    """The file of 8 bits that ONNX Runtime's own tools make of a float one, with a scale for each filter."""
    from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        batches = iter(images.split(32))

        def get_next(self) -> Any:
            batch = next(self.batches, None)
            return None if batch is None else {"input": batch.numpy()}

    prepared, target = path.with_name("prepared.onnx"), path.with_name("int8.onnx")
    quant_pre_process(str(path), str(prepared), skip_symbolic_shape=True)  # which fails for images of any size
    quantize_static(str(prepared), str(target), Reader(), per_channel=True, activation_type=QuantType.QUInt8)
    return target


def of_openvino(path: Path) -> Callable[[Tensor], Tensor]:
    """An ONNX file in OpenVINO, with a plan for each batch size."""
    import openvino  # pyright: ignore[reportMissingImports]  # not a dependency

    core, requests = openvino.Core(), {}
    read = core.read_model(path)

    def run(input: Tensor) -> Tensor:
        if input.shape not in requests:
            network = read.clone()
            network.reshape(list(input.shape))
            options = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
            requests[input.shape] = core.compile_model(network, "CPU", options).create_infer_request()
        return torch.from_numpy(requests[input.shape].infer([input.contiguous().numpy()], share_inputs=True)[0])

    return run


@torch.no_grad()
def latency(ways: Ways, sizes: dict[str, int], test: Tensor) -> Rows:
    """A row for each batch and way, all ways in turn."""
    rows: Rows = []
    for batch in BATCHES:
        medians = in_turn(ways, test[:batch].contiguous(memory_format=torch.channels_last))
        for name, median in medians.items():
            ratio = round(medians[FLOAT] / median, 2)
            rows.append({"batch": batch, "way": name, "bytes": sizes[name], "ms": round(median, 3), "ratio": ratio})
    return rows


def in_turn(ways: Ways, input: Tensor) -> dict[str, float]:
    """The median time of a call of each way, in ms.

    A turn is several calls, as in a program that does nothing else: the first one, which finds the caches full of
    another way's numbers and its own threads asleep, does not count.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way(input)
    stop = time.perf_counter() + SECONDS
    while time.perf_counter() < stop or len(times[FLOAT]) < 5:
        for name, way in ways.items():
            way(input)
            end = time.perf_counter() + TURN
            while (start := time.perf_counter()) < end:
                way(input)
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) * 1e3 for name, values in times.items()}


@torch.no_grad()
def agreement(ways: Ways, test: Tensor, labels: Tensor) -> Rows:
    """How many test images get another class than the trained model gives, and how many the right one."""
    classes = {
        name: torch.cat([way(batch) for batch in test.split(64)]).argmax(1)
        for name, way in ways.items()
        if name != FLOAT
    }
    return [
        {
            "way": name,
            "decisions": int((found != classes["eager"]).sum()),
            "right": int((found == labels).sum()),
            "pictures": len(test),
        }
        for name, found in classes.items()
    ]


def has_row(path: Path, about: dict[str, str]) -> bool:
    """Whether the file has a row of this network and method."""
    return any(about.items() <= row.items() for row in read_csv(path))


def append(path: Path, about: dict[str, Any], rows: Rows) -> None:
    """Write rows behind those of the file."""
    where = {"commit": commit(), "cpu": machine()["cpu"]}
    write_csv([*read_csv(path), *({**about, **row, **where} for row in rows)], path)


def draw(rows: Rows, path: Path) -> None:
    """How many times as fast as the float network in ONNX Runtime."""
    import matplotlib.pyplot as plt

    names = ["eager", "compile", "ONNX Runtime", "ONNX Runtime, rounded", *INT8, "qconv.freeze"]
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for row_axes, network in zip(axes, NETWORKS, strict=True):
        for axis, batch in zip(row_axes, BATCHES, strict=True):
            for index, name in enumerate(names):
                found = {
                    row["method"]: float(row["ratio"])
                    for row in rows
                    if (row["network"], row["way"], int(row["batch"])) == (network, name, batch)
                }
                places = [place + 0.12 * (index - 3) for place, method in enumerate(METHODS) if method in found]
                axis.bar(places, [found[method] for method in METHODS if method in found], 0.12, label=name)
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
