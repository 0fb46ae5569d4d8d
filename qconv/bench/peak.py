"""The peak memory of a call, above the memory that the process held before it."""

import ctypes
import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

Step = Callable[[], object]
_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def peak_mib(make: Callable[[], Step], device: str) -> float | None:
    """Measure the step that `make` makes, in a separate process; None if this device or system can't do that.

    On a GPU it is what torch has allocated at most, and on Linux the resident memory, where freed memory goes back to
    the system at once. The process runs the step twice before: what these leave behind does not count.
    """
    kind = torch.device(device).type
    if kind != "cuda" and not (kind == "cpu" and _RESET.exists()):
        return None
    done = subprocess.run(
        [sys.executable, "-c", "from qconv.bench.peak import answer; answer()"],
        input=pickle.dumps((make, device, torch.get_num_threads())),
        env={**os.environ, "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"},
        capture_output=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the process that measures memory failed: {done.stderr.decode(errors='replace')[-2000:]}")
    return float(done.stdout.split()[-1])


def answer() -> None:
    """Write the peak of the step described on standard input to standard output."""
    make, device, threads = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    step = make()
    step()
    step()
    gc.collect()
    peak = on_gpu(step, device) if torch.device(device).type == "cuda" else _resident(step)
    sys.stdout.write(f"\n{peak}\n")


def on_gpu(step: Step, device: str) -> float:
    """Return the MiB that torch allocates at most in a step on a GPU, above the memory before it."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def _resident(step: Step) -> float:
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    before = _resident_mib("VmRSS")
    _RESET.write_text("5")  # sets VmHWM, the highest VmRSS so far, to VmRSS
    step()
    return _resident_mib("VmHWM") - before


def _resident_mib(field: str) -> float:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) / 1024
