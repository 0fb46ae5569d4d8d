"""The notebooks of `examples/`: every cell runs, and what they train is good."""

import json
from pathlib import Path
from typing import Any

import pytest

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
