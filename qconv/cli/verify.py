"""``qconv verify``: the proof that what ships is what was trained."""

import argparse
from typing import Any

from .source import add_model, inputs, packed_file


def add(commands: Any) -> None:
    """The command and its arguments."""
    parser = commands.add_parser(
        "verify",
        help="prove that what ships computes what was trained",
        description="Freeze a packed model, and compare it on pictures, layer by layer: of a run with the network of "
        "its best checkpoint, else with the model in the file. Codes and sums of integers must be equal, floats within "
        "what rounding explains. The exit status is 1 if they are not.",
        epilog="example: qconv verify outputs/2026-01-31/12-00-00",
    )
    add_model(parser)
    parser.add_argument(
        "pictures", metavar="PICTURE", nargs="*", help="picture files (default: 64 training pictures of the run)"
    )
    parser.add_argument(
        "--onnx",
        metavar="FILE",
        help="compare what ONNX Runtime makes of this file instead; status 1 if a class differs",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what was found; 1 where something differs."""
    from ..inference import verify

    file = packed_file(options.model)
    model, pictures = trained_and_pictures(options)
    if options.onnx is not None:
        from ..onnx import compare_onnx

        compared = compare_onnx(model, options.onnx, pictures)
        print(compared)
        return 0 if compared.agrees else 1
    found = verify(model, file, pictures.split(32))
    print(found)
    return 0 if found.equal else 1


def trained_and_pictures(options: argparse.Namespace) -> tuple[Any, Any]:
    """The network that the packed file is compared with, and what it is shown."""
    from ..predict import Predictor

    if options.model.is_dir():
        from ..training.finished import FinishedRun

        finished = FinishedRun(options.model)
        model = finished.trained()
        if not options.pictures:
            return model, finished.examples(64)
        return model, inputs(Predictor(packed_file(options.model)), options.pictures)
    if not options.pictures:
        raise ValueError(f"PICTURE must be given with {options.model}, which is a file: only a run knows its pictures")
    predictor = Predictor(options.model)
    return predictor.model, inputs(predictor, options.pictures)
