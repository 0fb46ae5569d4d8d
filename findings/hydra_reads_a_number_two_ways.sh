#!/usr/bin/env bash
# hydra-core 1.3.8, omegaconf 2.3.1: the same digits are one number in a file, and another as an override.
#
# Expected: `seed: 010` in a configuration's file and `seed=010` at the command line are the same.
# Happens: files are YAML 1.1, where a leading 0 means octal, and a colon base 60; overrides have a grammar of their
# own, which makes strings of these, and the field's type makes a decimal number of "010". The other way round, `inf`
# and `nan` are floats as overrides, and strings in a file. Nothing is said.
# Seen, in fields of int and float: 010 is 8 and 10, 0123 is 83 and 123. Without types, 010 is 8 and the string "010",
# 0x10 is 16 and "0x10", 1:30 is 90 and "1:30", and inf the string "inf" and infinity. 1e-4, 1_000 and .5 are equal.
set -euo pipefail
cd "$(mktemp -d)" && trap 'rm -rf "$PWD"' EXIT
uv venv --quiet environment
uv pip install --quiet --python environment/bin/python hydra-core==1.3.8 omegaconf==2.3.1
environment/bin/python - "$PWD" 2>errors <<'END' || { cat errors; exit 1; }
import dataclasses
import math
import pathlib
import sys

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore


@dataclasses.dataclass
class Typed:
    seed: int = 0


ConfigStore.instance().store(name="typed", node=Typed)


def both(text, is_typed=False):
    """What a number is in a file, and as an override."""
    defaults = "defaults: [typed, _self_]\n" if is_typed else ""
    found = []
    with initialize_config_dir(sys.argv[1], version_base="1.3"):
        for in_file, overrides in ((text, []), ("0", [f"seed={text}"])):
            pathlib.Path("config.yaml").write_text(f"{defaults}seed: {in_file}\n")
            found.append(compose("config", overrides).seed)
    print(f"{text}, {'int' if is_typed else 'no type'}: {found[0]!r} in a file, {found[1]!r} as an override")
    return found


assert both("010", is_typed=True) == [8, 10]
assert both("0123", is_typed=True) == [83, 123]
assert both("010") == [8, "010"]
assert both("0x10") == [16, "0x10"]
assert both("1:30") == [90, "1:30"]
assert both("inf") == ["inf", math.inf]
for text in ("1e-4", "1_000", ".5", "10"):
    in_file, override = both(text)
    assert in_file == override and type(in_file) is type(override)
END
