"""The documentation: its Python runs and prints what it says, its commands are valid, its figures are the code's."""

import contextlib
import doctest
import importlib
import inspect
import io
import json
import re
import shlex
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import markdown
import pytest
import torch
from hydra import compose, initialize_config_dir
from methods import FUNCTIONS, parameters
from omegaconf import DictConfig
from test_package import ROOMS
from torch import Tensor

import qconv
from docs_build import recipes
from docs_build.__main__ import loads_from_elsewhere
from docs_build.figures import FOLDER, METHODS, as_svg, draw, figures
from docs_build.house import LATE, rooms, without_what_follows
from qconv.cli import main

ROOT = Path(__file__).parent.parent
PAGES = {str(path.relative_to(ROOT / "docs")): path for path in sorted((ROOT / "docs").rglob("*.md"))}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHARE = re.compile(r"\b\d+ ?%")
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def blocks(path: Path) -> Iterator[tuple[int, str, str]]:
    """Line, language and text of every block of code."""
    text = path.read_text()
    for block in BLOCK.finditer(text):
        yield text.count("\n", 0, block.start()) + 1, block[1], block[2]


def agree(said: str, printed: str) -> bool:
    """Whether a page says what was printed; accuracies may differ by 8 of 100, as between machines."""
    if doctest.OutputChecker().check_output(said, printed, FLAGS):
        return True
    shares = [[int(share.rstrip(" %")) for share in SHARE.findall(text)] for text in (said, printed)]
    alike = len(shares[0]) == len(shares[1]) and all(abs(a - b) <= 8 for a, b in zip(*shares, strict=True))
    return alike and doctest.OutputChecker().check_output(SHARE.sub("%", said), SHARE.sub("%", printed), FLAGS)


def words_of(text: str) -> list[list[str]]:
    """The words of every command."""
    lines = (shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines())
    return [words for words in lines if words]


def run(page: Path, names: dict[str, object]) -> None:
    """Run a page's ``python`` blocks and a tutorial's commands; ``text`` is what the Python before it prints."""
    printed = ""
    for line, language, text in blocks(page):
        if language == "python":
            screen = io.StringIO()
            code = compile("\n" * line + text, str(page), "exec")  # so that a traceback names the line of the page
            with contextlib.redirect_stdout(screen):
                exec(code, names)
            printed = screen.getvalue()
        elif language == "bash" and page.parent.name == "tutorials":
            for words in words_of(text):
                assert main(words[1:]) == 0, f"{page}:{line}: {shlex.join(words)}"
        elif language == "text" and not agree(text, printed):
            pytest.fail(f"{page}:{line} says\n{text}\nbut the code prints\n{printed}", pytrace=False)


@pytest.mark.nightly
@pytest.mark.parametrize("page", [name for name, path in PAGES.items() if "```python" in path.read_text()])
def test_python_runs_and_prints_what_the_page_says(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run(PAGES[page], {"__name__": "__main__"})


@pytest.mark.parametrize("said", ["2", "80 % of 3", "90 % of 4"])
def test_a_page_that_says_something_else_is_found(said: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```python\nprint('90 % of 3')\n```\n\n```text\n{said}\n```\n")
    with pytest.raises(pytest.fail.Exception, match=r"page.md:5 says"):
        run(page, {})


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command of the documentation: where it stands, and its words."""
    for name, path in PAGES.items():
        for line, language, text in blocks(path):
            if language == "bash":
                for words in words_of(text):
                    yield f"{name}:{line}", words


def is_training(words: list[str]) -> bool:
    return words[:2] == ["qconv", "train"] or "train.py" in words


def composed(options: list[str], searched: Path) -> DictConfig:
    """What the command would run, the first value of each in a sweep; ``--config-dir`` is ``searched``."""
    overrides = [word for word in options if "=" in word and not word.startswith("hydra")]
    if "-m" in options:
        overrides = [word if "{" in word else word.split(",")[0] for word in overrides]
    if "--config-dir" in options:
        overrides.append(f"hydra.searchpath=[file://{searched}]")
    return compose("config", ["run_dir=x", *overrides])


def test_train_commands_compose(tmp_path: Path) -> None:
    (tmp_path / "scheme").mkdir()
    (tmp_path / "scheme" / "mine.yaml").write_text("_target_: my_methods.ternary\n")
    seen = 0
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        for place, words in commands():
            if is_training(words):
                try:
                    composed(words, tmp_path)
                except Exception as error:
                    raise AssertionError(f"{place}: {shlex.join(words)}") from error
                seen += 1
    assert seen > 10


class Parsed(Exception):  # noqa: N818  # no error: a command's arguments were understood
    pass


def test_other_commands_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = ArgumentParser.parse_known_args

    def parse_and_stop(self: ArgumentParser, args: Any = None, namespace: Any = None) -> Any:
        options, more = parse(self, args, namespace)
        if namespace is None:  # the program itself, not the parser of a subcommand
            raise Parsed(more)
        return options, more

    monkeypatch.setattr(ArgumentParser, "parse_known_args", parse_and_stop)
    seen = 0
    for place, words in commands():
        if words[0] == "qconv" and not is_training(words):
            with pytest.raises(Parsed) as stopped:
                main(words[1:])
            assert stopped.value.args == ([],), place
            seen += 1
    assert seen > 5


# Methods


SECTIONS = {
    call[1]: section
    for page in (ROOT / "docs" / "methods").glob("*.md")
    for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]
    if (call := re.search(r"\A.*\n\n`(\w+)\(.*?\)` · ", section))
}
"""The section of each scheme."""


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "identity"])
def test_every_method_has_a_section(name: str) -> None:
    assert name in SECTIONS, f"docs/methods has no section whose first line is `{name}()` · bits · paper"
    section = SECTIONS[name]
    assert f"(../figures/{name}.svg)" in section
    assert name == "staged" or "$$" in section
    told = re.findall(r"^- `(\w+)(?:=(.*?))?`: .+\.$", section, re.MULTILINE)
    defaults = {key: "" if each.default is each.empty else repr(each.default) for key, each in parameters(name).items()}
    assert {key: value.replace('"', "'") for key, value in told} == defaults
    assert [key for key, _ in told] == list(defaults)


def test_every_layer_and_model_has_a_row() -> None:
    layers, models = ((ROOT / "docs" / f"{page}.md").read_text() for page in ("layers", "models"))
    for layer in [name for name in dir(qconv) if isinstance(getattr(qconv, name), type)]:
        if issubclass(getattr(qconv, layer), qconv.QuantizedLayer) and layer != "QuantizedLayer":
            assert f"`{layer}`" in layers, f"docs/layers.md has no row of {layer}"
    for model in (path.stem for path in (ROOT / "configs" / "model").glob("*.yaml")):
        assert f"`{model}`" in models, f"docs/models.md has no row of {model}"


# Figures


CURVE = re.compile(r'<g id="((?:weight|input|import)-[^"]*)">\s*<path d="([^"]*)"')


def drawn(svg: str) -> dict[str, Tensor]:
    """The corners of every curve, in points of the page."""
    number = re.compile(r"[-\d.]+")
    return {
        name: torch.tensor([float(each) for each in number.findall(path)]).view(-1, 2)
        for name, path in CURVE.findall(svg)
    }


def far_apart(one: Tensor, other: Tensor) -> float:
    """How far the corners of one curve lie from the nearest of the other, at most."""
    distances = torch.cdist(one, other)
    return max(distances.amin(0).max().item(), distances.amin(1).max().item())


@pytest.mark.nightly
def test_the_figures_are_what_the_methods_do() -> None:
    made = dict(figures())
    differ = made.keys() ^ {path.stem for path in FOLDER.glob("*.svg")}
    assert not differ, "docs/figures lacks these, or has them without a method: run python -m docs_build.figures NAME"
    for name, svg in made.items():
        now, committed = drawn(svg), drawn((FOLDER / f"{name}.svg").read_text())
        assert now.keys() == committed.keys(), f"{name}.svg is out of date: run python -m docs_build.figures {name}"
        for curve, corners in now.items():
            assert far_apart(corners, committed[curve]) < 2, (
                f"{name}.svg, {curve}: run python -m docs_build.figures, and look at it"
            )


def test_the_reference_has_every_public_name() -> None:
    text = "".join(path.read_text() for name, path in PAGES.items() if name.startswith("api/"))
    for name in dir(qconv):
        value = getattr(qconv, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            room = value.__module__.rpartition(".")[0]
            places = f"qconv.{name}", f"{room}.{name}", f"{value.__module__}.{name}", value.__module__
            assert any(f"::: {place}\n" in text for place in places), f"no page of docs/api has {value.__module__}"
    for path in (ROOT / "qconv" / "methods").glob("[!_]*.py"):
        assert f"::: qconv.methods.{path.stem}\n" in text, f"docs/api/methods.md has no entry of {path.stem}"


def test_the_page_of_recipes_is_that_of_their_files() -> None:
    assert recipes.PAGE.read_text() == recipes.page(), "run python -m docs_build.recipes"
    assert recipes.page().count("\n| `") == len(list((ROOT / "configs/experiment").glob("*/*.yaml")))


def test_the_house_is_that_of_the_imports() -> None:
    assert rooms() == {room: others - LATE.get(room, set()) for room, others in ROOMS.items()}
    left_out = without_what_follows({"a": {"b", "c"}, "b": {"c"}, "c": set()})
    assert left_out == {"a": {"b"}, "b": {"c"}, "c": set()}


def test_a_figure_of_something_else_is_found() -> None:
    made = {name: drawn(as_svg(draw(METHODS[name]))) for name in ("bnn", "bireal")}
    one, other = (curves["input-gradient-0"] for curves in made.values())
    assert far_apart(one, other) > 20


# Formulas and pages


def test_formulas() -> None:
    page = markdown.markdown("Of $w_q$ and `$x$` and 5$, 6$.\n\n$$a \\vert b$$", extensions=["docs_build.formulas"])
    assert page.count("<math") == 2
    assert "<msub><mi>w</mi><mi>q</mi></msub>" in page
    assert "<code>$x$</code> and 5$, 6$." in page
    assert 'display="block"' in page


def test_what_comes_from_other_hosts_is_found(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<a href='https://a.b'>x</a><script src='https://a.b/c.js'></script>")
    (tmp_path / "style.css").write_text("@import url('//a.b/c.css'); a { background: url(d.png) }")
    assert loads_from_elsewhere(tmp_path) == ["page.html: <script src='https://a.b/c.js", "style.css: url('//a.b/c.css"]


def test_the_zoo_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo"]) == 0
    assert capsys.readouterr().out.strip() in PAGES["shipping.md"].read_text()


# Notebooks


NOTEBOOKS = sorted((Path(__file__).parent.parent / "examples").glob("*.ipynb"))
SHOWS = {
    "swap_and_fine_tune": lambda names: names["float_accuracy"] > 0.85,
    "write_a_quantizer": lambda names: names["costs"].packed_bytes < names["costs"].float_bytes / 5,
    "ship_and_verify": lambda names: names["same"] and names["verification"].equal and names["comparison"].agrees,
}
"""What a notebook is to show besides a good accuracy."""


def test_every_notebook_is_known() -> None:
    assert {path.stem for path in NOTEBOOKS} == SHOWS.keys()


@pytest.mark.nightly
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [], "commit it without outputs"
            exec(compile("".join(cell["source"]), f"{path.name}:{cell['id']}", "exec"), names)
    assert names["accuracy"] > 0.8
    assert SHOWS[path.stem](names)


# The README and the docstrings


README = (ROOT / "README.md").read_text()
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in sorted((ROOT / "qconv").rglob("*.py"))
    if ">>>" in path.read_text()
]
"""The modules whose docstrings have examples."""
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


@pytest.mark.nightly
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
