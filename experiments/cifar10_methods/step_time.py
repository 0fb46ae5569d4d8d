"""Times a training step of each of the study's networks against its twin of `nn.Conv2d`: writes `step_times.csv`.

    uv run experiments/cifar10_methods/step_time.py [METHOD…]

Both sides run in turn, in one process: first as they are, then compiled.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from run import HERE, METHODS, ROOT

from qconv.bench.train_step import Case, Result, Settings, measure
from qconv.cli.configs import store_schemes

TIMED = [
    method
    for method, (_, words) in METHODS.items()
    if not any(word.startswith(("step_rules", "dampening", "scheme=layerwise")) for word in words)
]
"""What is timed is the network and its loss: neither what happens around a step, nor stages of a training."""


def main(methods: list[str], settings: Settings, file: Path) -> None:
    """Measure, and write a row for each method and side."""
    print(Result.header())
    store_schemes()
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        for method in methods:
            cfg = compose("config", ["experiment=cifar10_methods", "data.root=-", "run_dir=-", *METHODS[method][1]])
            case = Case(method, 3, 32, False, instantiate(cfg.model, _partial_=True, in_channels=3, num_classes=10))
            for compiled in (False, True):
                torch.compiler.reset()
                result = measure(case, instantiate(cfg.scheme), replace(settings, compile=compiled))
                print(result.line(), "compiled" if compiled else "", flush=True)
                result.append_to(str(file))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("methods", nargs="*", metavar="METHOD", help=f"some of: {', '.join(TIMED)}; all by default")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=HERE / "step_times.csv")
    options = parser.parse_args()
    unknown = [method for method in options.methods if method not in TIMED]
    if unknown:
        parser.error(f"METHOD (={unknown[0]!r}) must be one of {', '.join(TIMED)}")
    main(options.methods or TIMED, Settings(128, options.rounds, channels_last=True), options.out)
