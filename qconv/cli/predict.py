"""``qconv predict``: the classes of pictures."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from .source import add_model


def add(commands: Any) -> None:
    """The command and its arguments."""
    parser = commands.add_parser(
        "predict",
        help="name the classes of pictures",
        description="Name the most probable classes of pictures, by the packed model that a run of train.py has left.",
        epilog="example: qconv predict outputs/2026-01-31/12-00-00 cat.jpg *.png",
    )
    add_model(parser)
    parser.add_argument("pictures", metavar="PICTURE", nargs="+", help="picture files")
    parser.add_argument("--top", type=int, default=3, help="how many classes of each picture (default: 3)")
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each picture")
    parser.set_defaults(run=run, more="pictures")


def run(options: argparse.Namespace) -> int:
    """Print a line for each picture; return 1 if one can't be read."""
    from ..images import DecodingError

    if options.top < 1:
        raise ValueError(f"--top (={options.top}) must be at least 1")
    predictor = options.model.predictor
    width = max(map(len, options.pictures))
    status = 0
    for path, guesses in shown(predictor.many(options.pictures, options.top), len(options.pictures)):
        if isinstance(guesses, DecodingError):  # continue with the others
            print(f"qconv: error: {guesses}", file=sys.stderr)
            status = 1
        elif options.json:
            print(json.dumps({"picture": path, "classes": [guess._asdict() for guess in guesses]}), flush=True)
        else:
            shares = "   ".join(f"{guess.label} {100 * guess.probability:.1f} %" for guess in guesses)
            print(f"{path:{width}}  {shares}", flush=True)
    return status


def shown(results: Iterable[Any], count: int) -> Iterator[Any]:
    """Yield the results, with a progress bar on a terminal if nothing else shows the progress."""
    if sys.stdout.isatty() or not sys.stderr.isatty():
        yield from results
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        yield from bar.track(results, count, description="naming pictures")
