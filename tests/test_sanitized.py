"""The C kernels under gcc's sanitizers of addresses and of undefined behaviour."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from qconv.kernels import native


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_kernels_touch_no_memory_but_theirs(tmp_path: Path) -> None:
    """All kernels, built with sanitizers, on random calls in a process of their own."""
    sources = Path(native.__file__).parent / "csrc"
    library = tmp_path / "_binary.so"
    options = "-O1", "-g", "-shared", "-fPIC", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"
    files = [str(path) for path in sorted(sources.glob("*.c"))]
    include = f"-I{sysconfig.get_path('include')}"
    subprocess.run(["cc", *options, include, *files, "-ldl", "-o", str(library)], check=True)
    found = subprocess.run(["cc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True)
    environment = {"LD_PRELOAD": found.stdout.strip(), "ASAN_OPTIONS": "detect_leaks=0", "PATH": "/usr/bin:/bin"}
    program = Path(__file__).with_name("sanitized.py")
    done = subprocess.run(
        [sys.executable, str(program), str(library)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
