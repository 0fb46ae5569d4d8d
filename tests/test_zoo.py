"""The trained networks of the package: are they what their cards say, and can they be had everywhere by name?"""

import hashlib
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

import qconv
from qconv import schemes, zoo
from qconv.cli import main
from qconv.data import DigitsDataModule
from qconv.packed import PackedFileError
from qconv.runs.run_files import PACKED

DIGITS = "smallcnn-bnn-digits"


@pytest.mark.parametrize("name", zoo.names())
def test_card_describes_the_file(name: str) -> None:
    card, file = zoo.card(name), zoo.file(name)
    assert card.name == name
    assert card.packed_bytes == file.stat().st_size < 2**20 * 1.1
    assert card.sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    assert not card.commit.endswith("-dirty")
    model = qconv.load(name)  # compares its outputs with those that the trained network gave
    assert not model.training
    layers = [module for module in model.modules() if isinstance(module, qconv.QuantizedLayer)]
    # Layer by layer, each layer's scheme says when it began.
    names = {layer.scheme.name.partition(" + inputs from ")[0] for layer in layers}
    assert names == {card.scheme.removeprefix("layerwise(").partition(", inputs=")[0]}
    for field in ("command", "sha256", "data", "budget"):
        assert getattr(card, field) in card.markdown()


@pytest.mark.nightly
def test_the_two_values_of_adabin_are_frozen_to_integers() -> None:
    model = qconv.load("resnet20-adabin-cifar10")
    frozen = qconv.freeze(model)
    assert [told.arithmetic for told in frozen.layers] == 18 * ["offset"]
    torch.manual_seed(0)
    images = torch.randn(256, 3, 32, 32)
    checked = qconv.verify(model, zoo.file("resnet20-adabin-cifar10"), images[:8])
    assert checked.equal, f"\n{checked}"
    with torch.inference_mode():
        assert torch.equal(frozen(images).argmax(1), model(images).argmax(1))


def test_every_file_has_its_card() -> None:
    assert {path.stem for path in zoo.NETWORKS.iterdir()} == set(zoo.names())
    assert DIGITS in zoo.names()


def test_accuracy_is_that_of_the_card() -> None:
    model = qconv.load(DIGITS)
    data = DigitsDataModule(seed=zoo.card(DIGITS).seed)
    data.setup("test")
    right = count = 0
    with torch.inference_mode():
        for batch in data.test_dataloader():
            images, labels = data.on_after_batch_transfer(batch, 0)
            right += int((model(images).argmax(1) == labels).sum())
            count += len(labels)
    assert right / count == pytest.approx(zoo.card(DIGITS).test_accuracy, abs=1e-6)


@pytest.mark.parametrize("scheme", [schemes.lsq(4, 4), schemes.bireal()], ids=str)
def test_the_float_network_can_be_converted(scheme: qconv.Scheme) -> None:
    loaded, by_hand = (qconv.load("resnet20-float-cifar10") for _ in range(2))
    qconv.convert(loaded, scheme).train()
    qconv.convert(qconv.to_float(by_hand), scheme).train()
    images = torch.randn(2, 3, 32, 32)
    for model in (loaded, by_hand):
        model(images).square().sum().backward()
    grads = [[parameter.grad for parameter in model.parameters()] for model in (loaded, by_hand)]
    assert all(grad is not None for grad in grads[0])
    assert all(map(torch.equal, *grads))


def test_load_takes_runs_and_files(tmp_path: Path) -> None:
    (tmp_path / PACKED).write_bytes(zoo.file(DIGITS).read_bytes())
    images = torch.randn(3, 1, 8, 8)
    expected = qconv.load(DIGITS)(images)
    for what in (tmp_path, tmp_path / PACKED, str(tmp_path / PACKED)):
        assert torch.equal(qconv.load(what)(images), expected)


def test_a_path_hides_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / DIGITS).write_bytes(b"something else")
    with pytest.raises(PackedFileError, match=DIGITS):
        qconv.load(DIGITS)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("smalcnn-bnn-digits", f"did you mean {DIGITS}?"),
        ("something", "packed model something: there is no such file"),
        ("nowhere/model", "a packed file or a network of the zoo"),
        ("model.safetensors", "no such file"),
        (".", "is not the folder of a run: there is no config.yaml"),
    ],
)
def test_what_is_not_there(what: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        qconv.load(what)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == zoo.names()
    assert main(["zoo", DIGITS]) == 0
    assert capsys.readouterr().out == zoo.card(DIGITS).markdown()
    assert main(["zoo", "nothing"]) == 1
    assert "nothing" in capsys.readouterr().err
    assert main(["summary", DIGITS]) == 0
    assert "blocks" in capsys.readouterr().out


def test_hub_folder_holds_the_very_file(tmp_path: Path) -> None:
    from qconv.zoo.hub import HubModel

    HubModel(DIGITS).save_pretrained(tmp_path / "of_zoo")
    assert (tmp_path / "of_zoo" / PACKED).read_bytes() == zoo.file(DIGITS).read_bytes()
    readme = (tmp_path / "of_zoo/README.md").read_text()
    assert zoo.card(DIGITS).markdown().strip() in readme
    assert "library_name: qconv" in readme
    loaded = HubModel.from_pretrained(tmp_path / "of_zoo")
    assert isinstance(loaded, nn.Module)
    assert loaded.classes == [str(digit) for digit in range(10)]
    images = torch.randn(3, 1, 8, 8)
    assert torch.equal(loaded(images), qconv.load(DIGITS)(images))
    loaded.save_pretrained(tmp_path / "again")  # a network without a card: its layers
    assert (tmp_path / "again" / PACKED).read_bytes() == zoo.file(DIGITS).read_bytes()
    assert "| blocks.1.conv | QConv2d | `bnn()` |" in (tmp_path / "again/README.md").read_text()
    (tmp_path / "of_zoo" / PACKED).unlink()
    with pytest.raises(PackedFileError, match="no such file"):
        HubModel.from_pretrained(tmp_path / "of_zoo")


def test_hub_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delitem(sys.modules, "qconv.zoo.hub", raising=False)
    with pytest.raises(ImportError, match=r'pip install "qconv\[hub\]"'):
        import_module("qconv.zoo.hub")


def test_a_network_is_loaded_under_autocast() -> None:
    """The trial of a packed file is made in float32, as it was when it was written."""
    with torch.autocast("cpu", torch.bfloat16):
        assert zoo.load("resnet20-lsq4-cifar10") is not None
