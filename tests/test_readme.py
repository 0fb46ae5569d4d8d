"""The examples of the README and of the docstrings, run as doctests."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest
import torch

import qconv

README = Path(__file__).parent.parent / "README.md"
PACKAGE = [str(Path(qconv.__file__).parent)]  # an editable install has the folder of train.py in qconv.__path__, too
MODULES = [name for _, name, _ in pkgutil.walk_packages(PACKAGE, "qconv.") if not name.endswith("__main__")]
FLAGS = doctest.NORMALIZE_WHITESPACE
STEPS = "range(150)"


def in_steps(count: int) -> doctest.DocTest:
    """The README, with so many steps of training in its first example."""
    text = README.read_text()
    assert text.count(STEPS) == 1
    return doctest.DocTestParser().get_doctest(text.replace(STEPS, f"range({count})"), {}, README.name, None, 0)


def test_readme() -> None:
    result = doctest.DocTestRunner(optionflags=FLAGS).run(in_steps(2))
    assert result.attempted > 15
    assert result.failed == 0


def test_the_swap_example_has_at_most_15_lines() -> None:
    block = README.read_text().split("## Swap")[1].split("```")[1]
    assert 5 < len(block.strip().splitlines()) - 1 <= 15


def test_the_swap_example_learns() -> None:
    example = in_steps(20)
    training = next(index for index, each in enumerate(example.examples) if "range(" in each.source)
    example.examples = example.examples[: training + 1]
    assert doctest.DocTestRunner(optionflags=FLAGS).run(example, clear_globs=False).failed == 0
    names = example.globs
    found = names["model"].eval()(names["images"][1500:]).argmax(1)
    assert (found == names["labels"][1500:]).float().mean() > 0.3  # 0.1 with the ReLUs kept


@pytest.mark.parametrize("name", MODULES)
def test_docstrings(name: str) -> None:
    module = importlib.import_module(name)
    names = {"torch": torch, "qconv": qconv, "nn": torch.nn}
    assert doctest.testmod(module, extraglobs=names, optionflags=FLAGS).failed == 0
