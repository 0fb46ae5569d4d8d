"""Write one HTML page about a run, which needs no network.

It has layers, curves, confusion matrix, accuracy by class, the most confident mistakes as images, diagnostics, size and
latency, and how to load the network. Every run writes it at its end; of an interrupted one it shows what there is.
"""

import argparse
from pathlib import Path

from ..runs.run_files import PAGE

SECONDS = 1.0  # to time each batch size

HELP = "write the page of a run: what was trained, curves, mistakes, latency"
EXAMPLE = "qconv report outputs/2026-01-31/12-00-00"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("folder", metavar="RUN", type=Path, help="folder of a run, which must be trusted")
    parser.add_argument("--out", metavar="FILE", type=Path, help="the file to write (default: report.html in RUN)")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the page, and print its place."""
    from ..training.report.gather import gather
    from ..training.report.page import write_page

    out: Path = options.out or options.folder / PAGE
    if options.out and not out.parent.is_dir():
        raise FileNotFoundError(f"--out (={out}): there is no folder {out.parent}")
    write_page(gather(options.folder, seconds=SECONDS), out)
    print(f"{out}: {out.stat().st_size:,} bytes")
    return 0
