"""Compare the results of runs in a table.

It shows what differs between them, accuracy as mean ± standard deviation over the seeds, bits, bytes, time, epochs.
Runs that differ only by their seed are one row. Folders are searched for runs; unfinished and damaged ones are named.
In a CSV file of your own loop each row is a run: its scheme, seed and test_accuracy (a share), where they are known
val_accuracy_best, epochs, seconds and packed_bytes, and any other column is a setting.
"""

import argparse
import sys
from pathlib import Path

HELP = "compare the results of runs in a table"
EXAMPLE = "qconv compare multirun/2026-01-31/12-00-00 --plot accuracy.png"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "places", metavar="RUN", nargs="+", type=Path, help="folder of a run, of a sweep, or of runs; or a CSV file"
    )
    parser.add_argument("--csv", metavar="FILE", type=Path, help="also write the rows to a CSV file")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="also write the table as Markdown")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="also draw the accuracies into a PNG file")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table; return 1 if there is no finished run."""
    from ..ground.table import Column, lines, screen_width, write_csv
    from ..runs.comparison_table import HEADS, cells, csv_rows, markdown, settings
    from ..runs.read_runs import find_runs
    from ..runs.run_groups import compare, telling

    runs, others = find_runs(options.places)
    groups, common, left_out = compare(runs)
    if groups:
        title = ", on ".join(common.values())
        heads = telling(groups)
        columns = [*map(Column, heads.values()), *(Column(head, is_right=True) for head in HEADS)]
        rows = [(*settings(group, heads), *cells(group)) for group in groups]
        print("\n".join([*([title, ""] if title else []), *lines(rows, columns, screen_width())]))
        if more := [key for key in groups[0].differs if key not in heads]:
            print(f"\nthese differ, too (--csv writes them): {', '.join(more)}")
    others += [(each.folder, "replaced by a newer run with the same settings and seed") for each in left_out]
    if others:
        print("\nleft out:", file=sys.stderr)
    for folder, reason in others:
        print(f"  {folder}: {reason}", file=sys.stderr)
    if not groups:
        print("qconv: error: no finished run to compare", file=sys.stderr)
        return 1
    if options.csv:
        write_csv(csv_rows(groups), options.csv)
    if options.markdown:
        options.markdown.write_text(markdown(groups), encoding="utf-8")
    if options.plot:
        from ..runs.comparison_figure import draw

        draw(groups, options.plot, ", on ".join(common.values()))
    return 0
