"""Imports: what they cost, which way they point, and what the package shows."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import qconv

ROOT = Path(qconv.__file__).parent
ROOMS = {
    # each room of the package, and the rooms that it may import
    "checks": set(),
    "files": set(),
    "table": {"files"},
    "images": set(),
    "environment": set(),
    "progress": set(),
    "processes": set(),
    "distillation": set(),
    "grad": set(),
    "kernels": set(),
    "held": set(),
    "streams": set(),
    "recipes": {"held", "streams"},
    "quantizers": {"checks", "kernels", "methods", "schemes"},  # those of methods by name, when they are asked for
    "scheme": {"checks", "quantizers"},
    "methods": {"checks", "processes", "quantizers", "scheme"},
    "schemes": {"methods", "scheme"},
    "operations": {"grad", "kernels"},
    "sums": {"held", "operations", "quantizers", "kernels"},
    "sign_weight": {"held", "kernels", "operations", "quantizers"},
    "bit_operations": {"grad", "kernels", "operations", "quantizers", "sign_weight"},
    "number_operations": {"grad", "kernels", "operations", "quantizers", "sign_weight"},
    "kept_input": {"operations", "quantizers", "recipes"},
    "output": {"bit_operations", "kept_input", "kernels", "number_operations", "quantizers", "sign_weight", "sums"},
    "function": {
        *("bit_operations", "held", "kept_input", "kernels", "number_operations", "operations", "output"),
        *("quantizers", "recipes", "sign_weight", "sums"),
    },
    "lean": {"checks", "kept_input", "kernels", "layers", "models", "quantizers", "recipes"},
    "layers": {
        "kept_input",
        "checks",
        "schemes",
        "scheme",
        "function",
        "operations",
        "quantizers",
        "processes",
        "grad",
    },
    "convert": {"checks", "layers", "lean", "quantizers", "schemes", "scheme", "table"},
    "lifecycle": {"checks", "layers", "progress", "quantizers", "processes"},
    "sensitivity": {"checks", "convert", "files", "layers", "lean", "lifecycle", "progress", "scheme", "table"},
    "optim": {"layers", "quantizers"},
    "models": {"checks"},
    "packed": {"convert", "files", "layers", "lean", "quantizers", "scheme", "models"},
    "zoo": {"packed"},
    "hub": {"packed", "zoo"},
    "summary": {"files", "layers", "lean", "names", "quantizers", "packed", "table"},
    "inference": {"convert", "kernels", "layers", "lean", "quantizers", "packed", "table"},
    "onnx": {"inference", "kernels", "files", "layers", "quantizers"},
    "names": set(),
    "comparison": {"files", "names"},
    "data": {"files", "images"},
    "predict": {"packed", "images", "inference"},
    "bench": {
        *("convert", "data", "environment", "files", "inference", "kernels", "lean", "models", "onnx", "packed"),
        *("scheme", "table"),
    },
    "training": {
        *("bench", "checks", "convert", "distillation", "environment", "files", "inference", "layers", "lean"),
        *("lifecycle", "names", "optim", "packed", "processes", "quantizers", "scheme", "summary", "table"),
    },
    "cli": {
        *("bench", "comparison", "convert", "images", "inference", "layers", "onnx", "packed", "predict"),
        *("schemes", "summary", "table", "training", "zoo"),
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


def test_public_surface() -> None:
    assert {name for name in vars(qconv) if not name.startswith("_")} >= {"QConv2d", "convert", "plan", "schemes"}
    later = set()
    for node in ast.walk(ast.parse((ROOT / "__init__.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert all(alias.asname == alias.name for alias in node.names), "re-exports say `as`"
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            later = {alias.name for each in node.body if isinstance(each, ast.ImportFrom) for alias in each.names}
    assert later == qconv._LATER.keys(), "type checkers see what is imported when it is asked for"
    assert later < set(dir(qconv))
    assert not {"Any", "TYPE_CHECKING", "import_module"} & set(dir(qconv))
    assert {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or path.is_dir()} - {
        *("__init__", "__main__", "__pycache__")
    } <= set(dir(qconv))


def in_a_new_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_needs_torch_alone() -> None:
    others = (
        "('pytorch_lightning', 'hydra', 'sklearn', 'matplotlib', 'rich', 'torchvision', 'omegaconf', 'torchmetrics', "
        "'triton')"
    )
    assert in_a_new_process(f"import sys, qconv; print([m for m in {others} if m in sys.modules])") == "[]\n"


def test_every_name_in_the_documents_needs_one_import() -> None:
    pages = [ROOT.parent / "README.md", *sorted((ROOT.parent / "docs").glob("*.md"))]
    text = "\n".join(page.read_text() for page in pages)
    spans = re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL)
    names = sorted(set(re.findall(r"\bqconv(?:\.[A-Za-z_]\w*)+", " ".join(spans))))
    assert {"qconv.convert", "qconv.models", "qconv.data", "qconv.export_onnx"} < set(names)
    code = f"""
import os, sys, qconv
for name in {[*names, "qconv.models.resnet20", "qconv.data.DigitsDataModule", "qconv.training.Classifier"]}:
    if not (child := os.fork()):  # in a process that has imported nothing else
        eval(name)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""
    in_a_new_process(code)


def test_a_missing_package_names_its_extra() -> None:
    code = """
import sys, qconv
sys.modules |= dict.fromkeys(["pytorch_lightning", "torchvision", "PIL", "onnx"])
for name in ("models", "packed", "inference", "onnx", "bench", "training", "predict", "QDeformConv2d"):
    try:
        print(getattr(qconv, name).__name__)
    except ImportError as error:
        print(error)
"""
    assert in_a_new_process(code).splitlines() == [
        *("qconv.models", "qconv.packed", "qconv.inference", "qconv.onnx", "qconv.bench"),
        'qconv.training needs pytorch_lightning: pip install "qconv[train]"',
        'qconv.predict needs PIL: pip install "qconv[train]"',
        "deformable convolution needs torchvision: install qconv[train]",
    ]


def test_import_adds_little() -> None:
    code = "import time, torch; start = time.perf_counter(); import qconv; print(time.perf_counter() - start)"
    assert min(float(in_a_new_process(code)) for _ in range(3)) < 0.3


@pytest.mark.parametrize("command", [["-m", "qconv", "--help"], ["-m", "qconv", "bench", "train-step", "--help"]])
def test_help(command: list[str]) -> None:
    out = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True).stdout
    assert "bench" in out
