"""All methods on a device that is not the CPU, for want of a GPU."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

HERE = Path(__file__).parent


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_everything_stays_on_the_device(tmp_path: Path) -> None:
    """`other_device.py` in a process of its own, as the device is known to all of torch."""
    library = tmp_path / "other.so"
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    options = "-std=c++20", "-w", "-shared", "-fPIC", abi, *includes
    libraries = *(f"-L{path}" for path in cpp_extension.library_paths()), "-ltorch_cpu", "-lc10"
    subprocess.run(["c++", *options, str(HERE / "other_device.cpp"), *libraries, "-o", str(library)], check=True)
    words = [sys.executable, str(HERE / "other_device.py"), str(library)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
