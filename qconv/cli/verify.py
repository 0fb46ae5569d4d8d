"""Freeze the packed model and compare it, layer by layer, with the trained network.

This is for a run with its best checkpoint, for a packed file with the model in it. Codes and sums of integers must be
equal; floats may differ only by rounding. The exit status is 1 if they do not agree.
"""

import argparse

from .source import Source, add_model, add_pictures

PICTURES = 64  # of a run, if none are named
INTERPRETERS = "xnnpack", "builtin", "micro"

HELP = "check that what ships computes what was trained"
EXAMPLE = "qconv verify outputs/2026-01-31/12-00-00"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_model(parser)
    add_pictures(parser, f"image files (default: up to {PICTURES} validation images of the run)")
    parser.add_argument(
        "--exported",
        "--onnx",
        metavar="FILE",
        help="instead run this file of qconv export in its own runtime: each code must be that of the floats before "
        "it; for ONNX and programs, which show no codes, all predicted classes must agree",
    )
    parser.add_argument(
        "--interpreter",
        choices=INTERPRETERS,
        help="of a LiteRT file: with XNNPACK, as on phones (default); the builtin kernels, without it; or LiteRT for "
        "Microcontrollers, which has others",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the result; return 1 if anything differs."""
    from ..ground.table import screen_width
    from ..inference import verify

    source: Source = options.model
    if options.interpreter is not None and options.exported is None:
        raise ValueError("--interpreter needs --exported FILE")
    if options.exported is not None:
        from ..export import verify_export

        images = source.inputs(options.pictures, PICTURES, "val")
        compared = verify_export(source.trained(), options.exported, images, interpreter=options.interpreter)
        print(compared.text(screen_width()))
        return 0 if compared.agrees else 1
    file, pictures = source.packed_file, source.inputs(options.pictures, PICTURES, "val")
    verification = verify(source.trained(), file, pictures.split(32))
    print(verification.text(screen_width()))
    return 0 if verification.equal else 1
