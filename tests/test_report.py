"""The page of a run: what it says is what the run's files say, and a browser shows it as it should."""

import html.parser
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from runs import config
from torch import Tensor

from qconv.cli import main, report as command
from qconv.images import Normalize
from qconv.runs.run_files import PAGE, PREDICTIONS
from qconv.training.callbacks.test_predictions import TestPredictions
from qconv.training.finished import FinishedRun
from qconv.training.report.classes import class_rows, confusion, interval, worst_pairs
from qconv.training.report.figures import trend
from qconv.training.report.gather import Report, gather, network_of, predict
from qconv.training.report.page import pace, render, whole_percent
from qconv.training.report.predictions import MISTAKES, SIDE, Predictions
from qconv.training.run import train
from qconv.training.shipping import leave_report

RUN = ("model.width=4", "trainer=cpu", "trainer.max_epochs=2")
SECTIONS = ("trained", "curves", "confusion", "classes", "mistakes", "diagnostics", "latency", "load")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)


class Page(html.parser.HTMLParser):
    """The tags of a page, the text of its sections, and its blocks of code."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.section, self.within = "", ""
        self.texts: dict[str, str] = {}
        self.code: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self.section = dict(attrs)["id"] or ""
        if tag == "pre":
            self.code.append("")
        self.within = tag

    def handle_endtag(self, tag: str) -> None:
        if tag in ("section", "style"):
            self.section = ""
        self.within = ""

    def handle_data(self, data: str) -> None:
        self.texts[self.section] = self.texts.get(self.section, "") + data
        if self.within == "code" and self.section == "load":
            self.code[-1] += data

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report") / "a run"  # with a space, which code to paste must quote
    train(config(*RUN, f'run_dir="{folder}"'))
    return folder


@pytest.fixture(scope="module")
def report(run: Path) -> Report:
    return gather(run, seconds=0)


def test_the_page_of_a_run(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = (run / PAGE).read_text()
    page = Page(text)
    assert tuple(each["id"] for each in page.of("section")) == SECTIONS
    result = json.loads((run / "result.json").read_text())
    assert f"{100 * result['test_accuracy']:.2f} %" in page.texts[""]
    assert f"{100 * result['test_accuracy']:.2f} %" in page.texts["curves"]
    for section, words in {
        "": ("guessing finds 10.00 %, always ", " float"),
        "trained": ("blocks.1.conv", "bnn()", "1/1", "BatchNorm2d"),
        "classes": ("precision", "least accurate first"),
        "diagnostics": ("blocks.2.conv", "never changed"),
        "latency": ("frozen (qconv.freeze)", f"{result['packed_bytes']:,}", "batch 64"),
    }.items():
        assert all(word in page.texts[section] for word in words), section
    # Nothing is loaded, nothing runs.
    assert not re.search(r"https?:|<script|<link|@import|\bon\w+=|url\(http", text.replace("http://www.w3.org/", ""))
    assert {each["src"].partition(",")[0] for each in page.of("img") if each["src"]} == {"data:image/png;base64"}
    assert page.of("html")[0]["lang"] == "en"
    assert all(each["alt"] for each in page.of("img"))
    assert all(each.get("aria-label") for each in page.of("figure") if each.get("role") == "img")
    assert len(page.of("th")) > 50
    assert all(each["scope"] in ("row", "col") for each in page.of("th"))
    # The code does what it says.
    monkeypatch.chdir(run.parent)
    Image.new("L", (8, 8)).save("picture.png")
    predictor, python, shell = page.code
    names: dict[str, Any] = {}
    exec(predictor + python, names)
    assert "Guess(label=" in capsys.readouterr().out
    assert names["frozen"](torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    words = shell.splitlines()[0].replace("'", "\0").split("\0")
    assert words == ["qconv predict ", str(run), " picture.png"]
    assert main(["predict", str(run), "picture.png"]) == 0


def test_the_decisions_are_those_of_the_network(run: Path, report: Report) -> None:
    finished = FinishedRun(run)
    predict(finished, network_of(finished))  # which reads the images first, as for a run without report=true
    data: Any = finished.data
    assert not any(tensor.is_inference() for split in data.splits.values() for tensor in split)
    images, labels = map(torch.cat, zip(*finished.batches("test"), strict=True))  # in their order
    with torch.no_grad():
        shares = finished.trained()(images).softmax(1)
    found = report.predictions
    assert found is not None
    assert report.result is not None
    assert len(found.labels) == 360
    assert found.labels.equal(labels)
    assert found.predicted.equal(shares.argmax(1))
    torch.testing.assert_close(found.confidence, shares.amax(1))
    assert found.accuracy == pytest.approx(report.result["test_accuracy"])
    wrong = (shares.argmax(1) != labels).nonzero().flatten()
    order = wrong[shares.amax(1)[wrong].argsort(descending=True)][:MISTAKES]
    torch.testing.assert_close(found.certain, shares.amax(1)[order])
    assert found.mistakes[0].tolist() == [labels[order[0]], shares.argmax(1)[order[0]]]
    normalize: Any = finished.data.normalize  # pyright: ignore[reportAttributeAccessIssue]
    pixels = images[order] * torch.tensor(normalize.std) + torch.tensor(normalize.mean)
    assert found.pixels.equal(pixels.round().to(torch.uint8))


def test_classes() -> None:
    labels, predicted = torch.tensor([0, 0, 0, 1, 1, 3]), torch.tensor([0, 1, 1, 1, 0, 3])
    matrix = confusion(labels, predicted, 4)
    assert matrix.tolist() == [[1, 2, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
    rows = class_rows(matrix, ["a", "b", "c", "d"])
    assert [(row.name, row.pictures, row.right, row.named, row.taken_for, row.taken) for row in rows] == [
        ("a", 3, 1, 2, "b", 2),
        ("b", 2, 1, 3, "a", 1),
        ("d", 1, 1, 1, "", 0),
    ]
    assert (rows[0].accuracy, rows[0].precision) == (1 / 3, 1 / 2)
    pairs = worst_pairs(matrix, ["a", "b", "c", "d"], 9)
    assert [(pair.label, pair.predicted, pair.count, pair.share) for pair in pairs] == [
        ("a", "b", 2, 2 / 3),
        ("b", "a", 1, 1 / 2),
    ]
    assert interval(0.9, 100) == pytest.approx((0.8256, 0.9448), abs=1e-4)  # Newcombe 1998, method 3
    assert interval(1.0, 10)[1] == 1.0
    assert [whole_percent(share) for share in (-1e-7, 0.001, 0.126, 1.0)] == ["0 %", "<1 %", "13 %", "100 %"]
    assert trend([0.5, 1.0, 0.0]) == "1.0,9.0 32.0,2.0 63.0,16.0"
    assert len(trend([1.0] * 1000).split()) <= 64
    assert [pace(speed) for speed in (2.5, 0.4)] == ["2.5 times as fast", "2.5 times slower"]


def batch(count: int, classes: int, size: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(count, classes, generator=generator)
    images = torch.randn(count, 3, size, size, generator=generator)
    return logits, images, torch.randint(classes, (count,), generator=generator)


def test_predictions_of_parts_are_those_of_the_whole(tmp_path: Path) -> None:
    logits, images, labels = batch(64, 5, 4)
    normalize = Normalize([100.0] * 3, [30.0] * 3)
    whole = Predictions.of_batch(logits, images, labels, normalize)
    parts = [
        Predictions.of_batch(*each, normalize)
        for each in zip(logits.split(7), images.split(7), labels.split(7), strict=True)
    ]
    parts[2] = Predictions.joined([parts[2]])
    joined = Predictions.joined(parts)
    joined.save(tmp_path / "file")
    for name, tensor in vars(Predictions.load(tmp_path / "file")).items():
        assert tensor.equal(getattr(whole, name)), name
    (tmp_path / "file").write_bytes(b"no")
    with pytest.raises(ValueError, match="file is not a file of predictions"):
        Predictions.load(tmp_path / "file")
    big = Predictions.of_batch(*batch(2, 5, 3 * SIDE), None)
    assert tuple(big.pixels.shape[1:]) == (3, SIDE, SIDE)
    none = Predictions.of_batch(torch.eye(5)[:2], torch.zeros(2, 3, 3 * SIDE, 2 * SIDE), torch.arange(2), None)
    assert tuple(none.pixels.shape) == (0, 3, SIDE, round(SIDE * 2 / 3))


def test_processes_gather_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = [TestPredictions(), TestPredictions()]
    trainer: Any = SimpleNamespace(world_size=2, datamodule=None)
    for seed, each in enumerate(kinds):
        logits, images, labels = batch(8, 5, 4, seed)
        each.on_test_batch_end(trainer, trainer, logits, (images, labels), 0)
    module = "qconv.training.callbacks.test_predictions"
    monkeypatch.setattr(f"{module}.is_distributed", lambda: True)

    def gather_all(shares: list[Any], mine: Any) -> None:
        assert mine == (kinds[0].parts, "")
        shares[:] = [(each.parts, each.problem) for each in kinds]

    monkeypatch.setattr(f"{module}.dist.all_gather_object", gather_all)
    kinds[0].on_test_epoch_end(trainer, trainer)
    assert kinds[0].predictions().labels.tolist() == [*batch(8, 5, 4, 0)[2], *batch(8, 5, 4, 1)[2]]
    kinds[0].on_test_batch_end(trainer, trainer, None, (1, 2), 0)  # whatever it is, the test goes on
    with pytest.raises(ValueError, match="predictions of the test were not kept"):
        kinds[0].predictions()


def test_a_thousand_classes(report: Report) -> None:
    names = [f"<n{index}>" for index in range(1000)]
    labels = torch.arange(50_000) % 1000
    predicted = torch.where(torch.arange(50_000) % 7 < 2, (labels + 1) % 1000, labels)
    predicted[labels == 5] = 6
    logits, images, few = batch(30, 1000, 3 * SIDE)
    mistakes = Predictions.of_batch(logits, images, few)
    found = replace(mistakes, labels=labels, predicted=predicted, confidence=torch.ones(50_000))
    text = render(replace(report, classes=names, predictions=found))
    assert len(text) < 5_000_000
    page = Page(text)
    assert "1,000,000 cells" in page.texts["confusion"]
    assert page.texts["confusion"].split("of the class")[1].split()[0] == "<n5><n6>50100.00"  # a row of the table
    assert len(page.of("td")) < 6000
    assert "20 least accurate of 1,000 classes" in page.texts["classes"]
    assert page.texts["classes"].count("<n999>") == 2  # in the table of all, and as what another is taken for
    assert len(page.of("img")) == 20
    assert "&lt;n5&gt;" in text
    assert "<n5>" not in text


@pytest.mark.nightly
def test_an_interrupted_run_and_one_of_an_earlier_version(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "SECONDS", 0.0)
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    for name in (PAGE, PREDICTIONS):
        (folder / name).unlink()
    assert main(["report", str(folder)]) == 0  # tests the network once more
    assert Predictions.load(folder / PREDICTIONS).labels.equal(Predictions.load(run / PREDICTIONS).labels)
    for name in ("result.json", "model.safetensors", "checkpoints/best.ckpt"):
        (folder / name).unlink()
    assert main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0
    assert f"{tmp_path / 'page.html'}: " in capsys.readouterr().out
    page = Page((tmp_path / "page.html").read_text())
    assert "has not finished: 2 of 2 epochs" in " ".join(page.texts[""].split())
    assert f"qconv train resume={folder}" in page.texts[""]
    assert all(page.texts[section].strip() for section in SECTIONS)
    assert "choose nothing" in page.texts["mistakes"]
    (folder / "metrics.csv").unlink()
    shutil.rmtree(folder / "checkpoints")
    assert main(["report", str(folder)]) == 0
    assert "No epoch has ended yet" in (folder / PAGE).read_text()
    for arguments, message in (
        ([str(tmp_path / "none")], "there is no folder"),
        ([str(folder), "--out", str(tmp_path / "none/page.html")], "there is no folder"),
    ):
        assert main(["report", *arguments]) == 1
        assert message in capsys.readouterr().err


def test_a_report_that_fails_is_no_failure_of_the_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data: Any = FinishedRun(run).data
    cfg = config(*RUN, f"run_dir={tmp_path}")
    decisions = TestPredictions()
    for page in (False, True):
        (tmp_path / PREDICTIONS).touch()
        if page:
            (tmp_path / PAGE).mkdir()
        leave_report(cfg, torch.nn.Identity(), data, decisions)
        assert "no report is written: " in capsys.readouterr().out
    (tmp_path / PAGE).rmdir()
    (tmp_path / PAGE).touch()
    leave_report(config(*RUN, f"run_dir={tmp_path}", "report=false"), torch.nn.Identity(), data, decisions)
    assert not list(tmp_path.glob("[!.]*"))
    assert capsys.readouterr().out == ""


LOOK = """<body><script>
const found = [];
async function look(width) {
  const frame = document.createElement('iframe');
  frame.style = `width:${width}px;height:900px;border:0`;
  frame.src = location.hash.slice(1);
  document.body.append(frame);
  await new Promise(done => frame.onload = done);
  const page = frame.contentDocument;
  const heights = [...page.querySelectorAll('section')].map(each => [each.id, each.clientHeight]);
  const broken = [...page.images].filter(each => !each.complete || !each.naturalWidth).length;
  const small = [...page.querySelectorAll('main p, main td, main dd, figcaption')]
    .filter(each => parseFloat(getComputedStyle(each).fontSize) < 12 && each.textContent).length;
  const drawn = [...page.querySelectorAll('.panels svg')].filter(each => each.getBoundingClientRect().height > 100);
  found.push({width, scroll: page.documentElement.scrollWidth, broken, small, drawn: drawn.length,
              heights: Object.fromEntries(heights)});
}
(async () => { for (const width of [390, 1280]) await look(width); document.title = JSON.stringify(found); })();
</script></body>"""


@pytest.mark.nightly
@pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome: apt-get install chromium")
def test_in_a_browser(run: Path, report: Report, tmp_path: Path) -> None:
    wide = tmp_path / "wide.html"  # long names, and as many classes as a matrix takes
    names = [f"a_class_with_a_very_long_name_{index}" for index in range(25)]
    wide.write_text(render(replace(report, classes=names, folder="/a" * 200)))
    look = tmp_path / "look.html"
    look.write_text(LOOK)
    for file in (run / PAGE, wide):
        browser = subprocess.run(
            [
                *(str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"),
                *("--enable-logging=stderr", "--virtual-time-budget=20000", f"--user-data-dir={tmp_path / 'profile'}"),
                *("--dump-dom", f"{look.as_uri()}#{file.as_uri()}"),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert "CONSOLE" not in browser.stderr, browser.stderr
        title = re.search(r"<title>(.*?)</title>", browser.stdout)
        assert title, browser.stdout[-2000:]
        narrow, broad = json.loads(html.unescape(title[1]))
        for each in (narrow, broad):
            assert each["scroll"] <= each["width"], "the page scrolls sideways"
            assert tuple(each["heights"]) == SECTIONS
            assert min(each["heights"].values()) > 80
            assert (each["broken"], each["small"], each["drawn"]) == (0, 0, 3)
        assert math.fsum(narrow["heights"].values()) > math.fsum(broad["heights"].values())
