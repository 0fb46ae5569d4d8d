"""Show the layers of a packed model: bits, parameters, multiply-accumulates, bytes."""

import argparse
from dataclasses import replace
from pathlib import Path

from .source import add_model

HELP = "show what a packed model consists of"
EXAMPLE = "qconv summary outputs/2026-01-31/12-00-00"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add_model(parser)
    parser.add_argument("--csv", metavar="FILE", help="also write the rows to a CSV file")
    parser.add_argument("--json", metavar="FILE", help="also write rows and totals to a JSON file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    from ..ground.table import screen_width
    from ..packed import load_for_pictures
    from ..summary import summarize
    from ..summary.terminal import screen_text

    file = options.model.packed_file
    model, _, pictures = load_for_pictures(file, options.model.unnamed_network)
    table = summarize(model, pictures.size)
    of_rows = sum(row.packed_bytes for row in table.rows)
    table = replace(table, header_bytes=Path(file).stat().st_size - of_rows)  # with its descriptions
    if options.csv:
        table.to_csv(options.csv)
    if options.json:
        table.to_json(options.json)
    width = screen_width()
    print(table if width is None else screen_text(table, width))
    return 0
