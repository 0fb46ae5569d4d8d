"""The examples of the README and of the docstrings, run as doctests."""

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import qconv

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PACKAGE = [str(Path(qconv.__file__).parent)]  # an editable install has the folder of train.py in qconv.__path__, too
MODULES = [name for _, name, _ in pkgutil.walk_packages(PACKAGE, "qconv.") if not name.endswith("__main__")]
FLAGS = doctest.NORMALIZE_WHITESPACE
STEPS, SAID = "(150, 64)", re.compile(r"(\d+) % of 297 digits are right")


def swapped(steps: int) -> float:
    """The accuracy that the README's example prints, with so many steps of training."""
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert block.count(STEPS) == 1
    screen = io.StringIO()
    torch.manual_seed(0)
    with contextlib.redirect_stdout(screen):
        exec(block.replace(STEPS, f"({steps}, 64)"), {})
    said = SAID.search(screen.getvalue())
    assert said, screen.getvalue()
    return float(said[1]) / 100


def test_the_swap_example_learns() -> None:
    assert swapped(20) > 0.3  # 0.1 with the ReLUs kept
    assert len(SAID.findall(README)) == 1, "and the page says what 150 steps print"


def test_every_link_leads_somewhere() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", README) if "://" not in link]
    assert len(links) > 10
    for link in links:
        assert (ROOT / link).exists(), link


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    names = {"torch": torch, "qconv": qconv, "nn": torch.nn}
    assert doctest.testmod(module, extraglobs=names, optionflags=FLAGS).failed == 0
