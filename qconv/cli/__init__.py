"""The command-line program ``qconv``: one subcommand a job, one file each."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from .. import __version__
from . import bench, export, predict, summary, verify


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``qconv`` with the given arguments (by default the command line's); return the exit status."""
    parser = argparse.ArgumentParser(
        prog="qconv",
        description="Quantized convolutional networks: use what was trained, and measure.",
        epilog="Training is a program of its own: train.py in the repository.",
    )
    parser.add_argument("--version", action="version", version=f"qconv {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (predict, summary, verify, export, bench):
        command.add(commands)
    # argparse takes no positional after an option where there may be none before it: verify RUN --onnx FILE PICTURE
    options, more = parser.parse_known_args(arguments)
    if more and (not hasattr(options, "pictures") or any(word.startswith("-") for word in more)):
        parser.error(f"unrecognized arguments: {' '.join(more)}")
    if more:
        options.pictures += more
    try:
        status = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as `head`, has stopped reading
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at its end
        return 1
    except KeyboardInterrupt:
        print("\nqconv: stopped by Ctrl-C", file=sys.stderr)
        return 128 + signal.SIGINT
    except (ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
        print(f"qconv: error: {error}", file=sys.stderr)
        return 1
