"""`qconv predict` and `qconv summary`: what a packed model says of images, and of itself."""

import contextlib
import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pictures import noise
from PIL import Image

import qconv
from qconv import schemes
from qconv.cli import main
from qconv.cli.predict import picture_files
from qconv.cli.source import Source
from qconv.images import DecodingError, centre_crop
from qconv.inference import FrozenModel, freeze
from qconv.models import small_cnn
from qconv.zoo.predict import Predictor

CLASSES = ["cat", "dog", "ship"]
MEAN, STD = [120.0, 110.0, 100.0], [60.0, 61.0, 62.0]


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    noise(0).save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


def described(channels: int = 3, classes: int = 3, resize: int | None = None) -> dict[str, Any]:
    """What a file says of a network, and of the images that it takes."""
    network = {"_target_": "qconv.models.small_cnn", "in_channels": channels, "num_classes": classes, "width": 8}
    mean, std = (MEAN * 2)[:channels], (STD * 2)[:channels]
    return {"network": network, "pictures": {"size": [channels, 8, 8], "resize": resize, "mean": mean, "std": std}}


def packed(path: Path, channels: int = 3, outputs: int = 3, resize: int | None = None, **other: Any) -> Any:
    model = qconv.convert(small_cnn(channels, outputs, width=8), schemes.bnn())
    model(torch.randn(16, channels, 8, 8))
    told = {**described(channels, outputs, resize), "classes": CLASSES, **other}
    qconv.save_packed(model.eval(), path, **told)
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a picture and packed models, which tests only read."""
    folder = tmp_path_factory.mktemp("the models")
    noise(0).save(folder / "picture.png")
    packed(folder / "model")
    packed(folder / "bare", pictures=None)
    packed(folder / "names", classes=["one"])
    (folder / "run").mkdir()
    (folder / "run/config.yaml").touch()
    return folder


def pixels(path: Path) -> torch.Tensor:
    return torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)


def normal(image: torch.Tensor) -> torch.Tensor:
    return ((image.float() - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1))[None]


def shares(model: torch.nn.Module, image: torch.Tensor) -> dict[str, float]:
    return dict(zip(CLASSES, model(normal(image)).softmax(1)[0].tolist(), strict=True))


def test_classes_and_probabilities(picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = packed(tmp_path / "model.safetensors")
    expected = shares(model, pixels(picture))
    order = sorted(CLASSES, key=lambda name: -expected[name])
    told = "   ".join(f"{name} {100 * expected[name]:.1f} %" for name in order)
    assert main(["predict", str(tmp_path / "model.safetensors"), str(picture)]) == 0
    assert capsys.readouterr().out == f"{picture}  {told}\n"
    # The folder of a run has the file.
    assert main(["predict", str(tmp_path), str(picture), "--top", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["picture"] == str(picture)
    (guess,) = found["classes"]
    assert guess == {"label": order[0], "probability": pytest.approx(expected[order[0]])}
    packed(tmp_path / "model.safetensors", network=None)  # of a network that is not in qconv.models
    config = {"model": {"_target_": "qconv.models.small_cnn", "width": 8}, "data": {}, "scheme": {}, "trainer": {}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))  # of before weight_init was there
    assert main(["predict", str(tmp_path), str(picture)]) == 0
    assert capsys.readouterr().out.startswith(f"{picture}  ")


@pytest.mark.nightly
def test_forms_of_a_file_agree_on_pictures_alone(
    picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qconv.bench.forms.find_spec", lambda name: None)  # leaves ONNX out
    packed(tmp_path / "model")
    for pictures in ([], [str(picture)]):
        assert main(["bench", "model", str(tmp_path / "model"), *pictures, "--seconds", "0", "--batch-size", "1"]) == 0
        told = capsys.readouterr().out
        assert "\nfloat: the network with its quantized weights; " in told
        assert ("Agreement with the trained network, on 1 images." in told) == bool(pictures)


def test_large_pictures_are_cropped_as_in_training(tmp_path: Path) -> None:
    model = packed(tmp_path / "model", resize=10)
    noise(0, 40, 30).save(tmp_path / "large.png")
    expected = shares(model, centre_crop(pixels(tmp_path / "large.png"), 8, 10))
    predictor = Predictor(tmp_path / "model")
    found = predictor(tmp_path / "large.png")
    assert not any(buffer.is_inference() for buffer in predictor.frozen.buffers())  # kernels keep what they make of it
    assert {guess.label: guess.probability for guess in found} == pytest.approx(expected)


def test_gray_images(tmp_path: Path) -> None:
    packed(tmp_path / "a", channels=1, resize=10)
    predictor = Predictor(tmp_path / "a")
    for mode, kind in (("L", "png"), ("RGB", "jpg")):
        Image.new(mode, (30, 40), 200 if mode == "L" else (200, 200, 200)).save(tmp_path / f"gray.{kind}")
        read = predictor.read(tmp_path / f"gray.{kind}")
        torch.testing.assert_close(read, torch.full((1, 8, 8), (200 - MEAN[0]) / STD[0]))
    assert len(predictor(tmp_path / "gray.jpg")) == 3


def test_files_that_are_refused(picture: Path, tmp_path: Path) -> None:
    model, file = packed(tmp_path / "model"), tmp_path / "a"
    frozen = freeze(model)
    for refused, options, message in (
        (model, {**described(), "classes": "abc"}, r"classes \(='abc'\) must be a list of names"),
        (model, {"example": (torch.randn(2, 3, 8, 8), 1)}, r"example \(tuple\) must be a tensor"),
        (frozen, {}, r"model: it \(FrozenModel\) is frozen: pack the trained model"),
        (torch.nn.Sequential(frozen), {}, "is frozen"),
    ):
        with pytest.raises(TypeError, match=message):
            qconv.save_packed(refused, file, **options)  # pyright: ignore[reportArgumentType]
    assert not file.exists()
    wide = {"size": [3, 8, 16], "mean": MEAN, "std": STD}
    rows: list[tuple[dict[str, Any], str]] = [
        ({"channels": 4}, r"takes images of 4 channels; files are read as RGB \(3\) or gray \(1\)"),
        ({"pictures": {**wide, "resize": 20}}, "resized to a side of 20 and cropped to 8×16, but only squares are cro"),
    ]
    for options, message in rows:
        packed(file, **options)
        with pytest.raises(ValueError, match=message):
            Predictor(file)
    half = packed(file).bfloat16()  # float32 is not needed
    qconv.save_packed(half, tmp_path / "half", **{**described(), "pictures": wide})
    assert len(Predictor(tmp_path / "half")(picture)) == 3


def test_other_pictures_than_those_of_training(folder: Path, tmp_path: Path) -> None:
    predictor = Predictor(folder / "model")
    for mode, size in (("L", (5, 9)), ("P", (64, 64)), ("CMYK", (8, 8)), ("RGBA", (1, 1))):
        Image.new(mode, size).save(tmp_path / f"{mode}.tif")
        (best, *_) = predictor(tmp_path / f"{mode}.tif")
        assert 1 / 3 <= best.probability <= 1


def test_a_single_output_is_that_of_the_second_class(picture: Path, tmp_path: Path) -> None:
    model = packed(tmp_path / "a", outputs=1, classes=CLASSES[:2])
    dog = model(normal(pixels(picture))).sigmoid().item()
    found = {guess.label: guess.probability for guess in Predictor(tmp_path / "a")(picture)}
    assert found == pytest.approx({"dog": dog, "cat": 1 - dog}, rel=1e-4)


def test_broken_pictures_are_named_and_the_others_are_not_lost(
    picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed(tmp_path / "model")
    (tmp_path / "broken.png").write_bytes(picture.read_bytes()[:60])
    names = [str(tmp_path / "none.png"), str(tmp_path / "broken.png"), str(picture)]
    assert main(["predict", str(tmp_path / "model"), *names]) == 1
    told = capsys.readouterr()
    assert f"qconv: error: image {names[0]} cannot be read: No such file or directory" in told.err
    assert f"qconv: error: image {names[1]} cannot be read: " in told.err
    assert "Traceback" not in told.err
    assert told.out.startswith(str(picture))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("predict none a.png", "packed model none: there is no such file"),
        ("predict {folder}/bare a.png", "it does not describe its images"),
        ("predict {folder}/names {folder}/picture.png", "the model has 3 classes, but its file names 1"),
        ("predict {folder}/model a.png --top 0", "--top (=0) must be at least 1"),
        ("verify {folder}/model", "name image files after {quoted}/model', such as {quoted}/model' *.jpg"),
        ("verify {folder}", "{folder} is not the folder of a run: there is no config.yaml; name a run's, such as "),
        ("verify {folder}/run", "run has no model.safetensors: write it by qconv export {quoted}/run' --to packed"),
        ("export {folder}/model {folder}/picture.png --to onnx --opset 0", "opset (=0) must be from 13 to 25"),
        ("verify", "required: MODEL\n"),
        ("evaluate", "required: RUN\n"),
        ("export", "required: MODEL, --to\n"),
        ("bench model", "required: MODEL\n"),
        ("verify model --other", "unrecognized arguments: --other"),
        ("export {folder}/model --to onnx", "name image files after {quoted}/model', such as {quoted}/model' *.jpg"),
        ("export {folder}/model --to packed", "{folder}/model must be the folder of a run"),
        ("export nodir --to onnx", "packed model nodir: there is no such file, run or network of the zoo"),
        ("export no/dir --to packed", "no/dir is not the folder of a run, a packed file or a network of the zoo"),
        ("export {folder} --to packed", "{folder} is not the folder of a run: there is no config.yaml"),
        (
            "export {folder}/model {folder}/picture.png --to onnx --out {folder}/none/a.onnx",
            "there is no folder {folder}/none",
        ),
    ],
)
def test_mistakes(arguments: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.suppress(SystemExit):
        assert main([word.format(folder=folder) for word in arguments.split()]) == 1
    told = capsys.readouterr().err
    assert ": error: " in told
    assert message.format(folder=folder, quoted=f"'{folder}") in told


def test_summary_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = packed(tmp_path / "model")
    table = qconv.summarize(model, (3, 8, 8))
    size = (tmp_path / "model").stat().st_size  # with what it says of the network, images and classes
    files = ["--csv", str(tmp_path / "rows.csv"), "--json", str(tmp_path / "all.json")]
    assert main(["summary", str(tmp_path / "model"), *files]) == 0
    shown = capsys.readouterr().out
    assert "bnn()" in shown
    assert f"({table.float_bytes:,} bytes to {size:,})" in shown
    assert json.loads((tmp_path / "all.json").read_text())["totals"]["packed_bytes"] == size > table.packed_bytes
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 1 + len(table.rows)


@pytest.mark.parametrize("command", ["predict", "summary", "verify", "export"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert f"example: qconv {command} " in " ".join(capsys.readouterr().out.split())


def test_a_model_is_verified(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, picture = str(folder / "model"), str(folder / "picture.png")
    assert main(["verify", model, picture, picture]) == 0
    header, *rows, verdict = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["layer", "arithmetic", "codes"]
    assert all(row.split()[1] == "binary" for row in rows)
    assert verdict.startswith("equal; outputs differ from the trained ones by up to ")
    assert verdict.endswith("; 0 of 2 predicted classes differ")
    assert main(["verify", model, str(folder / "none.png")]) == 1
    assert "none.png cannot be read" in capsys.readouterr().err


def test_a_model_that_differs(
    picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(model: torch.nn.Module, *_: object) -> FrozenModel:
        other = copy.deepcopy(model)
        norm = next(each for each in other.modules() if isinstance(each, torch.nn.BatchNorm2d))
        norm.bias.data[:3].add_(1)
        return freeze(other)

    monkeypatch.setattr(sys.modules["qconv.inference.verify"], "build", wrong)
    packed(tmp_path / "model")
    assert main(["verify", str(tmp_path / "model"), str(picture)]) == 1
    assert "not equal: 'blocks.1.conv' is the first layer that differs" in capsys.readouterr().out


@pytest.mark.nightly
def test_output_that_nobody_reads(picture: Path, tmp_path: Path) -> None:
    packed(tmp_path / "model")
    program = "import sys; from qconv.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "predict", str(tmp_path / "model"), str(picture)]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert started.stdout is not None
    started.stdout.close()
    assert started.stderr is not None
    assert (started.wait(timeout=120), started.stderr.read()) == (1, b"")
    started.stderr.close()


def test_a_model_is_exported_to_onnx(picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed(tmp_path / "model")
    out = tmp_path / "model.onnx"
    assert main(["export", str(tmp_path / "model"), "--to", "onnx", str(picture)]) == 0
    size, compared = capsys.readouterr().out.splitlines()
    assert size == f"{out}: {out.stat().st_size:,} bytes"
    assert compared.startswith("against the trained model: 0 of 1 predicted classes differ; 1 of 1 outputs are equal")
    assert main(["verify", str(tmp_path / "model"), "--exported", str(out), str(picture)]) == 0
    assert capsys.readouterr().out.startswith("onnx: 0 of 1 predicted classes differ from the trained model's")
    other = packed(tmp_path / "other")
    with torch.no_grad():
        other.fc.bias[other(normal(pixels(picture))).argmin()] += 1000
    qconv.save_packed(other, tmp_path / "other", **described())
    assert main(["verify", str(tmp_path / "other"), str(picture), "--onnx", str(out)]) == 1


def test_layers_that_a_file_for_phones_computes_on_floats_are_named(
    picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ai_edge_litert")
    model = qconv.convert(small_cnn(3, 3, width=8), schemes.minmax(8, 8))
    model(torch.randn(16, 3, 8, 8))
    qconv.save_packed(model.eval(), tmp_path / "model", **described(), classes=CLASSES)
    command = ["export", str(tmp_path / "model"), str(picture), "--to"]
    assert main([*command, "litert"]) == 0
    named = "blocks.1.conv, blocks.2.conv, blocks.3.conv"
    assert f"layers that compute on floats, with whole numbers: {named}\n" in capsys.readouterr().out
    assert main([*command, "litert", "--round-outputs"]) == 0
    assert "compute on floats" not in capsys.readouterr().out
    assert main([*command, "openvino", "--round-outputs"]) == 1
    assert "--round-outputs is for --to onnx, litert and executorch" in capsys.readouterr().err


def test_batches_of_the_frozen_model_name_what_the_packed_one_does(tmp_path: Path) -> None:
    packed(tmp_path / "model")
    names = [str(tmp_path / f"{number}.png") for number in range(7)]
    for number, name in enumerate(names):
        noise(number).save(name)
    names.insert(3, str(tmp_path / "none.png"))
    predictor = Predictor(tmp_path / "model")
    sizes: list[int] = []
    predictor.frozen.register_forward_pre_hook(lambda _, args: sizes.append(len(args[0])))
    found = list(predictor.many(names, batch_size=3))
    assert isinstance(predictor.frozen, FrozenModel)
    assert sizes == [3, 2, 2]  # one of the second batch is missing
    assert [path for path, _ in found] == names
    for path, guesses in found:
        if str(path).endswith("none.png"):
            assert isinstance(guesses, DecodingError)
            continue
        assert not isinstance(guesses, DecodingError)
        expected = shares(predictor.model, pixels(Path(str(path))))
        assert {guess.label: guess.probability for guess in guesses} == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match=r"batch_size \(=0\) must be at least 1"):
        next(predictor.many(names, batch_size=0))


def test_an_interrupted_command_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Source, "packed_file", property(interrupted))
    assert main(["predict", str(tmp_path / "model"), "a.png"]) == 130
    assert capsys.readouterr().err == "\nqconv: stopped by Ctrl-C\n"


def test_folders_patterns_and_a_table(picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed(tmp_path / "model.safetensors")
    inner = tmp_path / "pictures/inner"
    inner.mkdir(parents=True)
    for name in ("b.png", "a.PNG"):
        (inner / name).write_bytes(picture.read_bytes())
    for name in ("notes.txt", "scan.pdf", "film.mpg", "weights.h5", "plot.eps"):
        (inner / name).write_text("not an image")
    (inner / "broken.jpg").write_text("no image either")
    (inner / "._a.jpg").write_text("what a Mac leaves")
    (inner / ".checkpoints").mkdir()
    (inner / ".checkpoints/a.png").write_bytes(picture.read_bytes())
    folder, pattern, table = str(tmp_path / "pictures"), str(tmp_path / "*.png"), tmp_path / "table.csv"
    assert main(["predict", str(tmp_path), folder, pattern, str(inner / "b.png"), "--csv", str(table)]) == 1
    told = capsys.readouterr()
    expected = [str(inner / "a.PNG"), str(inner / "b.png"), str(picture)]
    assert [line.split()[0] for line in told.out.splitlines()] == expected
    assert "1 of 4 images could not be read" in told.err
    assert "broken.jpg" in told.err
    rows = table.read_text().splitlines()
    assert rows[0].startswith("picture,class_1,probability_1,class_2")
    assert [row.partition(",")[0] for row in rows[1:]] == [
        *(expected[0], expected[1]),
        *(str(inner / "broken.jpg"), expected[2]),
    ]
    (tmp_path / "links").mkdir()
    (tmp_path / "links/one").symlink_to(inner)
    (tmp_path / "links/other").symlink_to(inner)
    (tmp_path / "links/round").symlink_to(tmp_path / "links")
    files = picture_files([str(tmp_path / "links")])
    assert files == [str(tmp_path / "links/one" / name) for name in ("a.PNG", "b.png", "broken.jpg")]
    (tmp_path / "empty").mkdir()
    assert main(["predict", str(tmp_path), str(tmp_path / "empty")]) == 1
    assert "holds no images" in capsys.readouterr().err


def test_networks_of_the_zoo_and_single_paths(picture: Path) -> None:
    predictor = Predictor("smallcnn-bnn-digits")
    assert len(predictor(picture, top=10)) == 10
    with pytest.raises(TypeError, match=r"paths \(='.*picture.png'\) must be several"):
        list(predictor.many(picture))  # pyright: ignore[reportArgumentType]
