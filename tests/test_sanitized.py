"""The C kernels under gcc's sanitizers of addresses and of undefined behaviour."""

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from qconv.kernels import native


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_kernels_touch_no_memory_but_theirs(tmp_path: Path) -> None:
    """All kernels, built with sanitizers, on random calls in a process of their own."""
    library = tmp_path / "_binary.so"
    options = "-O1", "-g", "-fPIC", f"-I{sysconfig.get_path('include')}", "-fno-sanitize-recover=all"
    compilers, objects = [], []
    for source in sorted((Path(native.__file__).parent / "csrc").glob("*.c")):
        objects.append(str(tmp_path / f"{source.stem}.o"))
        # With the checks of undefined behaviour, or those of addresses in place, the loops of bits.c take gcc a minute.
        in_calls = "-fsanitize=address", "--param", "asan-instrumentation-with-call-threshold=0"
        checks = in_calls if source.stem == "bits" else ("-fsanitize=address,undefined",)
        compilers.append(subprocess.Popen(["cc", *options, *checks, "-c", str(source), "-o", objects[-1]]))
    codes = [compiler.wait() for compiler in compilers]
    assert not any(codes)
    link = "-shared", "-fsanitize=address,undefined"
    subprocess.run(["cc", *link, *objects, "-ldl", "-lm", "-lpthread", "-o", str(library)], check=True)
    found = subprocess.run(["cc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True)
    environment = {
        "LD_PRELOAD": found.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "PATH": "/usr/bin:/bin",
    }
    program = Path(__file__).with_name("sanitized.py")
    done = subprocess.run(
        [sys.executable, str(program), str(library)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
