"""The command-line program ``qconv``: one subcommand a job."""

import argparse
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from . import __version__, schemes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``qconv`` with the given arguments (by default the command line's); return the exit status."""
    parser = argparse.ArgumentParser(
        prog="qconv",
        description="Quantized convolutional networks: use what was trained, and measure.",
        epilog="Training is a program of its own: train.py in the repository.",
    )
    parser.add_argument("--version", action="version", version=f"qconv {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_predict(commands)
    _add_summary(commands)
    _add_verify(commands)
    _add_export(commands)
    _add_bench(commands)
    options = parser.parse_args(arguments)
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # what read the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at its end
        return 1
    except (ValueError, OSError, RuntimeError, ImportError) as error:
        print(f"qconv: error: {error}", file=sys.stderr)
        return 1


def _add_predict(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    predict = commands.add_parser(
        "predict",
        help="name the classes of pictures",
        description="Name the most probable classes of pictures, by a packed model that a run of train.py has left.",
        epilog="example: qconv predict outputs/2026-01-31/12-00-00/model.safetensors cat.jpg *.png",
    )
    predict.add_argument("model", metavar="MODEL", help="packed model, model.safetensors in the folder of a run")
    predict.add_argument("pictures", metavar="PICTURE", nargs="+", help="picture files")
    predict.add_argument("--top", type=int, default=3, help="how many classes of each picture (default: 3)")
    predict.add_argument("--json", action="store_true", help="print a line of JSON for each picture")
    predict.set_defaults(run=_predict)


def _predict(options: argparse.Namespace) -> int:
    from .predict import DecodingError, Predictor

    if options.top < 1:
        raise ValueError(f"--top (={options.top}) must be at least 1")
    predictor = Predictor(options.model)
    width = max(map(len, options.pictures))
    status = 0
    for path in options.pictures:
        try:
            found = predictor(path, options.top)
        except DecodingError as error:  # the others are named all the same
            print(f"qconv: error: {error}", file=sys.stderr)
            status = 1
            continue
        if options.json:
            print(json.dumps({"picture": path, "classes": [guess._asdict() for guess in found]}), flush=True)
        else:
            shares = "   ".join(f"{guess.label} {100 * guess.probability:.1f} %" for guess in found)
            print(f"{path:{width}}  {shares}", flush=True)
    return status


def _add_summary(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    summary = commands.add_parser(
        "summary",
        help="show what a packed model consists of",
        description="Show the layers of a packed model: bits, parameters, multiply-accumulates, bytes.",
        epilog="example: qconv summary outputs/2026-01-31/12-00-00/model.safetensors",
    )
    summary.add_argument("model", metavar="MODEL", help="packed model, model.safetensors in the folder of a run")
    summary.add_argument("--csv", metavar="FILE", help="also write the rows to a CSV file")
    summary.add_argument("--json", metavar="FILE", help="also write rows and totals to a JSON file")
    summary.set_defaults(run=_summary)


def _summary(options: argparse.Namespace) -> int:
    from .packed import load_for_pictures
    from .summary import summarize

    model, _, pictures = load_for_pictures(options.model)
    table = summarize(model, pictures.size)
    if options.csv:
        table.to_csv(options.csv)
    if options.json:
        table.to_json(options.json)
    print(table)
    return 0


def _add_verify(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verify = commands.add_parser(
        "verify",
        help="prove that integer inference gives what was trained",
        description="Freeze a packed model, and compare it with the model in the file on pictures, layer by layer: "
        "codes and sums of integers must be equal, floats within what rounding explains. The exit status is 1 if they "
        "are not.",
        epilog="example: qconv verify outputs/2026-01-31/12-00-00/model.safetensors cat.jpg *.png",
    )
    verify.add_argument("model", metavar="MODEL", help="packed model, model.safetensors in the folder of a run")
    verify.add_argument("pictures", metavar="PICTURE", nargs="+", help="picture files")
    verify.add_argument(
        "--onnx",
        metavar="FILE",
        help="compare what ONNX Runtime makes of this file instead; status 1 if a class differs",
    )
    verify.set_defaults(run=_verify)


def _verify(options: argparse.Namespace) -> int:
    import torch

    from .inference import freeze, verify
    from .predict import Predictor

    predictor = Predictor(options.model)
    pictures = torch.stack([predictor.read(path) for path in options.pictures])
    if options.onnx is not None:
        from .onnx import compare_onnx

        compared = compare_onnx(predictor.model, options.onnx, pictures)
        print(compared)
        return 0 if compared.agrees else 1
    found = verify(predictor.model, freeze(predictor.model), pictures.split(32))
    print(found)
    return 0 if found.equal else 1


def _add_export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    export = commands.add_parser(
        "export",
        help="write a trained model as a packed or ONNX file",
        description="Write the model of a run, or of a packed file, for use elsewhere. A run's packed file is made of "
        "its best checkpoint. An ONNX file is made of the packed file, or of the checkpoint if there is none; it needs "
        "pictures as in use: those named (then the packed file must be there), else training pictures of the run.",
        epilog="example: qconv export outputs/2026-01-31/12-00-00 --to onnx",
    )
    export.add_argument("model", metavar="RUN_DIR", help="folder of a run, or a packed model")
    export.add_argument("pictures", metavar="PICTURE", nargs="*", help="picture files, for --to onnx")
    export.add_argument("--to", choices=["packed", "onnx"], required=True, help="the kind of file")
    export.add_argument("--out", metavar="FILE", help="default: model.safetensors or model.onnx in the run's folder")
    export.add_argument(
        "--round-outputs", action="store_true", help="ONNX: round to 8 bits between layers; faster with many channels"
    )
    export.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> int:
    source = Path(options.model)
    folder = source if source.is_dir() else source.parent
    out = Path(options.out or folder / ("model.onnx" if options.to == "onnx" else "model.safetensors"))
    if options.to == "packed":
        from .training.finished import FinishedRun

        if options.pictures or options.round_outputs:
            raise ValueError("PICTURE and --round-outputs are for --to onnx")
        if not source.is_dir():
            raise ValueError(f"{source} must be the folder of a run, which --to packed reads")
        FinishedRun(source).pack(out)
    else:
        from .onnx import export_onnx

        model, example = _model_and_example(source, options.pictures)
        export_onnx(model, out, example, round_outputs=options.round_outputs)
    print(f"{out}: {out.stat().st_size:,} bytes")
    return 0


def _model_and_example(source: Path, pictures: list[str]) -> tuple[Any, Any]:
    """The model of a run or packed file, and inputs for it."""
    import torch

    packed = source / "model.safetensors" if source.is_dir() else source
    if pictures or not source.is_dir():
        from .predict import Predictor

        if not pictures:
            raise ValueError(f"PICTURE must be given with {source}, which is a file: only a run knows its pictures")
        if source.is_dir() and not packed.is_file():
            raise ValueError(f"{source} has no {packed.name}: qconv export {source} --to packed writes it")
        predictor = Predictor(packed)
        return predictor.model, torch.stack([predictor.read(path) for path in pictures])
    from .training.finished import FinishedRun

    run = FinishedRun(source)
    return run.model(), run.examples(256)


def _needs_nothing(make: Callable[..., object]) -> bool:
    """Whether a scheme can be made without arguments: those that hold other schemes cannot."""
    parameters = inspect.signature(make).parameters.values()
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def _add_bench(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    bench = commands.add_parser("bench", help="measure against torch.nn in the same run")
    kinds = bench.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    step = kinds.add_parser(
        "train-step",
        help="one training step of a quantized layer or network against its float twin",
        description="Check a quantized layer or network for correctness, then time its training step against the float "
        "twin's, in turn in one process. Prints medians and the median of the ratios within a round.",
        epilog="example: qconv bench train-step --scheme bnn --case 128@16 64@32 resnet18 --csv results.csv",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    methods = [name for name in schemes.__all__ if name != "Scheme" and _needs_nothing(getattr(schemes, name))]
    step.add_argument("--scheme", nargs="+", choices=methods, default=["bnn"], help="schemes to measure")
    step.add_argument(
        "--case",
        nargs="+",
        default=["128@16", "64@32", "resnet18"],
        help="CHANNELS@SIZE, a 3×3 layer on square pictures of that size, or resnet18 (3×32×32 pictures)",
    )
    step.add_argument("--batch-size", type=int, default=64, help="pictures a step")
    step.add_argument("--rounds", type=int, default=15, help="timed rounds; each times both sides once")
    step.add_argument("--warmup", type=int, default=3, help="rounds before the timed ones")
    step.add_argument("--device", default="cpu", help="cpu, cuda, …")
    step.add_argument("--autocast", action="store_true", help="run under bfloat16 autocast")
    step.add_argument("--channels-last", action="store_true", help="channels_last memory format")
    step.add_argument("--compile", action="store_true", help="torch.compile(fullgraph=True) both sides")
    step.add_argument("--csv", metavar="FILE", help="also append the results to a CSV file")
    step.set_defaults(run=_bench_train_step)
    data = kinds.add_parser(
        "data",
        help="pictures a second against torchvision's data sets with PIL transforms",
        description="Time qconv's loaders and torchvision's, in turn in one process: small pictures that lie in "
        "memory, and large ones that one worker process decodes. Prints medians and the median of the ratios within a "
        "round.",
        epilog="example: qconv bench data --small cifar10-tree --large imagenet",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    data.add_argument("--small", metavar="DIR", help="tree of small pictures, train/<class>/* and test/<class>/*")
    data.add_argument("--large", metavar="DIR", help="tree of large pictures, train/<class>/* and val/<class>/*")
    data.add_argument("--batch-size", type=int, default=64, help="pictures a batch")
    data.add_argument("--rounds", type=int, default=9, help="timed rounds; each times both sides once")
    data.add_argument("--csv", metavar="FILE", help="also append the results to a CSV file")
    data.set_defaults(run=_bench_data)

    binary = kinds.add_parser(
        "binary-conv",
        help="binary 3×3 convolutions against torch's float ones",
        description="Check binary convolutions against torch's, then time both in turn: a float input whose signs are "
        "packed, convolved and scaled to floats, against float32 conv2d in the faster of its two memory formats.",
        epilog="example: qconv bench binary-conv --case 64@32 512@4 --batch-size 1 64 --csv results.csv",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    layers = ["64@32", "128@16", "256@8", "512@4", "64@56", "128@28", "256@14", "512@7"]
    binary.add_argument("--case", nargs="+", default=layers, help="CHANNELS@SIZE of the layers")
    binary.add_argument("--batch-size", type=int, nargs="+", default=[1, 64], help="pictures")
    binary.add_argument("--rounds", type=int, default=15, help="timed rounds; each times all sides once")
    binary.add_argument("--csv", metavar="FILE", help="also append the results to a CSV file")
    binary.set_defaults(run=_bench_binary_conv)


def _bench_binary_conv(options: argparse.Namespace) -> int:
    from .bench import binary_conv

    if options.csv:
        with Path(options.csv).open("a"):
            pass
    print(binary_conv.HEADER)
    for batch_size in options.batch_size:
        for case in options.case:
            result = binary_conv.measure(case, batch_size, options.rounds)
            print(result.line(), flush=True)
            if options.csv:
                result.append_to(options.csv)
    return 0


def _bench_train_step(options: argparse.Namespace) -> int:
    from .bench import train_step  # torch._dynamo and the models, not needed for --help

    settings = train_step.Settings(
        batch_size=options.batch_size,
        rounds=options.rounds,
        warmup=options.warmup,
        device=options.device,
        autocast=options.autocast,
        channels_last=options.channels_last,
        compile=options.compile,
    )
    # All at once: a mistake in the last, or a file that can't be written, shall not cost the time of the first.
    cases = [train_step.Case.named(text) for text in options.case]
    if options.csv:
        with Path(options.csv).open("a"):
            pass
    print(train_step.HEADER)
    for case in cases:
        for name in options.scheme:
            result = train_step.measure(case, getattr(schemes, name)(), settings)
            print(result.line(), flush=True)
            if options.csv:
                result.append_to(options.csv)
    return 0


def _bench_data(options: argparse.Namespace) -> int:
    from .bench import data

    if not options.small and not options.large:
        raise ValueError("give --small, --large or both: folders of pictures")
    if options.csv:
        with Path(options.csv).open("a"):
            pass
    print(data.HEADER)
    for root, measure in ((options.small, data.measure_small), (options.large, data.measure_large)):
        if root:
            result = measure(root, options.batch_size, options.rounds)
            print(result.line(), flush=True)
            if options.csv:
                result.append_to(options.csv)
    return 0
