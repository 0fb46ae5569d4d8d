"""``qconv train --help``, without Hydra, whose own help composes a config per group and takes seconds."""

import argparse
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from .configs import folder, scheme_defaults

NARROWEST, WIDEST = 60, 120
LEFT = 38  # columns of an example or a group
ABOUT = "Train a quantized convolutional network, test it, and write all files into the run's folder."
EXAMPLES = (
    ("(nothing)", "the default: a binary network on handwritten digits"),
    ("scheme=bwn", "another quantization scheme"),
    ("scheme=shift_q scheme.weight_bits=4", "with its arguments"),
    ("model=resnet20 optimizer.lr=0.005", "another network, another learning rate"),
    ("'skip=[first,last,fc]' seed=2", "which layers stay float"),
    ("scheme=lsq first_last=w8a8", "8 bits for the first and the last layer"),
    ("scheme=dorefa grad_quantizer=int8", "gradients of 8 bits"),
    ("'overrides={blocks.1.*:{_target_:qconv.schemes.bwn}}'", "another scheme for some layers"),
    ("experiment=digits_resnet20_bwn", "a whole recipe"),
    ("data=image_folder data.root=pictures", "your own images, a folder for each class"),
    ("-m scheme=identity,bwn,bnn seed=1,2,3", "a sweep, with a table at its end"),
    ("resume=outputs/…", "continue the run in this folder"),
    ("resume=outputs/… trainer.max_epochs=40", "and for more epochs"),
    ("resume=auto run_dir=runs/a scheme=lsq", "continue the run in this folder if there is one, or start it"),
    ("evaluate=outputs/…/checkpoints/best.ckpt", "test this checkpoint; simpler: qconv evaluate RUN"),
)
FLAGS = (
    ("--config-dir DIR", "also use your own configs, such as DIR/scheme/mine.yaml"),
    ("--cfg job", "show the composed config and stop"),
    ("--hydra-help", "all flags of Hydra, which composes the config"),
    ("HYDRA_FULL_ERROR=1", "environment variable: show the whole traceback of an error"),
)


def text(program: str, words: Sequence[str], width: int | None = None) -> str:
    """Return the help, by default as wide as the terminal; a ``--config-dir`` among the words adds groups."""
    width = max(min(shutil.get_terminal_size().columns, WIDEST) if width is None else width, NARROWEST)
    places = (folder(), *_own(words))
    written = (folder() / "config.yaml").read_text(encoding="utf-8")
    keys = re.findall(r"^(\w+): *(\S.*)$", written, re.MULTILINE)
    settings = ", ".join(f"{key}={value.replace(', ', ',')}" for key, value in keys)
    parts = [
        f"usage: {program} [KEY=VALUE ...] [GROUP=OPTION ...] [-m]",
        textwrap.fill(ABOUT, width),
        f"examples, each after {program}:\n" + _rows(EXAMPLES, width),
        "groups (GROUP=OPTION chooses a config, GROUP.KEY=VALUE changes a value in it):\n"
        + _rows([(group, ", ".join(options)) for group, options in _groups(places)], width),
        f"settings and their defaults; what they mean is in\n{folder() / 'config.yaml'}\n"
        + textwrap.fill(settings, width, initial_indent="  ", subsequent_indent="  ", break_long_words=False),
        "flags:\n" + _rows(FLAGS, width),
    ]
    return "\n\n".join(parts)


def _rows(rows: Sequence[tuple[str, str]], width: int) -> str:
    left = min(LEFT, max(len(head) for head, _ in rows))
    lines = []
    for head, body in rows:
        wrapped = textwrap.wrap(body, width - left - 4, break_long_words=False, break_on_hyphens=False)
        if len(head) > left:
            lines.append(f"  {head}")
        else:
            lines.append(f"  {head:{left}}  {wrapped.pop(0)}")
        lines += [f"  {'':{left}}  {line}" for line in wrapped]
    return "\n".join(lines)


def _own(words: Sequence[str]) -> list[Path]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path, nargs="?")
    chosen = parser.parse_known_args([word for word in words if word not in ("-h", "--help")])[0].config_dir
    return [] if chosen is None else [chosen]


def _groups(places: Sequence[Path]) -> Iterator[tuple[str, list[str]]]:
    """The groups of configs and their options."""
    found = {"scheme": {name for name, _ in scheme_defaults()}}
    for place in places:
        for path in place.glob("*/**/*.yaml"):
            found.setdefault(path.parent.relative_to(place).as_posix(), set()).add(path.stem)
    for group in sorted(found):
        yield group, sorted(found[group])
