"""List the trained networks that come with qconv, or show the card of one.

A card has its training data, its training, and its results. predict, summary, bench model, verify and export --to onnx
accept its name in place of a run; verify and export need your own images after it.
"""

import argparse

HELP = "list the trained networks that come with qconv"
EXAMPLE = "qconv zoo smallcnn-bnn-digits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="show the card of this network")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table, or the card."""
    from .. import zoo
    from ..ground.table import Column, lines

    if options.name is not None:
        print(zoo.card(options.name).markdown(), end="")
        return 0
    columns = [Column("name"), Column("bits w/in"), Column("test", True), Column("bytes", True), Column("title")]
    cards = [zoo.card(name) for name in zoo.names()]
    rows = [(c.name, c.bits, f"{100 * c.test_accuracy:.2f} %", f"{c.packed_bytes:,}", c.title) for c in cards]
    print("\n".join(lines(rows, columns)))
    return 0
