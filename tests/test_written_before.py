"""What version 0.1.0 has saved must still be read, and give what it gave; its public surface stays."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import METHODS
from written_before.surface import surface
from written_before.write import float_network, optimizer_of, train_a_step

import qconv

FOLDER = Path(__file__).parent / "written_before" / "0.1.0"
BEFORE = torch.load(FOLDER / "methods.pt", weights_only=True)
"""Of every method the state dicts, the packed file, the outputs, and those a step later: `written_before/write.py`."""
ROUNDING: dict[str, Any] = {"rtol": 5e-6, "atol": 1e-5}
"""The sums of another processor are in another order: seen were 2.4e-6 of a number, where torch allows 1.3e-6."""
CHANGED = {"qconv.verify_export"}
"""What CHANGELOG tells of, such as "qconv.convert"."""


@pytest.mark.parametrize("name", [name for name in BEFORE if name != "images"])
def test_every_method_goes_on(name: str, tmp_path: Path) -> None:
    before, images = BEFORE[name], BEFORE["images"]
    model = qconv.convert(float_network(), METHODS[name])
    optimizer = optimizer_of(model)
    model.load_state_dict(before["model"])
    optimizer.load_state_dict(before["optimizer"])
    torch.testing.assert_close(model.eval()(images), before["output"], **ROUNDING)
    (tmp_path / "packed").write_bytes(before["packed"])
    loaded = qconv.load_packed(tmp_path / "packed", float_network())
    torch.testing.assert_close(loaded(images), before["output"], **ROUNDING)
    train_a_step(model.train(), optimizer, images)
    torch.testing.assert_close(model.eval()(images), before["next"], **ROUNDING)


def test_the_public_surface_stays() -> None:
    before: dict[str, dict[str, str]] = json.loads((FOLDER / "surface.json").read_text())
    now = surface()
    changed = {
        f"{module}.{name}": (parameters, now.get(module, {}).get(name))
        for module, names in before.items()
        for name, parameters in names.items()
        if now.get(module, {}).get(name) != parameters
    }
    assert {name: each for name, each in changed.items() if name not in CHANGED} == {}
