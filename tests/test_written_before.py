"""Checkpoints and packed files of the version before must still be read, and give what they gave."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import METHODS
from written_before.surface import surface
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


SINCE = torch.load(FOLDER / "a434486" / "methods.pt", weights_only=True)
"""What commit a434486 made of every method: the state dicts, the packed file, the outputs, and those a step later."""


ROUNDING: dict[str, Any] = {"rtol": 5e-6, "atol": 1e-5}
"""The sums of another processor are in another order: seen were 2.4e-6 of a number, where torch allows 1.3e-6."""


@pytest.mark.parametrize("name", [name for name in SINCE if name != "images"])
def test_every_method_goes_on_from_the_commit_before(name: str, tmp_path: Path) -> None:
    before, images = SINCE[name], SINCE["images"]
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


CHANGED = {
    "qconv.Scheme",  # a scheme may be without a name of its own
    "qconv.schemes.Scheme",
    "qconv.data.EpochOrder",  # it takes mixed
    *(f"qconv.{module}.{name}gradient" for module in ("grad", "grad_composed") for name in ("input_", "weight_")),
    "qconv.grad.gradients",  # these three take a kernel
    "qconv.schemes.check_padding_value",  # it is in qconv.checks
    "qconv.training.draw_curves",  # it takes the best epoch and the test
    "qconv.convert",  # it takes lean, signed_inputs and check
    "qconv.plan",  # signed_inputs and costs
    "qconv.Plan",  # costs
    "qconv.summary",
    "qconv.Summary",
    "qconv.schemes.lsq",  # the data choose whether its inputs are signed
    "qconv.schemes.sawb",  # it takes plus
    "qconv.quantizers.SAWB",
    "qconv.data.PicturesDataModule",  # it takes progressive_size
    "qconv.data.TensorLoader",  # and resize
    "qconv.quantizers.LSQInput",
    "qconv.data.ImageFolderDataModule",  # test_size
    *(f"qconv.data.{name}DataModule" for name in ("ImageNet", "WebDataset")),  # pixel_range
    "qconv.schemes.reste",  # o follows the authors' code
    "qconv.quantizers.ReSTE",
    "qconv.quantizers.FixedPoint",  # bound
    "qconv.training.Classifier",  # step_rules, dampening, sine_penalty and check
    *(f"qconv.models.{name}" for name in ("resnet18", "resnet20", "resnet32", "resnet44", "resnet56", "ResNet")),
    *(f"qconv.models.{name}" for name in ("vgg_small", "VGG")),  # norm_outputs
    "qconv.training.schedules.steps",  # only
    *(f"qconv.{module}export_onnx" for module in ("", "onnx.")),  # metadata, four_bits, any_size
    "qconv.packed.packed_sizes",  # size
    "qconv.training.losses.load_weights",  # it is in qconv.training.initial_weights
    *(f"qconv.{module}parameter_groups" for module in ("", "optim.")),  # lr
}
"""What CHANGELOG tells of."""
GONE = (
    *(".train", ".share_of_data"),  # torch's is no longer overridden; averages of little data are no longer watched
    *(".adopt", ".release", ".without_quantizers_", ".calibrate_from_", ".follow_weight_"),  # functions of qconv.layers
    *(".check_input", ".as_node", ".translate"),
)
"""Methods that are no longer there."""


def test_the_public_surface_is_that_of_the_commit_before() -> None:
    before: dict[str, dict[str, str]] = json.loads((FOLDER / "a434486" / "surface.json").read_text())
    now = surface()
    changed = {
        f"{module}.{name}": (parameters, now.get(module, {}).get(name))
        for module, names in before.items()
        for name, parameters in names.items()
        if now.get(module, {}).get(name) != parameters
    }
    assert {name: each for name, each in changed.items() if name not in CHANGED and not name.endswith(GONE)} == {}
