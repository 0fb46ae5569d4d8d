"""Imports: what they cost, which way they point, and what the package shows."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import qconv

ROOT = Path(qconv.__file__).parent
LAYERS = {
    # each part of the package, and the parts that it may import
    "quantizers": set(),
    "grad": set(),
    "grad_composed": {"grad"},
    "integer": set(),
    "operations": {"grad", "integer"},
    "sums": {"operations", "quantizers", "integer"},
    "function": {"quantizers", "operations", "sums"},
    "schemes": {"quantizers"},
    "grad_deform": {"grad"},
    "layers": {"schemes", "function", "operations", "quantizers", "grad", "grad_deform"},
    "activations": set(),
    "one_signed": {"activations"},
    "before_sign": {"activations", "one_signed", "quantizers"},
    "bypassed": {"layers"},
    "convert": {"activations", "before_sign", "bypassed", "layers", "schemes"},
    "steps": {"layers", "quantizers"},
    "optim": {"layers", "quantizers"},
    "distillation": set(),
    "norms": set(),
    "calibrate": {"layers", "norms", "quantizers"},
    "environment": set(),
    "summary_table": {"files"},
    "models": set(),
    "files": set(),
    "packed": {"activations", "files", "layers", "quantizers", "schemes", "models"},
    "summary": {"layers", "quantizers", "summary_table", "packed", "bypassed"},
    "inference": {"activations", "layers", "quantizers", "packed", "integer", "convert", "bypassed"},
    "onnx": {"inference", "files", "layers", "quantizers"},
    "images": set(),
    "data": {"files", "images"},
    "predict": {"packed", "images", "inference"},
    "bench": {"convert", "schemes", "models", "environment", "data", "inference"},
    "training": {
        *(
            "activations",
            "distillation",
            "optim",
            "steps",
            "convert",
            "layers",
            "summary",
            "summary_table",
            "schemes",
            "models",
            "data",
            "environment",
            "quantizers",
            "packed",
        ),
        "files",
    },
    "cli": {"bench", "schemes", "packed", "predict", "summary", "inference", "onnx", "training"},
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
    for file in ROOT.rglob("*.py"):
        part = file.relative_to(ROOT).parts[0].removesuffix(".py")
        if part not in ("__init__", "__main__"):
            assert imported_parts(file) - {part, "__version__"} <= LAYERS[part], file


def test_public_surface() -> None:
    assert {name for name in vars(qconv) if not name.startswith("_")} >= {"QConv2d", "convert", "plan", "schemes"}
    for node in ast.parse((ROOT / "__init__.py").read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            assert all(alias.asname == alias.name for alias in node.names), "re-exports say `as`"


def in_a_new_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_needs_torch_alone() -> None:
    others = (
        "('pytorch_lightning', 'hydra', 'sklearn', 'matplotlib', 'rich', 'torchvision', 'omegaconf', 'torchmetrics')"
    )
    assert in_a_new_process(f"import sys, qconv; print([m for m in {others} if m in sys.modules])") == "[]\n"


def test_import_adds_little() -> None:
    code = "import time, torch; start = time.perf_counter(); import qconv; print(time.perf_counter() - start)"
    assert min(float(in_a_new_process(code)) for _ in range(3)) < 0.3


@pytest.mark.parametrize("command", [["-m", "qconv", "--help"], ["-m", "qconv", "bench", "train-step", "--help"]])
def test_help(command: list[str]) -> None:
    out = subprocess.run([sys.executable, *command], check=True, capture_output=True, text=True).stdout
    assert "bench" in out
