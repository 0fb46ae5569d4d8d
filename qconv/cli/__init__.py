"""The command-line program ``qconv``: one file per subcommand."""

import argparse
import io
import os
import select
import signal
import sys
from collections.abc import Sequence

from .. import __version__
from ..ground.extras import needed
from . import bench, compare, data, evaluate, export, predict, report, summary, train_help, verify, zoo


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``qconv`` with the given arguments (by default the command line's); return the exit status."""
    words = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files may be no UTF-8
    if words[:1] == ["train"]:  # Hydra reads the others
        return train_as("qconv train", words[1:])
    find_own_modules()
    parser = argparse.ArgumentParser(
        prog="qconv",
        description="Train, run, measure and ship quantized convolutional networks.",
    )
    parser.add_argument("--version", action=Version, nargs=0, help="show versions, kernels and device, and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    commands.add_parser("train", help="train a network; its options: qconv train --help")
    for command in (evaluate, compare, predict, report, summary, verify, export, data, bench, zoo):
        name = command.__name__.rpartition(".")[2]
        texts = {"help": command.HELP, "description": command.__doc__, "epilog": f"example: {command.EXAMPLE}"}
        command.add_arguments(commands.add_parser(name, **texts))
    # argparse takes no positional after an option where there may be none before it: verify RUN --onnx FILE IMAGE
    options, more = parser.parse_known_args(words)
    if more and (not hasattr(options, "more") or any(word.startswith("-") for word in more)):
        command = next(word for word in words if word in commands.choices)
        commands.choices[command].error(f"unrecognized arguments: {' '.join(more)}")
    if more:
        getattr(options, options.more).extend(more)
    try:
        with needed(f"qconv {words[0]}"):
            status = options.run(options)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("\nqconv: stopped by Ctrl-C", file=sys.stderr)
        return 128 + signal.SIGINT
    except (ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
        if not (isinstance(error, BrokenPipeError) and is_reader_gone()):
            print(f"qconv: error: {error}", file=sys.stderr)
        return 1


class Version(argparse.Action):
    """Prints what a report of a fault needs."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from ..ground.environment import machine, versions
        from ..kernels.native import INSTRUCTION_SETS, instruction_sets, number_of

        installed, here = versions(), machine()
        shown = {"Python": "python", "torch": "torch", "Lightning": "pytorch-lightning"}
        print(f"qconv {__version__}")
        print(", ".join(f"{name} {installed.get(package, 'not installed')}" for name, package in shown.items()))
        print(f"C kernels: {INSTRUCTION_SETS[number_of(None)] if instruction_sets() else 'not installed'}")
        print(f"device: {here['gpu'] or 'CPU'} ({here['cpu']}, {here['threads']} threads)")
        parser.exit()


def is_reader_gone() -> bool:
    """Whether stdout or stderr has no reader any more, such as ``head``; further output is then discarded.

    Other pipes can break, too, such as pipes to a worker or to a logger's server.
    """
    gone = []
    for number in (sys.stdout.fileno(), sys.stderr.fileno()):
        ends = select.poll()
        ends.register(number, 0)  # errors alone
        if ends.poll(0):
            gone.append(number)
    for number in gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), number)  # or Python complains at its end
    return bool(gone)


def find_own_modules() -> None:
    """Make modules in the current folder importable, so that configs can name their functions."""
    if "" not in sys.path:
        sys.path.append("")


def train_as(program: str, words: Sequence[str]) -> int:
    """Run ``qconv train``, which calls itself `program`, with the words after it; return the exit status."""
    find_own_modules()
    try:
        if {"-h", "--help"} & {*words}:
            print(train_help.text(program, words), flush=True)
            return 0
        try:
            with needed(program):
                from .train import run_main
        except ImportError as error:
            print(f"qconv: error: {error}", file=sys.stderr)
            return 1
        run_main(program, words)
    except BrokenPipeError as error:
        if not is_reader_gone():
            print(f"{program}: error: {error}", file=sys.stderr)
        return 1
    return 0
