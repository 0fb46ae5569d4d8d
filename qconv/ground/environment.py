"""The environment of a measurement: machine, versions, commit."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch


def machine() -> dict[str, str | int | None]:
    """Processor, number of cores that this process may use, threads of torch, and the GPU's name or None."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"cpu": _cpu_name(), "cores": cores, "threads": torch.get_num_threads(), "gpu": gpu}


def versions() -> dict[str, str]:
    """Versions of Python, qconv and the packages it trains with, if installed."""
    installed = {"python": platform.python_version()}
    for package in ("qconv", "torch", "torchvision", "pytorch-lightning", "hydra-core", "scikit-learn", "numpy"):
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return installed


def commit() -> str | None:
    """The commit of the source tree of qconv, with ``-dirty`` if it has changes; None outside a checkout."""
    root = Path(__file__).parents[2]

    def git(*arguments: str) -> str:
        return subprocess.run(
            ("git", *arguments), cwd=root, check=True, capture_output=True, text=True, timeout=10
        ).stdout.strip()

    try:
        if not (root / ".git").exists():  # installed below somebody else's checkout
            return None
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + ("-dirty" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
