"""Checkpoints and packed files of the version before must still be read, and give what they gave."""

from pathlib import Path
from typing import Any

import pytest
import torch
from written_before.write import SCHEMES, float_network, optimizer_of, train_a_step

import qconv
from qconv.training.classifier import give_dimension_

FOLDER = Path(__file__).parent / "written_before"


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    return torch.load(FOLDER / "checkpoints.pt", weights_only=True)


@pytest.mark.parametrize("name", SCHEMES)
def test_a_checkpoint_is_loaded_and_trained_on(name: str, kept: dict[str, Any]) -> None:
    model = qconv.convert(float_network(), SCHEMES[name], before_sign="keep")  # the version before knew no other
    model.load_state_dict(kept[name]["model"])
    torch.testing.assert_close(model.eval()(kept["images"]), kept[name]["output"])
    optimizer, state = optimizer_of(model), kept[name]["optimizer"]
    give_dimension_(state["state"].values())
    optimizer.load_state_dict(state)
    train_a_step(model.train(), optimizer, kept["images"])
    assert not torch.equal(model.eval()(kept["images"]), kept[name]["output"])


@pytest.mark.parametrize("name", SCHEMES)
def test_a_packed_file_is_loaded(name: str, kept: dict[str, Any]) -> None:
    loaded = qconv.load_packed(FOLDER / f"{name}.safetensors", float_network())
    torch.testing.assert_close(loaded(kept["images"]), kept[name]["output"])
