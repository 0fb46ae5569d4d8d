"""What experiments with several trainings share: a training in a process of its own, and words of command lines."""

import json
import signal
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qconv.ground.table import read_csv
from qconv.runs.run_files import METRICS, RESULT

ROOT = Path(__file__).parent.parent
BINARY = ["model.shortcut=per_conv", "model.activation._target_=torch.nn.Hardtanh"]
"""The blocks of binary networks."""
BFLOAT16 = "trainer.precision=bf16-mixed"
"""Convolutions read and write bfloat16, weights stay float32: steps are faster, and no formula changes."""
BFLOAT16_IF_NATIVE = "trainer.precision=bf16-if-native"
"""bfloat16 where the processor multiplies it by instructions, float32 elsewhere."""
EWGS_RULES = "optimizer.rules={quantizers:{lr_scale:0.01,weight_decay:0}}"  # as the recipe has it
APOT_RULES = (
    "optimizer.rules={input_quantizers:{lr:0.1,weight_decay:1e-4},weight_quantizers:{lr:0.02,weight_decay:1e-4}}"
)


def bits(scheme: str, count: int) -> list[str]:
    """Return the overrides of a scheme with as many bits for weights as for inputs."""
    return [f"scheme={scheme}", f"scheme.weight_bits={count}", f"scheme.input_bits={count}"]


def chosen(parser: ArgumentParser, what: str, names: Sequence[str], known: Mapping[str, Any]) -> list[str]:
    """Return the names of a command line, or all known ones if there are none; an unknown one ends the program."""
    if unknown := [name for name in names if name not in known]:
        parser.error(f"{what} (={unknown[0]!r}) must be one of {', '.join(known)}")
    return list(names or known)


def call(words: Sequence[str]) -> None:
    """Run a command of the program; SIGTERM ends it with a checkpoint, as Ctrl-C does.

    Raises:
        SystemExit: it has failed, or was ended.
    """
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with subprocess.Popen([sys.executable, "-m", "qconv", *words], cwd=ROOT) as process:
            try:
                status = process.wait()
            except SystemExit:
                process.terminate()
                raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if status != 0:
        raise SystemExit(status)


def train(words: Sequence[str], folder: Path) -> None:
    """Train in ``folder``, from its last checkpoint if it has one; nothing if the run there is done."""
    if not (folder / RESULT).is_file():
        call(["train", *words, f"run_dir='{folder}'", "resume=auto"])


def figures(folder: Path) -> dict[str, Any]:
    """Return what the row of a finished run has in every experiment."""
    result = json.loads((folder / RESULT).read_text())
    of_run = (
        "seed",
        "test_accuracy",
        "val_accuracy_best",
        "val_accuracy_final",
        "epochs",
        "seconds",
        "scheme",
        "commit",
    )
    return {
        **{name: result[name] for name in of_run},
        "train_accuracy_final": read_csv(folder / METRICS)[-1]["train_accuracy"],
        "precision": result["precision"],
        **result["machine"],
        "torch": result["versions"]["torch"],
    }
