"""A run's network on images that are not those of its training, and which images a limit or a split takes."""

import json
import shutil
import tarfile
from functools import partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from runs import config
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from qconv.cli import main as cli
from qconv.cli.configs import folder as configs
from qconv.data import (
    BrokenPictureError,
    ImageFolderDataModule,
    ImageNetDataModule,
    Normalize,
    PicturesDataModule,
    PreparedDataModule,
    WebDatasetDataModule,
    prepare_pictures,
)
from qconv.data.prepared_files import Form
from qconv.training import Classifier, make_trainer
from qconv.training.finished import FinishedRun
from qconv.training.run import train
from qconv.training.stored_config import stored_config
from qconv.training.trained_on import (
    SPLITTING,
    arguments_as_trained,
    describe_pictures,
    other_classes,
    prepare_as_trained,
)
from qconv.zoo.predict import Predictor

NAMES = ("bright", "dark")
SHORT = ("model.width=4", "trainer=cpu", "trainer.max_epochs=2", "optimizer.lr=0.05", "report=false")


def draw(folder: Path, split: str, count: int, side: int = 12, shift: int = 0, names: tuple[str, ...] = NAMES) -> None:
    """Images of two classes that differ in brightness alone, so that mean and deviation decide."""
    generator = np.random.default_rng(0)
    for label, name in enumerate(names):
        (folder / split / name).mkdir(parents=True, exist_ok=True)
        for index in range(count):
            level = (170 if label == 0 else 80) + shift
            pixels = np.clip(generator.normal(level, 20, (side, side)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / split / name / f"{index}.png")


def folder_words(root: Path, cache: Path) -> tuple[str, ...]:
    return (f"data.root={root}", "data.channels=1", "data.batch_size=16", f"+data.cache={cache}")


class Narrow(ImageFolderDataModule):
    """Somebody's, that takes nothing else."""

    def __init__(self, root: str) -> None:
        super().__init__(root)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on images of 12×12, of which a fifth validates."""
    place = tmp_path_factory.mktemp("pictures")
    for split, count in (("train", 60), ("test", 20)):
        draw(place / "data", split, count)
    words = ("data=image_folder", "data.val_size=0.2", "data.augment=[]", *folder_words(place / "data", place))
    result = train(config(*SHORT, *words, f"run_dir={place / 'run'}"))
    assert result.test_accuracy == 1
    return place / "run"


@pytest.fixture
def other(run: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be changed."""
    return Path(shutil.copytree(run, tmp_path / "run"))


def evaluated(folder: Path, *words: str) -> float:
    assert cli(["evaluate", str(folder), f"run_dir={folder}/other", *words]) == 0
    return json.loads((folder / "other/evaluation.json").read_text())["test_accuracy"]


def test_pictures_elsewhere_are_seen_as_those_of_the_training(other: Path, tmp_path: Path) -> None:
    """All are brighter and larger: with their own mean they'd be told apart, with that of the run they aren't."""
    for split, count in (("train", 20), ("test", 20)):
        draw(tmp_path / "data", split, count, side=18, shift=85)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("qconv.training.assemble.prepare_as_trained", lambda *_: None)
        assert evaluated(other, f"data.root={tmp_path / 'data'}") > 0.9
    assert evaluated(other, f"data.root={tmp_path / 'data'}") == pytest.approx(0.5, abs=0.1)
    trained = FinishedRun(other)
    own = cast(Any, trained.data).normalize
    cfg = trained.cfg.copy()
    cfg.data.root = str(tmp_path / "data")
    elsewhere = FinishedRun(other)
    elsewhere.cfg = cfg
    data = cast(Any, elsewhere.data)
    assert (data.image_size, data.normalize) == ((12, 12), own)
    assert elsewhere.labelled(3, "test")[0].shape == (3, 1, 12, 12)
    assert trained.labelled(8, "test")[1].unique().tolist() == [0, 1]  # though those of class 0 are stored first


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            ("dark", "light"),
            "was trained with 'bright' as class 0, which is 'dark' in the data: give the classes their",
        ),
        (("a", "b", "c"), "was trained on 2 classes (bright, dark), but the data have 3 (a, b, c): give"),
    ],
)
def test_other_classes_are_refused(
    names: tuple[str, ...], says: str, other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split in ("train", "test"):
        draw(tmp_path / "data", split, 3, names=names)
    assert cli(["evaluate", str(other), f"data.root={tmp_path / 'data'}"]) == 1
    assert says in capsys.readouterr().err
    with pytest.raises(ValueError, match="was trained "):
        train(
            config(
                *SHORT,
                *("data=image_folder", "data.val_size=0.2", "data.augment=[]"),
                *folder_words(tmp_path / "data", tmp_path),
                *("trainer.max_epochs=3", f"resume={other}", f"run_dir={tmp_path / 'new'}"),
            )
        )


def test_a_run_does_not_go_on_with_more_pictures(
    run: Path, other: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They'd be split anew, and validate what has been trained on."""
    shutil.copytree(run.parent / "data", tmp_path / "data")

    def go_on(*words: str) -> None:
        monkeypatch.chdir(tmp_path)
        cfg = stored_config(other, [f"data.root={tmp_path / 'data'}", "trainer.max_epochs=3", *words], configs())
        cfg.resume = str(other)
        train(cfg)

    shutil.copy(tmp_path / "data/train/dark/0.png", tmp_path / "data/train/dark/new.png")
    with pytest.raises(ValueError, match=r"was trained on 96 images and there are 97 now, so it may have been trained"):
        go_on()
    assert f"root: {run.parent}" in (other / "config.yaml").read_text()  # it has not gone on
    assert evaluated(other, f"data.root={tmp_path / 'data'}") == 1
    (tmp_path / "data/train/dark/new.png").rename(tmp_path / "data/train/bright/new.png")
    (tmp_path / "data/train/dark/0.png").rename(tmp_path / "data/elsewhere.png")
    with pytest.raises(ValueError, match=r"some of the run's images have another name or class now, so it may have"):
        go_on()
    (tmp_path / "data/train/bright/new.png").unlink()
    (tmp_path / "data/elsewhere.png").rename(tmp_path / "data/train/dark/0.png")
    go_on()
    assert len((other / "metrics.csv").read_text().splitlines()) == 4


def test_another_picture_leaves_the_others_in_their_split(tmp_path: Path) -> None:
    draw(tmp_path, ".", 60)

    def tested(**options: Any) -> set[str]:
        data = ImageFolderDataModule(str(tmp_path), cache=str(tmp_path), **options)
        return {f"{path.parent.name}/{path.name}" for path, _ in data.tree.splits["test"]}

    before, before_by_number = tested(), tested(split_by="number")
    assert len(before) == len(before_by_number) == 24
    shutil.copy(tmp_path / "dark/0.png", tmp_path / "dark/-first.png")
    assert len(tested() - before) <= 1  # the new one, or if their number has risen one of the others
    assert len(tested(split_by="number") - before_by_number) > 5
    assert tested(split_seed=1) != tested()
    with pytest.raises(ValueError, match=r"split_by \(='size'\) must be 'name' or 'number'"):
        tested(split_by="size")


def test_the_split_of_a_checkpoint() -> None:
    node = {"_target_": "qconv.data.ImageFolderDataModule", "root": "a"}
    assert arguments_as_trained(node, None) == {}
    assert arguments_as_trained({**node, "split_by": "name"}, {}) == {}
    pictures = {"size": [3, 8, 6]}
    now = {"trained_on": {"classes": None, "pictures": pictures, "split_by": "name"}}
    assert arguments_as_trained(node, now) == {"split_by": "name", "image_size": [8, 6]}
    assert arguments_as_trained({**node, "image_size": 4}, now) == {"split_by": "name"}
    deep = {"trained_on": {"pictures": {**pictures, "pixel_range": [0.0, 4095.0]}, "split_by": "name"}}
    assert arguments_as_trained({**node, "image_size": 4}, deep) == {"split_by": "name", "pixel_range": [0.0, 4095.0]}
    assert arguments_as_trained({**node, "image_size": 4, "pixel_range": [0, 9]}, deep) == {"split_by": "name"}
    of_before = {"config": {"data": {"root": "./a"}}, "trained_on": {"split_by": "number"}}
    assert arguments_as_trained(node, None, [{}, {"config": {"data": {"root": "b"}}}]) == {}
    assert arguments_as_trained(node, None, [of_before]) == {"split_by": "number"}  # of a network that it starts from
    assert arguments_as_trained(node, now, [of_before]) == {"split_by": "name", "image_size": [8, 6]}
    files_are_gone = ({1: {}}[number] for number in (0,))  # it raises when it is asked for one
    assert arguments_as_trained(node, now, files_are_gone) == {"split_by": "name", "image_size": [8, 6]}
    assert arguments_as_trained({**node, "_target_": "test_other_pictures.Narrow"}, now) == {}
    for other in ("qconv.data.CIFARDataModule", "my_data.Own", "os.path.join"):
        assert arguments_as_trained({"_target_": other, "test_size": 0.2}, now) == {}


def stripes(root: Path, bits: int, factor: int = 1) -> Path:
    """Two classes of images of 12 bits that differ by 200 in their stripes alone, in files of 16 bits, or cut to 8."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 8)):
        for name, axis in (("across", 0), ("along", 1)):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                bright = np.indices((16, 16))[axis] % 8 < 4
                pixels = (1150 + 200 * bright + generator.integers(-20, 20, (16, 16))) * factor
                stored = pixels.astype(np.uint16) if bits == 16 else (pixels >> 4).astype(np.uint8)
                Image.fromarray(stored).save(root / split / name / f"{number}.png")
    return root


def folder_of(root: Path, place: Path, **options: Any) -> ImageFolderDataModule:
    return ImageFolderDataModule(str(root), cache=str(place), **options)


LARGE: dict[str, Any] = {"image_size": 16, "resize": 16, "workers": 0, "val_size": 4}


def large_of(root: Path, place: Path, **options: Any) -> ImageNetDataModule:
    del place
    return ImageNetDataModule(str(root), **LARGE, **options)


def prepared_of(root: Path, place: Path, form: Form = "raw", **options: Any) -> PreparedDataModule:
    prepare_pictures(root, place / f"{root.name}-{form}", size=16, form=form, **options)
    return PreparedDataModule(str(place / f"{root.name}-{form}"), **LARGE)


def shards_of(root: Path, place: Path, **options: Any) -> WebDatasetDataModule:
    for split in ("train", "test"):
        with tarfile.open(root / f"{split}.tar", "w") as tar:
            for number, path in enumerate(sorted((root / split).rglob("*.png"))):
                (path.parent / "label.cls").write_text("1" if path.parent.name == "along" else "0")
                tar.add(path, f"{number:04}.png")
                tar.add(path.parent / "label.cls", f"{number:04}.cls")
    tars = {split: str(root / f"{split}.tar") for split in ("train", "test")}
    return WebDatasetDataModule(
        tars["train"], val=tars["test"], test=tars["test"], index=str(place / "index"), **LARGE, **options
    )


@pytest.mark.parametrize("made", [folder_of, large_of, prepared_of, partial(prepared_of, form="jpeg"), shards_of])
def test_pictures_of_12_bits_in_files_of_16(made: Any, tmp_path: Path) -> None:
    """Whatever reads them: as those that were cut to 8 bits before, or refused with the remedy."""

    def pixels_of(root: Path, **options: Any) -> torch.Tensor:
        data = made(root, tmp_path, **options)
        data.prepare_data()
        data.setup("fit")
        batches = [data.on_before_batch_transfer(batch, 0) for batch in data.test_dataloader()]
        return torch.cat([images for images, *_ in batches])

    whole = pixels_of(stripes(tmp_path / "8", 8))
    deep = stripes(tmp_path / "12", 16)
    assert pixels_of(deep, pixel_range=(0, 4095)).equal(whole)
    assert len(whole.unique()) > 5
    shutil.rmtree(tmp_path / "12-raw", ignore_errors=True)
    shutil.rmtree(tmp_path / "12-jpeg", ignore_errors=True)
    with pytest.raises(
        BrokenPictureError, match=r"grey levels would be left, of values up to 1,\d\d\d: in training, set"
    ):
        pixels_of(deep)
    with pytest.raises(ValueError, match=r"pixel_range \(=\(4095, 0\)\) must be two numbers, the lower one first"):
        pixels_of(deep, pixel_range=(4095, 0))


@pytest.mark.nightly
def test_a_run_on_12_bits_says_how_it_reads_files(tmp_path: Path) -> None:
    """To `predict`, and to an evaluation elsewhere."""
    root, run = stripes(tmp_path / "data", 16), tmp_path / "run"
    words = ("data=image_folder", "data.val_size=0.2", "data.augment=[]", "data.pixel_range=[1000,1500]")
    result = train(config(*SHORT, *words, *folder_words(root, tmp_path), f"run_dir={run}"))
    assert result.test_accuracy is not None
    assert result.test_accuracy > 0.7
    assert evaluated(run, f"data.root={stripes(tmp_path / 'other', 16)}") == result.test_accuracy
    predictor, trained = Predictor(run), FinishedRun(run)
    assert predictor.pictures.pixel_range == [1000, 1500]
    files = sorted((root / "test").rglob("*.png"))
    fed = torch.cat([images for images, _ in trained.batches("test")])
    assert torch.stack([predictor.read(path) for path in files]).equal(fed)
    right = [predictor(path)[0].label == path.parent.name for path in files]
    assert sum(right) / len(right) == result.test_accuracy


def test_a_data_module_of_somebody_else() -> None:
    """Its names may mean something else."""
    nothing = {"pictures": None, "classes": None}
    assert describe_pictures(SimpleNamespace()) == nothing
    for normalize in (True, print, SimpleNamespace(mean=0.5, std=0.5)):
        own = SimpleNamespace(normalize=normalize, in_channels=3, image_size=(8, 8), classes=10, resize=print)
        assert describe_pictures(own) == nothing
        prepare_as_trained(own, {"trained_on": {"pictures": {"mean": [1], "std": [2]}}}, "x")
        assert own.normalize is normalize
    own = SimpleNamespace(normalize=Normalize((0,), (1,)), in_channels=1, image_size=8, classes="ab")
    assert describe_pictures(own) == nothing
    own.image_size, own.classes = [8, 8], range(2)
    own.normalize = SimpleNamespace(mean=torch.zeros(1), std=np.ones(1, np.float32))
    pictures = {"size": [1, 8, 8], "resize": None, "mean": [0.0], "std": [1.0]}
    assert describe_pictures(own) == {"pictures": pictures, "classes": ["0", "1"]}


@pytest.mark.filterwarnings("ignore::lightning_fabric.utilities.warnings.PossibleUserWarning")  # of workers
def test_without_a_data_module(tmp_path: Path) -> None:
    """`Classifier` in a Trainer of one's own."""
    pictures = TensorDataset(torch.rand(8, 1, 8, 8), torch.arange(8) % 2)
    loader, path = DataLoader(pictures, 4), tmp_path / "a.ckpt"

    def made() -> Classifier:
        return Classifier(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), partial(torch.optim.SGD, lr=0.1))

    trainer = make_trainer(accelerator="cpu", max_epochs=1)
    trainer.fit(made(), loader, loader)
    trainer.save_checkpoint(path)
    for act, name in (("test", "test_loss"), ("validate", "val_loss")):
        run = getattr(make_trainer(accelerator="cpu"), act)
        (found,) = run(made(), dataloaders=loader, ckpt_path=path, weights_only=True, verbose=False)
        assert 0 < found[name] < 10
    make_trainer(accelerator="cpu", max_epochs=2).fit(made(), loader, loader, ckpt_path=path, weights_only=True)


def test_numbers_in_place_of_names() -> None:
    """As those of WebDataset."""
    checkpoint = {"trained_on": {"classes": ["n01440764", "n01443537"]}}
    assert not other_classes(SimpleNamespace(classes=["0", "1"]), checkpoint)
    assert not other_classes(SimpleNamespace(classes=["cat", "dog"]), {"trained_on": {"classes": ["0", "1"]}})
    assert "was trained on 2 classes" in other_classes(SimpleNamespace(classes=["0"]), checkpoint)


def test_the_arguments_that_split_a_folder() -> None:
    known = {**signature(PicturesDataModule).parameters, **signature(ImageFolderDataModule).parameters}
    assert {name: known[name].default for name in SPLITTING} == SPLITTING


def told(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.nightly
def test_a_network_that_starts_from_another_is_tested_on_the_same_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    draw(tmp_path / "data", ".", 20)
    words = (*SHORT[:2], "trainer.max_epochs=1", "report=false", "data=image_folder", "data.augment=[]")
    place = folder_words(tmp_path / "data", tmp_path)

    def tested() -> set[str]:
        return {path.name for path, _ in made[-1].tree.splits["test"]}

    made: list[Any] = []
    original = ImageFolderDataModule.__init__
    monkeypatch.setattr(
        ImageFolderDataModule,
        "__init__",
        lambda self, *args, **more: (original(self, *args, **more), made.append(self))[0],
    )
    train(config(*words, *place, "+data.split_by=number", f"run_dir={tmp_path / 'one'}"))
    before = tested()
    best = f"init_from={tmp_path / 'one/checkpoints/best.ckpt'}"
    train(config(*words, *place, best, f"run_dir={tmp_path / 'two'}"))
    assert tested() == before
    assert "may have been trained on" not in told(capsys)
    otherwise = ("data.val_size=0.3", "+data.split_by=name")
    train(config(*words, *place, best, *otherwise, f"run_dir={tmp_path / 'other'}"))
    said = told(capsys).partition("/one/checkpoints/best.ckpt: ")[2]
    assert said.startswith(
        "its run divided this folder differently (data.val_size: 0.1 → 0.3, data.split_by: number → name), "
        "so it may have been trained on images that validate or are tested now"
    ), said[:300]
    draw(tmp_path / "data", ".", 21)
    train(config(*words, *place, best, f"run_dir={tmp_path / 'more'}"))
    assert "differently (some have another name or class now), so it may" in told(capsys)
    train(config(*words, *place, f"run_dir={tmp_path / 'three'}"))
    assert tested() != before
