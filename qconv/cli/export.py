"""``qconv export``: a trained model as a file for use elsewhere."""

import argparse
from pathlib import Path
from typing import Any

from ..packed import FILE
from .source import add_model, inputs, packed_file


def add(commands: Any) -> None:
    """The command and its arguments."""
    parser = commands.add_parser(
        "export",
        help="write a trained model as a packed or ONNX file",
        description="Write the model of a run, or of a packed file, for use elsewhere. A run's packed file is made of "
        "its best checkpoint. An ONNX file is made of the packed file, or of the checkpoint if there is none; it needs "
        "pictures as in use: those named (then the packed file must be there), else training pictures of the run.",
        epilog="example: qconv export outputs/2026-01-31/12-00-00 --to onnx",
    )
    add_model(parser, "; --to packed takes a run")
    parser.add_argument("pictures", metavar="PICTURE", nargs="*", help="picture files, for --to onnx")
    parser.add_argument("--to", choices=["packed", "onnx"], required=True, help="the kind of file")
    parser.add_argument("--out", metavar="FILE", type=Path, help=f"default: {FILE} or model.onnx in the run's folder")
    parser.add_argument(
        "--round-outputs", action="store_true", help="ONNX: round to 8 bits between layers; faster with many channels"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the file, and print its size."""
    source: Path = options.model
    folder = source if source.is_dir() else source.parent
    if options.to == "packed":
        from ..training.finished import FinishedRun

        if options.pictures or options.round_outputs:
            raise ValueError("PICTURE and --round-outputs are for --to onnx")
        if not source.is_dir():
            raise ValueError(f"{source} must be the folder of a run, which --to packed reads")
        out = options.out or folder / FILE
        FinishedRun(source).pack(out)
    else:
        from ..onnx import export_onnx

        out = options.out or folder / "model.onnx"
        model, example = model_and_example(source, options.pictures)
        export_onnx(model, out, example, round_outputs=options.round_outputs)
    print(f"{out}: {out.stat().st_size:,} bytes")
    return 0


def model_and_example(source: Path, pictures: list[str]) -> tuple[Any, Any]:
    """The model of a run or packed file, and inputs for it."""
    if pictures:
        from ..predict import Predictor

        predictor = Predictor(packed_file(source))
        return predictor.model, inputs(predictor, pictures)
    if not source.is_dir():
        raise ValueError(f"PICTURE must be given with {source}, which is a file: only a run knows its pictures")
    from ..training.finished import FinishedRun

    finished = FinishedRun(source)
    return finished.model(), finished.examples(256)
