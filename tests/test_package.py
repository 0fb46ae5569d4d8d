"""Imports: what they cost, which way they point, and what the package shows."""

import ast
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
import torch

import qconv
from qconv.cli import main
from qconv.ground.extras import MODULES

ROOT = Path(qconv.__file__).parent
ROOMS = {
    # each room of the package, from the ground up, and the rooms that it may import
    "ground": set(),
    "kernels": set(),
    "distillation": set(),
    "images": {"ground"},
    "grad": {"ground"},
    "models": {"ground"},
    "runs": {"ground"},
    "data": {"ground", "images"},
    "quantizers": {"ground", "kernels", "methods", "schemes"},  # of methods by name, when asked for
    "scheme": {"ground", "quantizers"},
    "methods": {"ground", "quantizers", "scheme"},
    "schemes": {"methods", "scheme"},
    "function": {"grad", "kernels", "quantizers"},
    "layers": {"function", "grad", "ground", "quantizers", "scheme", "schemes"},
    "lean": {"function", "ground", "kernels", "layers", "models", "quantizers"},
    "loop": {"ground", "layers", "quantizers"},
    "optim": {"ground", "layers", "loop", "quantizers"},
    "check": {"ground", "layers", "loop", "optim", "quantizers", "runs"},
    "convert": {"check", "ground", "layers", "lean", "scheme", "schemes"},
    "packed": {"convert", "ground", "layers", "lean", "models", "quantizers", "scheme"},
    "summary": {"ground", "layers", "lean", "packed", "quantizers"},
    "program": {"kernels"},
    "inference": {"convert", "function", "ground", "kernels", "layers", "lean", "packed", "program", "quantizers"},
    "onnx": {"ground", "inference", "layers", "program"},
    "zoo": {"ground", "images", "inference", "packed", "runs"},
    "export": {"ground", "inference", "layers", "onnx", "packed", "program", "zoo"},
    "after_training": {"convert", "ground", "layers", "lean", "loop", "methods", "quantizers", "scheme", "summary"},
    "bench": {
        *("after_training", "convert", "data", "ground", "inference", "kernels", "lean", "loop", "models", "onnx"),
        *("packed", "scheme"),
    },
    "training": {
        *("after_training", "bench", "check", "convert", "data", "distillation", "ground", "images", "inference"),
        *("layers", "lean", "loop", "models", "optim", "packed", "quantizers", "runs", "scheme", "summary"),
    },
    "cli": {
        *("bench", "convert", "data", "export", "ground", "images", "inference"),
        *("kernels", "layers", "onnx", "packed", "runs"),
        *("schemes", "summary", "training", "zoo"),
    },
}


def imported_parts(file: Path) -> set[str]:
    """The parts of qconv that a file imports."""
    package = ["qconv", *file.relative_to(ROOT).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            path = [*base, *(node.module.split(".") if node.module else [])]
            modules = [path] if len(path) > 1 else [[*path, alias.name] for alias in node.names]
            found |= {module[1] for module in modules if module[0] == "qconv" and len(module) > 1}
        elif isinstance(node, ast.Import):
            found |= {name.name.split(".")[1] for name in node.names if name.name.startswith("qconv.")}
    return found


def test_imports_point_one_way() -> None:
    found: dict[str, set[str]] = {}
    for file in ROOT.rglob("*.py"):
        part = file.relative_to(ROOT).parts[0].removesuffix(".py")
        if part not in ("__init__", "__main__"):
            found.setdefault(part, set()).update(imported_parts(file) - {part, "__version__"})
    assert found == ROOMS


def test_no_imports_go_round() -> None:
    late = {"quantizers": {"methods", "schemes"}}  # looked up when a name is asked for
    TopologicalSorter({room: others - late.get(room, set()) for room, others in ROOMS.items()}).prepare()


@pytest.mark.parametrize("folder", sorted({file.parent for file in ROOT.rglob("*.py")}), ids=lambda path: path.name)
def test_no_imports_go_round_in_a_folder(folder: Path) -> None:
    """Not those for annotations alone, either."""
    files = {file.stem: ast.parse(file.read_text()) for file in folder.glob("*.py")}
    inside = {
        name: {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1}
        for name, tree in files.items()
    }
    assert folder.name != "function" or inside["quantized_op"] > {"kept_input", "output", "sums"}
    TopologicalSorter(inside).prepare()


def test_public_surface() -> None:
    seen: dict[str, str] = {}
    for node in ast.walk(ast.parse((ROOT / "__init__.py").read_text())):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            places = [
                (each.module, alias) for each in node.body if isinstance(each, ast.ImportFrom) for alias in each.names
            ]
            seen = {alias.name: f"{place or ''}.{alias.name}" for place, alias in places if place != "grad"}
            aliases = {"composed", "deform"} == {alias.name for place, alias in places if place == "grad"}
            assert aliases
            assert {"grad_composed = composed", "grad_deform = deform"} <= set(map(ast.unparse, node.body))
    later = {name: f"{place}.{name}" for name, place in qconv._LATER.items()}
    modules = {name: place if "." in place else f".{place}" for name, place in qconv._MODULES.items()}
    assert seen.items() <= {**later, **modules}.items(), "type checkers see what is imported when it is asked for"
    assert {*seen, "grad_composed", "grad_deform"} == {*qconv._LATER, *qconv._MODULES}
    assert {name for name in dir(qconv) if not name.startswith("__")} == {*qconv._LATER, *qconv._MODULES}


def test_a_layer_needs_torch_alone_and_a_function_keeps_its_name() -> None:
    others = [*HEAVY[2:], "sklearn", "matplotlib", "torchvision", "omegaconf", "torchmetrics", "triton"]
    code = f"""
import sys, qconv; qconv.QConv2d; qconv.Diagnostics; print([name for name in {others} if name in sys.modules])
import qconv.convert, qconv.lean, qconv.summary.costs_table
from qconv.summary import terminal
functions = [qconv.convert, qconv.lean, qconv.summary]
from qconv import convert, lean, summary
assert [convert, lean, summary] == functions
print([type(each).__name__ for each in functions], qconv.summary is qconv.summary)
"""
    assert in_a_new_process(code) == f"[]\n{['function'] * 3} True\n"


def test_the_first_names(capsys: pytest.CaptureFixture[str]) -> None:
    lines = re.findall(r"^- .*: (.*)$", qconv.__doc__ or "", re.MULTILINE)
    names = re.findall(r"`(\w+)`", " ".join(lines))
    assert len(names) == 15
    assert {*names} <= {*dir(qconv)}
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    shown = capsys.readouterr().out
    assert f"torch {torch.__version__.partition('+')[0]}" in shown
    assert re.search(r"Lightning \d.*\nC kernels: (portable|avx2|avx512|neon|not installed)\ndevice: ", shown)


def in_a_new_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout


HEAVY = "torch", "numpy", "hydra", "pydantic", "rich", "pytorch_lightning"


def test_the_program_answers_without_torch() -> None:
    needs = {
        **dict.fromkeys(("--help", "trian", "predict --tpo 3", "bench train-step --help"), ""),
        **dict.fromkeys(("export --help", "train --help"), ""),
        **dict.fromkeys(("train modle=resnet20", "train --helpp", "train --cfg job"), "hydra"),
        "zoo": "pydantic",
    }
    code = f"""
import os, sys
from qconv.cli import main
for words in {[*needs]}:
    if not (child := os.fork()):  # a process that has imported nothing else
        try:
            main(words.split())
        except SystemExit:
            pass
        print("ANSWERED", words, ":", *(name for name in {HEAVY} if name in sys.modules), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    said = [line.split(" ", 1)[1] for line in in_a_new_process(code).splitlines() if line.startswith("ANSWERED")]
    assert said == [f"{words} : {more}".strip() for words, more in needs.items()]


@pytest.mark.nightly
def test_every_name_in_the_documents_needs_one_import() -> None:
    pages = [ROOT.parent / "README.md", *sorted((ROOT.parent / "docs").glob("*.md"))]
    text = "\n".join(page.read_text() for page in pages)
    spans = re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL)
    names = sorted(set(re.findall(r"\bqconv(?:\.[A-Za-z_]\w*)+", " ".join(spans))))
    assert {"qconv.convert", "qconv.models", "qconv.data", "qconv.export_onnx"} < set(names)
    code = f"""
import os, pytorch_lightning, torch, torchvision, qconv  # others' packages, which take seconds, once for all names
for name in {[*names, "qconv.models.resnet20", "qconv.data.DigitsDataModule", "qconv.training.Classifier"]}:
    if not (child := os.fork()):  # in a process that has imported nothing else of qconv
        eval(name)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""
    in_a_new_process(code)


@pytest.mark.nightly
def test_a_missing_package_names_its_extra_and_a_star_import_needs_none() -> None:
    code = f"""
import sys, os
if not (child := os.fork()):
    sys.modules |= dict.fromkeys({[*MODULES["train"], *MODULES["onnx"], *MODULES["hub"]]})
    exec("from qconv import *")
    print(QConv2d.__name__, convert.__name__, "sys" in dir() and "TYPE_CHECKING" in dir(), flush=True)
    os._exit(0)
os.waitpid(child, 0)
import qconv
sys.modules |= dict.fromkeys(["pytorch_lightning", "torchvision", "PIL", "onnx"])
for name in ("models", "packed", "inference", "onnx", "bench", "training", "predict", "QDeformConv2d"):
    try:
        print(getattr(qconv, name).__name__)
    except ImportError as error:
        print(error)
"""
    assert in_a_new_process(code).splitlines() == [
        *("QConv2d convert False", "qconv.models", "qconv.packed", "qconv.inference", "qconv.onnx", "qconv.bench"),
        'qconv.training needs pytorch_lightning: pip install "qconv[train]"',
        'qconv.predict needs PIL: pip install "qconv[train]"',
        'deformable convolution needs torchvision: pip install "qconv[train]"',
    ]


def test_messages_name_the_extra_that_installs_a_module() -> None:
    written = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    extras = {extra: {re.split(r"[>\[]", line)[0].lower() for line in lines} for extra, lines in written.items()}
    installed = packages_distributions()
    assert extras.keys() == MODULES.keys()
    named = {
        extra: {name.lower().replace("_", "-") for module in modules for name in installed[module]}
        for extra, modules in MODULES.items()
    }
    for extra, packages in extras.items():
        assert packages - named[extra] <= named["train"], extra  # NumPy is in two


@pytest.mark.nightly
def test_import_adds_little() -> None:
    code = """
import time
times = [time.process_time()]
import torch
times.append(time.process_time())
import qconv.layers
print((time.process_time() - times[1]) / (times[1] - times[0]))
"""
    assert min(float(in_a_new_process(code)) for _ in range(3)) < 0.2


def test_help() -> None:
    command = [sys.executable, "-m", "qconv", "bench", "train-step", "--help"]
    assert "bench" in subprocess.run(command, check=True, capture_output=True, text=True).stdout
