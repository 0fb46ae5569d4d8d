"""Measure speed, memory and size, each against torch in the same run."""

import argparse
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .configs import scheme_defaults
from .source import add_pictures

if TYPE_CHECKING:
    from ..bench.rows import Row


class Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Shows the default of each argument that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.help is None or not action.default:
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(map(str, action.default))})"
        return super()._get_help_string(action)


HELP = "measure speed, memory and size against torch"
EXAMPLE = "qconv bench model outputs/2026-01-31/12-00-00"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks, and their arguments."""
    kinds = parser.add_subparsers(title="benchmarks", metavar="BENCHMARK", required=True)
    for name, text, example, add_to, run in (
        (
            "model",
            "a network: float, as trained, frozen, and in ONNX Runtime",
            "qconv bench model outputs/2026-01-31/12-00-00 --csv results.csv",
            _add_model,
            _model,
        ),
        (
            "train-step",
            "one training step of a quantized layer or network against its float twin",
            "qconv bench train-step --scheme bnn --case 64@32 resnet18 --lean --peak --csv results.csv",
            _add_train_step,
            _train_step,
        ),
        (
            "data",
            "images a second against torchvision's data sets with PIL transforms",
            "qconv bench data --small cifar10-tree --large imagenet",
            _add_data,
            _data,
        ),
        (
            "binary-conv",
            "binary 3×3 convolutions against torch's float ones",
            "qconv bench binary-conv --case 64@32 512@4 --batch-size 1 64 --csv results.csv",
            _add_binary_conv,
            _binary_conv,
        ),
    ):
        texts = {"help": text, "description": run.__doc__, "epilog": f"example: {example}"}
        benchmark = kinds.add_parser(name, formatter_class=Defaults, **texts)
        add_to(benchmark)
        benchmark.add_argument("--csv", metavar="FILE", help="also append the results to a CSV file")
        benchmark.set_defaults(run=run)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder of a run, which must be trusted; a packed model; a name that qconv zoo lists; or "
        "MODULE:FUNCTION, your function that returns the arguments of qconv.compare_models: float model, "
        "quantized model, images, and optional labels",
    )
    add_pictures(parser, "image files, for a packed model: to count agreement")
    parser.add_argument("--count", type=int, default=1000, help="test images of the run at most")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 64], help="batch sizes to time")
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds of timing for each batch size")


def _add_train_step(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--scheme",
        nargs="+",
        choices=sorted(["identity", *(name for name, _ in scheme_defaults())]),
        metavar="SCHEME",
        default=["bnn"],
        help="schemes to measure: those of qconv.schemes, or identity",
    )
    parser.add_argument(
        "--case",
        nargs="+",
        default=["128@16", "64@32", "resnet18"],
        help="CHANNELS@SIZE, a 3×3 layer on square images of that size, or resnet18 or resnet20 (3×32×32 images)",
    )
    parser.add_argument("--batch-size", type=int, default=64, help="images a step")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds; each times both sides once")
    parser.add_argument("--warmup", type=int, default=3, help="rounds before the timed ones")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, …")
    parser.add_argument("--autocast", action="store_true", help="run under bfloat16 autocast")
    parser.add_argument("--channels-last", action="store_true", help="channels_last memory format")
    parser.add_argument("--compile", action="store_true", help="torch.compile(fullgraph=True) both sides")
    parser.add_argument(
        "--lean", action="store_true", help="also measure each scheme lean: with exact gradients, and with fast ones"
    )
    parser.add_argument(
        "--peak", action="store_true", help="also measure the peak memory of a step, in separate processes"
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--small", metavar="DIR", help="tree of small images, train/<class>/* and test/<class>/*")
    parser.add_argument("--large", metavar="DIR", help="tree of large images, train/<class>/* and val/<class>/*")
    parser.add_argument("--prepared", metavar="DIR", help="the images of --large, as written by qconv data prepare")
    parser.add_argument("--batch-size", type=int, default=64, help="images a batch")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds; each times both sides once")


def _add_binary_conv(parser: argparse.ArgumentParser) -> None:
    layers = ["64@32", "128@16", "256@8", "512@4", "64@56", "128@28", "256@14", "512@7"]
    parser.add_argument("--case", nargs="+", default=layers, help="CHANNELS@SIZE of the layers")
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 64], help="batch sizes to time")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds; each times all sides once")


def _report(kind: "type[Row]", csv: str | None, results: "Iterable[Row]") -> int:
    """Print a row as soon as it is measured, and append it to the CSV file."""
    if csv:  # before measuring, so that a file that can't be written costs no time
        with Path(csv).open("a"):
            pass
    print(kind.header())
    for result in results:
        print(result.line(), flush=True)
        if csv:
            result.append_to(csv)
    return 0


def _model(options: argparse.Namespace) -> int:
    """Compare a network in the forms in which it can be run.

    These are float, as trained, frozen (qconv.freeze), and in ONNX Runtime: bytes, latency on this CPU, agreement
    with the trained network, and accuracy. The float form of a run has the latent weights of its network.
    """
    from ..ground.table import append_csv
    from .compared import compared

    if options.csv:  # before measuring, so that a file that can't be written costs no time
        with Path(options.csv).open("a"):
            pass
    timing = {"batch_sizes": options.batch_size, "seconds": options.seconds}
    result = compared(options.model, options.pictures, options.count, **timing)
    print(result)
    if options.csv:
        for record in result.records():
            append_csv({"model": options.model, **record}, Path(options.csv))
    return 0


def _train_step(options: argparse.Namespace) -> int:
    """Check a quantized layer or network for correctness, then time its training step.

    The float twin's step is timed in turn, in one process. Prints medians and the median of the ratios within a
    round, and the MiB that are saved for the backward.
    """
    from .. import schemes
    from ..bench import train_step

    settings = train_step.Settings(
        batch_size=options.batch_size,
        rounds=options.rounds,
        warmup=options.warmup,
        device=options.device,
        autocast=options.autocast,
        channels_last=options.channels_last,
        compile=options.compile,
        peak=options.peak,
    )
    cases = [train_step.Case.named(text) for text in options.case]  # a mistake in the last one shows at once
    kinds: tuple[train_step.Lean | None, ...] = (None, "exact", "fast") if options.lean else (None,)
    results = (
        train_step.measure(case, getattr(schemes, name)(), settings, lean)
        for case in cases
        for name in options.scheme
        for lean in kinds
    )
    return _report(train_step.Result, options.csv, results)


def _data(options: argparse.Namespace) -> int:
    """Time qconv's loaders and torchvision's, in turn in one process.

    The images are small images that lie in memory, and large ones that one worker process decodes, or only crops if
    they are prepared. Prints medians and the median of the ratios within a round.
    """
    from ..bench import data

    if not options.small and not options.large:
        raise ValueError("name --small, --large or both: folders of images")
    if options.prepared and not options.large:
        raise ValueError("--prepared needs --large, the original images")
    sides = (
        (options.small, data.measure_small),
        (options.large, data.measure_large),
        (options.prepared, partial(data.measure_prepared, options.large, normalized=True)),
        (options.prepared, partial(data.measure_prepared, options.large, normalized=False)),
    )
    results = (measure(root, options.batch_size, options.rounds) for root, measure in sides if root)
    return _report(data.Result, options.csv, results)


def _binary_conv(options: argparse.Namespace) -> int:
    """Check binary convolutions against torch's, then time both in turn.

    They are a float input whose signs are packed, convolved and scaled to floats, against float32 conv2d in the
    faster of its two memory formats.
    """
    from ..bench import binary_conv

    results = (
        binary_conv.measure(case, batch_size, options.rounds)
        for batch_size in options.batch_size
        for case in options.case
    )
    return _report(binary_conv.Result, options.csv, results)
