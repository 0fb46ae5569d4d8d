"""Write a trained model to a file.

--to packed packs the best checkpoint of a run. The others (program for qconv_run, which needs no Python) take the
packed file, or the checkpoint if there is none; they need example images: the files that you name (then there must be a
packed file), else training images of the run.
"""

import argparse
import json
from pathlib import Path

from ..runs.run_files import PACKED
from .source import Source, add_model, add_pictures

PICTURES = 256  # of a run, if none are named
OTHERS = "program", "litert", "openvino", "executorch", "qonnx", "pt2"

HELP = "write a trained model as a packed file, or for another runtime"
EXAMPLE = "qconv export outputs/2026-01-31/12-00-00 --to onnx"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_model(parser, "; --to packed takes only a run")
    add_pictures(parser, f"image files, not for --to packed (default: {PICTURES} of the run)")
    parser.add_argument("--to", choices=["packed", "onnx", *OTHERS], required=True, help="the kind of file")
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help=f"default: {PACKED}, or model.onnx, model.tflite and so on, in the folder of the run or file; for the "
        "zoo, in the current folder",
    )
    parser.add_argument(
        "--round-outputs",
        action="store_true",
        default=None,
        help="ONNX, LiteRT and ExecuTorch: round to 8 bits between layers, over the range that some hundred images "
        "show; much faster with many channels or 8 bits, but predicted classes can change",
    )
    parser.add_argument(
        "--four-bits",
        action="store_true",
        default=None,
        help="ONNX and LiteRT: store 4-bit integers in half a byte, which few programs read, or fast",
    )
    parser.add_argument(
        "--opset",
        type=int,
        help="ONNX: the version of its operators, from 13 to 25 (default: 17, or 21 with four bits)",
    )
    parser.set_defaults(run=run)


def _described(source: Source) -> dict[str, str]:
    """Return images and classes of the packed file, for the ONNX file's metadata; empty without a packed file."""
    if source.is_run and not (source.path / PACKED).is_file():
        return {}
    from ..packed.load import read_header

    header = read_header(source.packed_file)
    pictures = {} if header.pictures is None else {"pictures": header.pictures.model_dump_json()}
    return pictures | ({} if header.classes is None else {"classes": json.dumps(header.classes)})


def run(options: argparse.Namespace) -> int:
    """Write the file, and print its size."""
    source: Source = options.model
    folder = source.path if source.is_run else source.path.parent
    compared = None
    given = {name: getattr(options, name) for name in ("round_outputs", "four_bits", "opset")}
    chosen = {name: value for name, value in given.items() if value is not None}
    of_target = {"onnx": {*chosen}, "litert": {"four_bits", "round_outputs"}, "executorch": {"round_outputs"}}
    if not chosen.keys() <= of_target.get(options.to, set()):
        raise ValueError(
            "--round-outputs is for --to onnx, litert and executorch, --four-bits for onnx and litert, --opset for onnx"
        )
    if options.to == "packed":
        if options.pictures:
            raise ValueError("--to packed takes no IMAGE")
        if not source.is_run:
            raise ValueError(f"{source.path} must be the folder of a run: this is a packed model already")
        out = options.out or folder / PACKED
        source.run.pack(out)
    else:
        example = source.inputs(options.pictures, PICTURES, "train")
        model = source.predictor.model if options.pictures else source.shipped()
        if options.to == "onnx":
            from ..onnx import export_onnx

            out = options.out or folder / "model.onnx"
            compared = export_onnx(model, out, example, **chosen, metadata=_described(source))
        else:
            from ..export.targets import TARGETS, exported
            from ..ground.checks import some

            out = options.out or folder / TARGETS[options.to].file
            program, left = exported(model, out, options.to, example, **chosen)
            is_any = options.to in ("program", "pt2") and program is not None and program.size is None
            size = "any height and width" if is_any else "{} x {} pixels".format(*example.shape[2:])
            print(f"takes images of {example.shape[1]} channels and {size}")
            if left:
                print(f"layers that compute on floats, with whole numbers: {some(left)}")
    for file in (out, out.with_suffix(".bin")) if options.to == "openvino" else (out,):
        print(f"{file}: {file.stat().st_size:,} bytes")
    if compared is not None:
        print(f"against the trained model: {compared}")
    return 0
