"""The benchmark: it checks before it times, and writes what it prints."""

import contextlib
import copy
import csv
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pictures import draw_tree, noise
from runs import rows_of
from torch import nn

import qconv
from qconv import schemes
from qconv.bench import binary_conv, data, forms, peak, train_step
from qconv.bench.rows import quartiles
from qconv.cli import main
from qconv.data import prepare_pictures
from qconv.kernels import operators
from qconv.models import small_cnn

QUICK = ["bench", "train-step", "--rounds", "2", "--warmup", "0", "--batch-size", "2"]


@pytest.mark.nightly
@pytest.mark.parametrize("options", [[], ["--autocast", "--channels-last"], ["--compile"]], ids=str)
def test_a_row_for_each_case_and_scheme(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.csv"
    for _ in range(2):
        arguments = [*QUICK, "--case", "8@6", "--scheme", "identity", "bnn", "--csv", str(file), *options]
        assert main(arguments) == 0
    rows = rows_of(file)
    assert [row["scheme"] for row in rows] == ["identity()", "bnn()"] * 2
    assert all(float(row["ratio"]) > 0 and row["machine"] and row["torch"] for row in rows)
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 6
    assert rows[0]["case"] in printed[1]


def test_rows_of_lean_models(tmp_path: Path) -> None:
    file = tmp_path / "results.csv"
    assert main([*QUICK, "--case", "64@16", "--scheme", "bnn", "--lean", "--csv", str(file)]) == 0
    rows = rows_of(file)
    assert [row["lean"] for row in rows] == ["", "exact", "fast"]
    saved = [float(row["quantized_saved_mib"]) for row in rows]
    assert saved[0] == float(rows[0]["float_saved_mib"]) > 8 * max(saved[1:])
    assert not any(row["quantized_peak_mib"] for row in rows)


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system does not say the peak")
def test_the_peak_is_that_of_the_step() -> None:
    makes = (partial(partial, torch.ones, count * 2**20) for count in (8, 16))
    one, two = (peak.peak_mib(make, "cpu") for make in makes)
    assert one == pytest.approx(32, abs=2)
    assert two == pytest.approx(64, abs=2)
    settings = train_step.Settings(batch_size=32, rounds=1, warmup=0, peak=True)
    result = train_step.measure(train_step.Case.named("64@16"), schemes.bnn(), settings, "fast")
    pictures = 32 * 64 * 16 * 16 * 4 / 2**20  # MiB of floats
    assert result.float_peak_mib is not None
    assert result.quantized_peak_mib is not None
    assert all(pictures <= each < 20 * pictures for each in (result.float_peak_mib, result.quantized_peak_mib))


@pytest.mark.nightly
def test_a_peak_that_is_not_measured() -> None:
    assert peak.peak_mib(partial(partial, torch.ones, 1), "meta") is None
    with pytest.raises(RuntimeError, match=r"the process that measures memory failed:[^$]*ZeroDivisionError"):
        peak.peak_mib(partial(partial, divmod, 1, 0), "cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*QUICK, "--case", "8x6"], r"case (=8x6) must be CHANNELS@SIZE, such as 128@16, resnet18 or resnet20"),
        ([*QUICK, "--case", "8@6", "--rounds", "0"], "rounds (=0) must be at least 1"),
        ([*QUICK, "--case", "8@6", "--csv", "/dev/null/results.csv"], "Not a directory"),
        ([*QUICK, "--scheme", "bnm"], "invalid choice: 'bnm'"),
        (["bench", "data"], "name --small, --large or both"),
        (["bench", "data", "--small", "a", "--prepared", "b"], "--prepared needs --large"),
        (["bench", "binary-conv", "--case", "8"], "case (='8') must be CHANNELS@SIZE"),
        (["bench", "binary-conv", "--case", "8@5", "--batch-size", "0"], "batch_size (=0) must be at least 1"),
        (["bench", "model", "test_bench:none"], "module test_bench has no 'none'"),
        (["bench", "model", "test_bench:_few"], "must return (float model, quantized model, images)"),
        (["bench", "model", "no_such_module:pair"], "No module named 'no_such_module'"),
        (["bench", "model", "test_bench:pair", "cat.jpg"], "IMAGE is for a packed model"),
        (["bench", "model", "test_bench:pair", "--count", "0"], "--count (=0) must be at least 1"),
    ],
)
def test_mistakes(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    with contextlib.suppress(SystemExit):
        assert main(arguments) == 1
    assert message in capsys.readouterr().err


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return draw_tree(tmp_path / "tree", {"train": 6, "val": 6}, lambda seed, _: noise(seed, 24, 24))


@pytest.mark.nightly
def test_pictures_a_second(pictures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = pictures.parent / "results.csv"
    prepared = pictures.parent / "prepared"
    prepare_pictures(pictures, prepared)
    sides = ["--small", str(pictures), "--large", str(pictures), "--prepared", str(prepared)]
    assert main(["bench", "data", *sides, "--rounds", "2", "--batch-size", "4", "--csv", str(file)]) == 0
    rows = rows_of(file)
    assert [row["pictures"] for row in rows] == ["small", "large", "prepared", "prepared, bytes"]
    assert all(float(row["ratio"]) > 0 and row["cpu"] and row["torch"] for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_binary_convolutions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "results.csv"
    arguments = ["bench", "binary-conv", "--case", "8@5", "70@4", "--batch-size", "1", "2", "--rounds", "2"]
    assert main([*arguments, "--csv", str(file)]) == 0
    rows = rows_of(file)
    assert [row["layer"] + " × " + row["batch_size"] for row in rows] == ["8@5 × 1", "70@4 × 1", "8@5 × 2", "70@4 × 2"]
    assert all(float(row["ratio"]) > 0 and row["cpu"] and row["commit"] for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_sides_that_differ_are_not_timed(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, settings = train_step.Case.named("8@6"), train_step.Settings(batch_size=2, rounds=1)
    monkeypatch.setattr(binary_conv, "pack_weight", lambda signs: operators.pack_weight(-signs))
    monkeypatch.setattr(data.PILPictures, "__getitem__", lambda *_: (torch.zeros(3, 24, 24), 0))
    monkeypatch.setattr(train_step, "made_lean", lambda model, exact: nn.Sequential(model, nn.Tanh()))
    for call, message in (
        (lambda: binary_conv.measure("8@5", 1, 1), "8@5: the two sides differ"),
        (lambda: data.measure_small(str(pictures), 4, 1), "the two sides normalize differently"),
        (lambda: train_step.measure(case, schemes.bnn(), settings, "exact"), "the exact lean model differs from the"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()
    monkeypatch.setattr(train_step, "identity", schemes.bwn)
    with pytest.raises(RuntimeError, match=r"case 8@6: the identity scheme differs from torch\.nn; nothing was timed"):
        train_step.measure(case, schemes.bnn(), settings)


def pair() -> tuple[torch.nn.Module, torch.nn.Module, torch.Tensor, torch.Tensor]:
    """A network, its quantized form, images, and labels of which the quantized form gets 3 of 4 right."""
    torch.manual_seed(0)
    network = small_cnn(1, 4, width=8)
    images = torch.randn(8, 1, 8, 8)
    quantized = qconv.convert(copy.deepcopy(network), schemes.lsq(4, 4))
    qconv.calibrate(quantized, [images])
    labels = quantized.eval()(images).argmax(1)
    labels[:2] = (labels[:2] + 1) % 4
    return network, quantized, images, labels


@pytest.mark.nightly
def test_forms_of_a_network(tmp_path: Path) -> None:
    network, quantized, images, labels = pair()
    before = {name: tensor.clone() for name, tensor in quantized.state_dict().items()}
    result = qconv.compare_models(network, quantized.train(), images, labels, batch_sizes=(1, 16), seconds=0)
    forms = {form.name: form for form in result.forms}
    assert list(forms) == ["float", "trained", "frozen", "ONNX", "float, ONNX Runtime"]
    assert forms["float, ONNX Runtime"].agreement == forms["float"].agreement
    assert f"Fastest to ship, batch 16: {result.fastest(16)}." in str(result)
    assert result[result.fastest(16)].timings[16].ms == min(form.timings[16].ms for form in result.forms)
    assert all(quantized.state_dict()[name].equal(tensor) for name, tensor in before.items())
    assert quantized.training
    found = network.eval()(images).argmax(1)
    assert forms["float"].agreement == (found == quantized.eval()(images).argmax(1)).float().mean()
    assert forms["float"].accuracy == (found == labels).float().mean()
    assert [forms[name].accuracy for name in ("trained", "frozen", "ONNX")] == [0.75] * 3
    assert [forms[name].agreement for name in ("trained", "frozen", "ONNX")] == [1] * 3
    qconv.save_packed(quantized, tmp_path / "model")
    assert forms["frozen"].bytes == (tmp_path / "model").stat().st_size < (forms["float"].bytes or 0)
    rows = list(csv.DictReader(result.to_csv(tmp_path / "forms.csv").splitlines()))
    assert (tmp_path / "forms.csv").read_text() == result.to_csv()
    assert all(float(row["low_batch_16"]) <= float(row["ms_batch_16"]) <= float(row["high_batch_16"]) for row in rows)
    assert rows[0]["speed_batch_1"] == "1.0"
    assert "75.00 %" in str(result).splitlines()[2]


def test_forms_that_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "find_spec", lambda name: None)
    network, quantized, images, _ = pair()
    torch.nn.init.constant_(quantized.get_parameter("fc.bias"), torch.nan)
    result = qconv.compare_models(network, quantized, images, batch_sizes=(1,), seconds=0)
    assert result["ONNX"].note == 'the ONNX form needs onnxruntime: pip install "qconv[onnx]"'
    assert "NaN" in result["frozen"].note
    assert result["frozen"].bytes is result["frozen"].agreement is result["trained"].accuracy is None
    assert str(result).splitlines()[3].split() == ["frozen", *"––––"]


def test_a_model_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "find_spec", lambda name: None)
    monkeypatch.syspath_prepend(Path(__file__).parent)
    command = ["bench", "model", "test_bench:pair", "--seconds", "0", "--batch-size", "2"]
    assert main([*command, "--csv", str(tmp_path / "forms.csv")]) == 0
    rows = rows_of(tmp_path / "forms.csv")
    found = [(row["form"], row["accuracy"]) for row in rows]
    assert found[1:4] == [("trained", "0.75"), ("frozen", "0.75"), ("ONNX", "")]
    assert found[4] == ("float, ONNX Runtime", "")


def _few() -> tuple[int]:
    return (1,)


def test_models_of_one_output_agree_by_its_sign() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
    images = torch.randn(64, 1, 4, 4)
    labels = (network(images)[:, 0] > 0).long()
    other = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 1))
    other = qconv.convert(other, schemes.bwn(), skip=())
    result = qconv.compare_models(network, other, images, labels, batch_sizes=(1,), seconds=0)
    right = ((other.eval()(images)[:, 0] > 0) == (labels == 1)).float().mean().item()
    assert (result["float"].accuracy, result["trained"].agreement) == (1, 1)
    assert result["float"].agreement == result["trained"].accuracy == pytest.approx(right)
    assert right < 0.95


class TwoHeads(nn.Module):
    """Its outputs are in a dictionary with a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU())
        self.maps, self.fc = nn.Conv2d(8, 3, 1), nn.Linear(128, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.body(x)
        return {"maps": (self.maps(y),), "classes": self.fc(y.flatten(1))}


@pytest.mark.nightly
def test_all_outputs_are_compared_or_one_is_chosen() -> None:
    torch.manual_seed(0)
    network, images = TwoHeads().eval(), torch.randn(8, 1, 8, 8)
    labels = network(images)["classes"].argmax(1)
    quantized = qconv.convert(copy.deepcopy(network), schemes.bwn())
    same = [
        (given(network) == given(quantized.eval())).flatten()
        for given in (
            lambda model: model(images)["maps"][0].argmax(1),
            lambda model: model(images)["classes"].argmax(1),
        )
    ]
    options: dict[str, Any] = {"batch_sizes": (1,), "seconds": 0}
    result = qconv.compare_models(network, quantized, images, **options)
    assert result["float"].agreement == pytest.approx(torch.cat(same).float().mean().item())
    result = qconv.compare_models(network, quantized, images, labels, output="classes", **options)
    assert result["float"].agreement == pytest.approx(same[1].float().mean().item())
    assert (result["float"].accuracy, result["frozen"].agreement) == (1, 1)
    with pytest.raises(ValueError, match=r"labels need one output of \(N, classes\): choose it by output="):
        qconv.compare_models(network, quantized, images, labels, **options)


def test_tied_weights_are_stored_once() -> None:
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    assert forms.stored_bytes(tied) == 4 * (16 + 4 + 4)


def test_quartiles_lie_within_what_was_measured() -> None:
    assert quartiles([3.0]) == (3, 3, 3)
    assert quartiles([1.0, 2.0]) == (1.25, 1.5, 1.75)
    assert quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == (2, 3, 4)
