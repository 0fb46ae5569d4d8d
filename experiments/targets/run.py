"""What trained networks compute in other runtimes: `results.csv`.

    uv run experiments/targets/run.py TREE [COUNT [NETWORK…]]

TREE holds CIFAR-10's images, ``test/<class>/*``; COUNT (1,000) of them are taken evenly. NETWORK is one of the zoo.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import qconv
from qconv.export.targets import TARGETS
from qconv.ground.environment import commit, machine
from qconv.ground.table import append_csv
from qconv.onnx import OnnxModel
from qconv.program.plan import Plan
from qconv.zoo import file
from qconv.zoo.predict import Predictor

RESULTS = Path(__file__).with_name("results.csv")
NETWORKS = tuple(f"resnet20-{name}-cifar10" for name in ("lsq4", "apot4", "reactnet", "adabin", "bwn", "float"))
EXECUTED = 20  # pictures of QONNX, whose executor is no runtime: it is slow
ROUNDS = 200


def main(tree: str, count: str = "1000", *networks: str) -> None:
    """Export, verify and measure each network for each target."""
    paths = sorted(Path(tree).glob("test/*/*"))
    paths = paths[:: max(len(paths) // int(count), 1)][: int(count)]
    for network in networks or NETWORKS:
        predictor = Predictor(file(network))
        images = torch.stack([predictor.read(str(path)) for path in paths])
        for target in TARGETS:
            with TemporaryDirectory() as folder:
                row = {"network": network, "target": target, **measured(predictor.model, images, target, Path(folder))}
            print(*row.values(), flush=True)
            append_csv({**row, "commit": commit(), "cpu": machine()["cpu"]}, RESULTS)


def measured(model: Any, images: Tensor, target: str, folder: Path) -> dict[str, Any]:
    """Return the comparison with the trained network, the bytes, and milliseconds for one image on one thread."""
    path = folder / f"model{TARGETS[target].suffix}"
    images = images[:EXECUTED] if target == "qonnx" else images
    names = "pictures", "decisions", "codes", "own", "drift", "difference", "largest", "bytes", "ms"
    try:
        qconv.export(model, path, to=target, images=images[:64])
    except ValueError as error:
        print(f"{target}: {error}", file=sys.stderr)
        return dict.fromkeys(names)
    found = qconv.verify_export(model, path, images)
    sums = [sum(getattr(layer, name) for layer in found.layers) for name in ("codes", "own", "drift")]
    size = sum(each.stat().st_size for each in folder.iterdir())
    one = None if target == "qonnx" else round(milliseconds(RUNNERS[target](path, images[:1])), 3)
    values = found.samples, found.decisions, *sums, found.difference, found.largest, size, one
    return dict(zip(names, values, strict=True))


def milliseconds(call: Callable[[], object]) -> float:
    """Return the median time of a call."""
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def in_litert(path: Path, image: Tensor) -> Callable[[], object]:
    """A call of LiteRT's interpreter."""
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_path=str(path), num_threads=1)
    interpreter.allocate_tensors()
    interpreter.set_tensor(interpreter.get_input_details()[0]["index"], image.permute(0, 2, 3, 1).contiguous().numpy())
    return interpreter.invoke


def in_openvino(path: Path, image: Tensor) -> Callable[[], object]:
    """A call of OpenVINO, with the setting that the file asks for."""
    import openvino

    from qconv.export.openvino import SETTINGS

    core = openvino.Core()
    network = core.read_model(path)
    network.reshape(list(image.shape))
    compiled, input = core.compile_model(network, "CPU", {**SETTINGS, "INFERENCE_NUM_THREADS": 1}), image.numpy()
    request = compiled.create_infer_request()
    return lambda: request.infer(input)


def in_executorch(path: Path, image: Tensor) -> Callable[[], object]:
    """A call of ExecuTorch, on all cores: its Python runtime has no number of threads."""
    from executorch.runtime import Runtime

    content = path.read_bytes()
    program: Any = Runtime.get().load_program(content)
    forward = program.load_method("forward")
    return lambda: (forward.execute([image]), program, content)  # which must stay as long as the method


def in_onnx_runtime(path: Path, image: Tensor) -> Callable[[], object]:
    """A call of ONNX Runtime."""
    model = OnnxModel(path, threads=1)
    return lambda: model(image)


def in_c(path: Path, image: Tensor) -> Callable[[], object]:
    """A call of the C kernels."""
    plan = Plan(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8), (image.shape[2], image.shape[3]))
    return lambda: plan(image, 1)


RUNNERS = {
    "litert": in_litert,
    "openvino": in_openvino,
    "executorch": in_executorch,
    "onnx": in_onnx_runtime,
    "program": in_c,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
