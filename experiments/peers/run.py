"""qconv, Brevitas, torchao and Larq on one ResNet-20 and the same made pictures: `results.csv`.

    uv run experiments/peers/run.py [LIBRARY…]

Each peer runs in an environment of its own with pinned versions, which uv makes. In it, the float and the quantized
network train in turn, step by step, on one thread; so the times of one row were measured at the same time.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

RESULTS = Path(__file__).with_name("results.csv")
ONNX = ("onnx==1.23.2", "onnxscript==0.7.2", "onnxruntime==1.32.0", "numpy==2.4.6")
PEERS = {
    "brevitas": ("brevitas==0.13.4", "onnxoptimizer==0.4.2", "torch==2.15.0", *ONNX),
    "torchao": ("torchao==0.18.0", "torch==2.15.0", *ONNX),
    "larq": ("larq==0.14.0", "larq-compute-engine==0.16.0", "tensorflow-cpu==2.15.1", "numpy==1.26.4"),
}
ROWS = {"qconv": (4, 1), "brevitas": (4,), "torchao": (4,), "larq": (4, 1)}  # bits of weights and inputs
STEPS, BATCH, RATE = 200, 32, 1e-3
PICTURES, CALLS = 1000, 200
WIDTHS = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
Images = np.ndarray[Any, Any]
Prepared = tuple[Any, Callable[[], Any], Callable[[Any, Path], Any], Callable[[Any], Any] | None]
"""The network to train; what makes it the trained one; what writes its file; its library's own runtime."""


def main(*names: str) -> None:
    """Measure each library in a process of its own."""
    from qconv.ground.environment import commit, machine
    from qconv.ground.table import append_csv

    for name in names or ROWS:
        packages = [word for package in PEERS.get(name, ()) for word in ("--with", package)]
        python = ["uv", "run", "--quiet", "--no-project", "--python", "3.11", *packages, "python"]
        for bits in ROWS[name]:
            command = [*(python if name in PEERS else [sys.executable]), "-W", "ignore", __file__, name, str(bits)]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            row = {**json.loads(said.splitlines()[-1]), "commit": commit(), "cpu": machine()["cpu"]}
            print(row, flush=True)
            append_csv(row, RESULTS)


def pictures(count: int, seed: int) -> tuple[Images, Images]:
    """Made pictures (N, 3, 32, 32) of 10 classes, each a coarse pattern, shifted and under noise; and their labels."""
    patterns = np.kron(np.random.default_rng(0).normal(size=(10, 3, 4, 4)), np.ones((1, 1, 8, 8)))
    random = np.random.default_rng(seed)
    labels = random.integers(0, 10, count)
    moved = [np.roll(patterns[label], random.integers(0, 32, 2), (1, 2)) for label in labels]
    return (np.stack(moved) + 5 * random.normal(size=(count, 3, 32, 32))).astype(np.float32), labels


def in_turn(prefix: str, one: Callable[[int], Any], other: Callable[[int], Any], rounds: int) -> dict[str, float]:
    """Call both in turn. Return their median milliseconds, and the median of the quotients of the rounds."""
    times = []
    for index in range(rounds):
        start = time.perf_counter()
        one(index)
        middle = time.perf_counter()
        other(index)
        times.append((middle - start, time.perf_counter() - middle))
    ones, others = zip(*times[rounds // 5 :], strict=True)
    quotients = [one / other for one, other in zip(ones, others, strict=True)]
    values = 1000 * statistics.median(ones), 1000 * statistics.median(others), statistics.median(quotients)
    return {f"{prefix}_{key}": round(each, 3) for key, each in zip(("ms", "float_ms", "ratio"), values, strict=True)}


def trained(step: Callable[[str, Images, Images], float]) -> dict[str, float]:
    """Train both networks in turn; `step` is a step of one of them, and returns its loss."""
    images, labels = pictures(STEPS * BATCH, 1)
    losses: dict[str, list[float]] = {"loss": [], "float_loss": []}

    def call(name: str, index: int) -> None:
        batch = slice(index * BATCH, (index + 1) * BATCH)
        losses[name].append(step(name, images[batch], labels[batch]))

    times = in_turn("step", lambda index: call("loss", index), lambda index: call("float_loss", index), STEPS)
    return times | {name: round(statistics.mean(values[-20:]), 4) for name, values in losses.items()}


def shipped(prefix: str, call: Callable[[Images], Images], floats: Callable[[Images], Images], own: Images):
    """Time one picture in turn with the float network's file, and count decisions that are not `own`."""
    images = pictures(PICTURES, 2)[0]
    times = in_turn(prefix, lambda i: call(images[i : i + 1]), lambda i: floats(images[i : i + 1]), CALLS)
    decisions = np.array([int(call(images[i : i + 1]).argmax()) for i in range(PICTURES)])
    return {**times, f"{prefix}_decisions": f"{(decisions != own).sum()} of {PICTURES}"}


def with_torch(name: str, bits: int) -> dict[str, Any]:
    """A row of a library for torch."""
    import torch
    from torch import Tensor, nn

    torch.set_num_threads(1)
    act = nn.ReLU if bits > 1 else nn.Identity

    class Block(nn.Module):
        def __init__(self, conv: Callable[..., nn.Module], before: int, after: int) -> None:
            super().__init__()
            stride = 1 + (before != after)
            self.body = nn.Sequential(conv(before, after, 3, stride), nn.BatchNorm2d(after), act())
            self.body.extend([conv(after, after, 3, 1), nn.BatchNorm2d(after)])
            short = (conv(before, after, 1, stride), nn.BatchNorm2d(after)) if stride > 1 else ()
            self.short, self.act = nn.Sequential(*short), act()

        def forward(self, input: Tensor) -> Tensor:
            return self.act(self.body(input) + self.short(input))

    def plain(before: int, after: int, size: int, stride: int) -> nn.Module:
        return nn.Conv2d(before, after, size, stride, size // 2, bias=False)

    def network(conv: Callable[..., nn.Module] = plain) -> nn.Sequential:
        torch.manual_seed(0)
        first = plain(3, 16, 3, 1), nn.BatchNorm2d(16), act()
        blocks = (Block(conv, *pair) for pair in pairwise(WIDTHS))
        return nn.Sequential(*first, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    example = torch.from_numpy(pictures(64, 3)[0])
    prepare = {"qconv": of_qconv, "brevitas": of_brevitas, "torchao": of_torchao}[name]
    model, finish, export, runtime = prepare(network, bits, example)
    models = {"loss": model, "float_loss": network()}
    optimizers = {key: torch.optim.Adam(each.parameters(), RATE) for key, each in models.items()}
    if name == "qconv":
        import_module("qconv").after_every_step(optimizers["loss"], model)

    def step(key: str, images: Images, labels: Images) -> float:
        loss = nn.functional.cross_entropy(models[key](torch.from_numpy(images)), torch.from_numpy(labels))
        optimizers[key].zero_grad()
        loss.backward()
        optimizers[key].step()
        return loss.item()

    row: dict[str, Any] = {"library": name, "version": version(name), "bits": bits, **trained(step)}
    model, float_model = finish(), models["float_loss"].eval()
    images, labels = pictures(PICTURES, 2)
    with TemporaryDirectory() as folder, torch.no_grad():
        own = np.array([int(model(torch.from_numpy(image[None])).argmax()) for image in images])
        files = Path(folder, "model.onnx"), Path(folder, "float.onnx")
        torch.onnx.export(float_model, (example[:1],), files[1], dynamo=True, verbose=False, external_data=False)
        export(model, files[0])
        sizes = (file.stat().st_size for file in files)
        row |= {"accuracy": float((own == labels).mean()), **dict(zip(("bytes", "float_bytes"), sizes, strict=True))}
        row |= shipped("ort", session(files[0]), session(files[1]), own)
        row |= shipped("ort_exact", session(files[0], exact=True), session(files[1]), own)
        if runtime:
            run = runtime(model)
            row |= shipped("own", lambda i: run(torch.from_numpy(i)).numpy(), session(files[1]), own)
    return row


def session(path: Path, *, exact: bool = False) -> Callable[[Images], Images]:
    """A file in ONNX Runtime on one thread; exact: as written, without joining operators of codes."""
    runtime: Any = import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    if exact:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
    loaded = runtime.InferenceSession(str(path), options)
    name = loaded.get_inputs()[0].name
    return lambda images: loaded.run(None, {name: images})[0]


def of_qconv(network: Callable[..., Any], bits: int, example: Any) -> Prepared:
    """LSQ for 4 bits, BNN for 1."""
    import qconv

    model = qconv.convert(network(), qconv.schemes.lsq(bits, bits) if bits > 1 else qconv.schemes.bnn())
    return model, model.eval, lambda model, path: qconv.export_onnx(model, path, example), qconv.freeze


def of_brevitas(network: Callable[..., Any], bits: int, example: Any) -> Prepared:
    """Its default quantizers of weights and inputs; it has no runtime of its own."""
    qnn, quant, export = map(import_module, ("brevitas.nn", "brevitas.quant", "brevitas.export"))
    weight = {"weight_quant": quant.Int8WeightPerTensorFloat, "weight_bit_width": bits}
    input = {"input_quant": quant.Uint8ActPerTensorFloat, "input_bit_width": bits}
    options = {"keep_initializers_as_inputs": False, "external_data": False}  # which ONNX Runtime folds

    def conv(before: int, after: int, size: int, stride: int) -> Any:
        return qnn.QuantConv2d(before, after, size, stride, size // 2, bias=False, **weight, **input)

    def write(model: Any, path: Path) -> None:
        export.export_onnx_qcdq(model, example[:1], export_path=str(path), **options)

    model = network(conv)
    return model, model.eval, write, None


def of_torchao(network: Callable[..., Any], bits: int, example: Any) -> Prepared:
    """PT2E with the quantizer for x86, for `quantize_` trains no convolutions; its runtime is torch.compile."""
    import torch

    pt2e, of_x86, flow, base = (
        import_module(f"torchao.quantization.pt2e{name}")
        for name in ("", ".quantizer.x86_inductor_quantizer", ".quantize_pt2e", ".quantizer")
    )

    def spec(dtype: torch.dtype, low: int, high: int, observer: Any, scheme: torch.qscheme, **axis: int) -> Any:
        fake = pt2e.FusedMovingAvgObsFakeQuantize.with_args(observer=observer, eps=2**-12)
        ends = {"quant_min": low, "quant_max": high, "qscheme": scheme, **axis}
        return base.QuantizationSpec(dtype=dtype, observer_or_fake_quant_ctr=fake, **ends)

    def config(bits: int) -> Any:
        half = 2 ** (bits - 1) - 1
        input = spec(torch.uint8, 0, 2**bits - 1, pt2e.MovingAverageMinMaxObserver, torch.per_tensor_affine)
        of_channels = pt2e.MovingAveragePerChannelMinMaxObserver, torch.per_channel_symmetric
        return of_x86.QuantizationConfig(
            input, None, spec(torch.int8, -half, half, *of_channels, ch_axis=0), None, True
        )

    quantizer = of_x86.X86InductorQuantizer().set_global(config(bits))
    for name in ("0", "14"):  # the first layer can't stay float
        quantizer.set_module_name_qconfig(name, config(8))
    shapes = ({0: torch.export.Dim("images")},)
    model = flow.prepare_qat_pt2e(torch.export.export(network(), (example,), dynamic_shapes=shapes).module(), quantizer)

    def write(model: Any, path: Path) -> None:
        torch.onnx.export(model, (example[:1],), path, dynamo=True, verbose=False, external_data=False)

    def compiled(model: Any) -> Any:
        setattr(import_module("torch._inductor.config"), "freezing", True)  # noqa: B010  # else no integers
        return torch.compile(model)

    return model, lambda: pt2e.move_exported_model_to_eval(flow.convert_pt2e(model)), write, compiled


def with_larq(bits: int) -> dict[str, Any]:
    """A row of Larq: DoReFa for 4 bits, signs for 1; files are TFLite's, its own runtime Larq Compute Engine."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    tf, larq, engine = map(import_module, ("tensorflow", "larq", "larq_compute_engine"))
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    keras, act = tf.keras, "relu" if bits > 1 else "linear"
    dorefa = {key: larq.quantizers.DoReFa(bits, mode=key) for key in ("activations", "weights")}
    signs = {"input_quantizer": "ste_sign", "kernel_quantizer": "ste_sign", "kernel_constraint": "weight_clip"}
    codes = {"input_quantizer": dorefa["activations"], "kernel_quantizer": dorefa["weights"]}
    options = codes if bits > 1 else {**signs, "pad_values": 1.0}

    def plain(after: int, size: int, stride: int) -> Any:
        return keras.layers.Conv2D(after, size, stride, padding="same", use_bias=False)

    def conv(after: int, size: int, stride: int) -> Any:
        return larq.layers.QuantConv2D(after, size, stride, padding="same", use_bias=False, **options)

    def norm() -> Any:
        return keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5)

    def network(conv: Callable[..., Any]) -> Any:
        tf.random.set_seed(0)
        images = keras.Input((32, 32, 3))
        x = keras.layers.Activation(act)(norm()(plain(16, 3, 1)(images)))
        for before, after in pairwise(WIDTHS):
            stride = 1 + (before != after)
            body = keras.layers.Activation(act)(norm()(conv(after, 3, stride)(x)))
            body = norm()(conv(after, 3, 1)(body))
            x = norm()(conv(after, 1, stride)(x)) if stride > 1 else x
            x = keras.layers.Activation(act)(keras.layers.add([body, x]))
        return keras.Model(images, keras.layers.Dense(10)(keras.layers.GlobalAveragePooling2D()(x)))

    models = {"loss": network(conv), "float_loss": network(plain)}
    for model in models.values():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(RATE, epsilon=1e-8), loss)

    def last(images: Images) -> Images:
        return np.ascontiguousarray(images.transpose(0, 2, 3, 1))

    def step(key: str, images: Images, labels: Images) -> float:
        return float(models[key].train_on_batch(last(images), labels))

    row: dict[str, Any] = {"library": "larq", "version": version("larq"), "bits": bits, **trained(step)}
    images, labels = pictures(PICTURES, 2)
    own = models["loss"].predict(last(images), verbose=0).argmax(1)
    files = {key: engine.convert_keras_model(model) for key, model in models.items()}
    sizes = (len(file) for file in files.values())
    row |= {"accuracy": float((own == labels).mean()), **dict(zip(("bytes", "float_bytes"), sizes, strict=True))}
    runs = {key: engine.testing.Interpreter(file, num_threads=1) for key, file in files.items()}
    call = {key: lambda images, run=run: run.predict(last(images)) for key, run in runs.items()}
    return row | shipped("own", call["loss"], call["float_loss"], own)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[2].isdigit():
        name, bits = sys.argv[1], int(sys.argv[2])
        print(json.dumps(with_larq(bits) if name == "larq" else with_torch(name, bits)))
    else:
        main(*sys.argv[1:])
