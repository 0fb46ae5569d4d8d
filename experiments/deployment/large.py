"""What shipped networks cost on images of 224×224, in time and memory: `large.csv`.

    uv run --with openvino==2026.4.1 experiments/deployment/large.py

The networks see random images for their batch norms, and are not trained. Rows that the file has already are kept.
"""

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from run import FLOAT, INT8, append, has_row, in_turn, initialized, of_openvino, quantized_by_onnx_runtime
from torch import nn

import qconv
from qconv import models, schemes
from qconv.onnx import OnnxModel

CSV = Path(__file__).parent / "large.csv"
NETWORKS: dict[str, tuple[Any, Any]] = {
    "QuickNet": (models.quicknet, schemes.bnn()),
    "Bi-Real-18": (models.birealnet18, schemes.bireal()),
    "MobileNetV2 8/8": (partial(models.torchvision_model, name="mobilenet_v2"), schemes.minmax(8, 8)),
    "MobileNetV3 8/8": (partial(models.torchvision_model, name="mobilenet_v3_large"), schemes.minmax(8, 8)),
    "ShuffleNetV2 8/8": (partial(models.torchvision_model, name="shufflenet_v2_x1_0"), schemes.minmax(8, 8)),
    "EfficientNet-B0 8/8": (partial(models.torchvision_model, name="efficientnet_b0"), schemes.minmax(8, 8)),
    "EfficientNet-Lite0 8/8": (partial(models.timm_model, name="tf_efficientnet_lite0"), schemes.minmax(8, 8)),
    "ResNet-18 LSQ 8/8": (models.torchvision_resnet, schemes.lsq(8, 8)),
}
BATCHES = 1, 16
SIZE = 224
OPENINGS = 5
CHILD = """
import time, numpy as np
def largest():  # of `resource`, the number would have the parent's memory
    return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])
images = np.random.default_rng(0).standard_normal((1, 3, {size}, {size}), np.float32)
{load}
before = largest()
start = time.perf_counter()
run = opened({path!r})
milliseconds = 1e3 * (time.perf_counter() - start)
for _ in range(3):
    run(images)
print(milliseconds, largest() - before)
"""
OF_ONNX = """
import onnxruntime
def opened(path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options)
    return lambda images: session.run(None, {"input": images})
"""
OF_C = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], stdin=sys.stdin, stdout=subprocess.DEVNULL, check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def main() -> None:
    """Measure what the file lacks."""
    torch.set_grad_enabled(False)
    images = torch.randn(32, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    for name, (build, scheme) in NETWORKS.items():
        if has_row(CSV, {"network": name}):
            continue
        whole = partial(of_1000_classes, build)
        model, twin = (initialized(whole, each, images) for each in (scheme, None))
        with TemporaryDirectory() as folder:
            path, program = Path(folder) / "0.onnx", Path(folder) / "model.qprogram"
            qconv.export_onnx(twin, path, images[:2])
            int8 = quantized_by_onnx_runtime(path, images)
            frozen = qconv.freeze(model)
            ways = {
                FLOAT: OnnxModel(path),
                INT8[0]: OnnxModel(int8),
                INT8[1]: of_openvino(int8),
                "qconv.freeze": frozen,
            }
            rows: list[dict[str, Any]] = []
            for batch in BATCHES:
                medians = in_turn(ways, images[:batch].contiguous(memory_format=torch.channels_last))
                for way, ms in medians.items():
                    ratio = round(medians[FLOAT] / ms, 2)
                    rows.append({"batch": batch, "way": way, "ms": round(ms, 3), "ratio": ratio})
            kept = {FLOAT: in_onnx_runtime(path), INT8[0]: in_onnx_runtime(int8)}
            if not frozen.unplanned:
                qconv.save_program(model, program, images[:2])
                kept["qconv.freeze"] = in_qconv_run(program)
            for row in rows:
                opening, memory = kept.get(row["way"], ("", "")) if row["batch"] == 1 else ("", "")
                row |= {"open_ms": opening, "memory_kib": memory}
        append(CSV, {"network": name}, rows)
        print(name, "done", flush=True)


def in_onnx_runtime(path: Path) -> tuple[float, int]:
    """Milliseconds for opening a file, and the KiB that this and three single images add to a process, one thread."""
    child = [sys.executable, "-c", CHILD.format(size=SIZE, load=OF_ONNX, path=str(path))]
    runs = [subprocess.run(child, capture_output=True, text=True, check=True).stdout.split() for _ in range(OPENINGS)]
    return round(median(float(opening) for opening, _ in runs), 1), int(runs[0][1])


def in_qconv_run(path: Path) -> tuple[float, int]:
    """Milliseconds for a process that opens a program, and the KiB of one that runs three images, without Python."""
    command = [str(Path(sys.executable).parent / "qconv_run"), str(path), str(SIZE), str(SIZE), "1"]
    seconds = []
    for _ in range(OPENINGS):
        start = time.perf_counter()
        subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)
        seconds.append(time.perf_counter() - start)
    pixels = torch.zeros(3, 3, SIZE, SIZE).numpy().tobytes()
    child = [sys.executable, "-S", "-c", OF_C, *command]  # a small process: its own memory counts before `exec`
    output = subprocess.run(child, input=pixels, stdout=subprocess.PIPE, check=True).stdout
    return round(1e3 * median(seconds), 1), int(output)


def of_1000_classes(build: Callable[..., nn.Module], **_: Any) -> nn.Module:
    """ImageNet's network, whatever `initialized` asks for."""
    return build(num_classes=1000)


if __name__ == "__main__":
    main()
