"""The wheel holds everything: installed without the checkout it trains, evaluates, exports and predicts."""

import json
import os
import shutil
import site
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import qconv

ROOT = Path(qconv.__file__).parent.parent
UV = shutil.which("uv") or ""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command `qconv` of a new environment with the wheel; its dependencies are those of this one."""
    folder = tmp_path_factory.mktemp("wheel")
    # The kernels are built for the environment of the tests already, which takes half a minute.
    without_kernels = {**os.environ, "SKBUILD_WHEEL_CMAKE": "false", "SKBUILD_WHEEL_PY_API": "py3"}
    env = folder / "env"
    uv = partial(subprocess.run, check=True, env=without_kernels)
    uv([UV, "build", "--quiet", "--wheel", "--out-dir", str(folder), str(ROOT)])
    uv([UV, "venv", "--quiet", "--python", sys.executable, str(env)])
    (wheel,) = folder.glob("*.whl")
    uv([UV, "pip", "install", "--quiet", "--no-deps", "--python", str(env / "bin/python"), str(wheel)])
    (packages,) = env.glob("lib/*/site-packages")
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()))  # not what they import at their start
    return env / "bin/qconv"


@pytest.mark.nightly
@pytest.mark.skipif(not UV or os.name == "nt", reason="needs uv")
def test_a_wheel_is_enough(program: Path, tmp_path: Path) -> None:
    def run(*words: str) -> str:
        done = subprocess.run([program, *words], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (tmp_path / "conf/scheme").mkdir(parents=True)
    (tmp_path / "conf/scheme/mine.yaml").write_text("_target_: own.coarse\nbits: 3\n")
    code = "from qconv import schemes\n\ndef coarse(bits):\n    return schemes.lsq(weight_bits=bits)\n"
    (tmp_path / "own.py").write_text(code)
    quick = ("model.width=4", "trainer.max_epochs=1", "run_dir=run")
    run("train", "--config-dir", "conf", "scheme=mine", *quick)
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert "weight_bits=3" in result["scheme"]
    assert (tmp_path / "run/report.html").is_file()
    assert "test accuracy" in run("evaluate", "run")
    run("export", "run", "--to", "onnx")
    assert (tmp_path / "run/model.onnx").is_file()
    shutil.copy(ROOT / "experiments/digits_default/curves.png", tmp_path / "picture.png")
    assert "picture.png" in run("predict", "smallcnn-bnn-digits", "picture.png")
