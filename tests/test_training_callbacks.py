"""The callbacks, each in a run of a few steps."""

import math
import sys
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from conftest import same
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import ProgressBar, StochasticWeightAveraging, TQDMProgressBar
from runs import QUICK, StopAfter, config, rows_of
from torch import Tensor, nn

import qconv
from qconv import Scheme, schemes
from qconv.check.diagnostics import of_input
from qconv.data import DigitsDataModule
from qconv.loop.optimizer_step import is_final
from qconv.models import SmallCNN, small_cnn
from qconv.quantizers import EDE, Identity, ReSTE, Sign, Stages
from qconv.runs.diagnostics_figure import FIGURES
from qconv.training import (
    Checkpoints,
    Classifier,
    Diagnostics,
    FiniteGuard,
    History,
    Progress,
    RandomState,
    draw_curves,
    keep_freed_memory,
    load_checkpoint,
    make_trainer,
)
from qconv.training.run import evaluate, train


def classifier(**arguments: object) -> Classifier:
    model = qconv.convert(small_cnn(1, 10, width=4), schemes.bnn())
    return Classifier(model, partial(torch.optim.SGD, lr=0.05), **arguments)  # pyright: ignore[reportArgumentType]


def network(module: Classifier) -> SmallCNN:
    return cast(SmallCNN, module.model)


def trainer(*callbacks: Callback, epochs: int = 2) -> Trainer:
    return make_trainer(accelerator="cpu", max_epochs=epochs, callbacks=callbacks)


class Poison(DigitsDataModule):
    """NaN in one pixel of one image of the split."""

    def __init__(self, split: str, value: float = float("nan")) -> None:
        super().__init__(batch_size=256)
        self.split, self.value = split, value

    def setup(self, stage: str) -> None:
        super().setup(stage)
        self.splits[self.split][0][7, 0, 4, 4] = self.value


class Break(Callback):
    """Runs `action` on the module before step `step`."""

    def __init__(self, step: int, action) -> None:
        self.step, self.action = step, action

    def on_train_batch_start(self, trainer: Trainer, pl_module, batch, batch_idx: int) -> None:
        if trainer.global_step == self.step:
            self.action(pl_module)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_picture_stops_the_run_before_any_weight_changes(value: float, tmp_path: Path) -> None:
    module = classifier()
    steps = []
    count = Break(-1, None)
    count.on_train_batch_end = lambda *_: steps.append(1)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(FloatingPointError) as error:
        trainer(FiniteGuard(), Checkpoints(tmp_path), count).fit(module, datamodule=Poison("train", value))
    message = str(error.value)
    assert message.startswith(f"epoch 0, step {len(steps)}: NaN or inf in the input batch, read by the input of layer")
    assert "'blocks.0.conv' (Conv2d)" in message
    assert message.endswith("there is no checkpoint yet")
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    assert list(tmp_path.iterdir()) == []


def poisoned(name: str) -> Any:
    """Makes the gradient of the classifier's weight inf, or what leaves the first block NaN."""

    def poison(module: Classifier) -> None:
        if name == "gradient":
            network(module).fc.weight.register_hook(lambda grad: grad / 0)
        else:
            network(module).blocks[0].register_forward_hook(lambda *args: args[2] * torch.tensor(float("nan")))

    return poison


def test_validation_and_gradients_are_watched_too() -> None:
    with pytest.raises(FloatingPointError, match="epoch 0, validation batch 0: NaN or inf in the input batch"):
        trainer(FiniteGuard()).fit(classifier(), datamodule=Poison("val"))
    with pytest.raises(FloatingPointError, match=r"^test batch 0: NaN or inf in the input batch"):
        trainer(FiniteGuard()).test(classifier(), datamodule=Poison("test"))
    with pytest.raises(FloatingPointError, match=r"epoch 0, step 3: NaN or inf in the gradient of 'fc.weight'"):
        trainer(FiniteGuard(), Break(3, poisoned("gradient"))).fit(classifier(), datamodule=DigitsDataModule())


def test_a_nan_that_a_sign_would_swallow_is_found_in_the_layer_it_enters(tmp_path: Path) -> None:
    assert torch.isfinite(qconv.quantizers.Sign()(torch.tensor([float("nan")]))).all()
    checkpoints, poison = Checkpoints(tmp_path), Break(19, poisoned("output"))
    with pytest.raises(FloatingPointError) as error:
        trainer(FiniteGuard(), checkpoints, poison).fit(classifier(), datamodule=DigitsDataModule())
    assert str(error.value) == (
        "epoch 1, step 19: NaN or inf in the input of layer 'blocks.1.conv' (QConv2d, bnn()); "
        f"ckpt_path={checkpoints.last} continues from the last checkpoint"
    )
    kept = load_checkpoint(checkpoints.last)
    assert kept["epoch"] == 0
    assert all(tensor.isfinite().all() for tensor in kept["state_dict"].values())


def test_a_bad_latent_weight_is_named_and_not_saved(tmp_path: Path) -> None:
    class AtTheEnd(Callback):
        def on_train_batch_end(self, trainer: Trainer, pl_module, outputs, batch, batch_idx: int) -> None:
            if trainer.global_step == 38:
                with torch.no_grad():
                    pl_module.get_parameter("model.blocks.2.conv.weight")[0, 0, 0, 0] = float("nan")

    with pytest.raises(FloatingPointError, match=r"epoch 1, .*in the parameter 'blocks.2.conv.weight'"):
        trainer(FiniteGuard(), Checkpoints(tmp_path), AtTheEnd()).fit(classifier(), datamodule=DigitsDataModule())
    assert load_checkpoint(tmp_path / "last.ckpt")["epoch"] == 0


def test_a_learned_scale_that_falls_to_its_bound_is_named_with_the_remedy() -> None:
    adam = qconv.optim.ModelOptimizer(torch.optim.Adam, {"weight_quantizers": {"lr": 1.0}}, lr=0.01)
    module = Classifier(qconv.convert(small_cnn(1, 10, width=4), schemes.lsq()), adam)
    callbacks = (FiniteGuard(), Break(12, poisoned("gradient")))
    with pytest.warns(UserWarning, match="at the lower bound") as warned, pytest.raises(FloatingPointError) as error:
        trainer(*callbacks).fit(module, datamodule=DigitsDataModule())
    messages = [str(each.message) for each in warned if "at the lower bound" in str(each.message)]
    assert messages[0].startswith("epoch 0, step ")
    assert "the learned 'blocks." in messages[0]
    assert "weight_quantizer.step'" in messages[0]
    assert messages[0].endswith("such as ++optimizer.rules.quantizers.lr_scale=0.01")
    names = [name for line in messages for name in line.split("'") if name.endswith(".step")]
    assert len(names) == len(set(names)), "once for each"
    assert "NaN or inf in the gradient of 'fc.weight'; at the lower bound of 2^-20" in str(error.value)


@pytest.mark.parametrize("scheme", [schemes.lsq(), schemes.pact(), schemes.adabin(), schemes.ttq(), schemes.apot()])
def test_scales_of_usual_size_are_not_said_to_have_fallen(scheme: qconv.Scheme) -> None:
    module = Classifier(qconv.convert(small_cnn(1, 10, width=4), scheme), partial(torch.optim.Adam, lr=0.001))
    guard, seen = FiniteGuard(), []
    watch = Break(3, lambda module: seen.append(set(guard._highest())))
    trainer(guard, watch, epochs=1).fit(module, datamodule=DigitsDataModule())
    learned = {name for name, parameter in network(module).named_parameters() if "_quantizer." in name}
    assert {name for name in learned if not name.endswith("beta")} == seen[0], "AdaBin's offset beta is no scale"
    assert guard.fallen == []


def test_the_guard_changes_nothing_and_leaves_no_hook() -> None:
    states = []
    for guards in ([], [FiniteGuard()]):
        torch.manual_seed(0)
        module = classifier()
        trainer(*guards, epochs=1).fit(module, datamodule=DigitsDataModule())
        states.append(module.state_dict())
        assert not any(child._forward_pre_hooks for child in module.modules())
    assert same(*states)


class Scores(Callback):
    """Says what the validation accuracy was."""

    def __init__(self, scores: list[float]) -> None:
        self.scores = scores

    def on_validation_epoch_end(self, trainer: Trainer, pl_module) -> None:
        pl_module.log("score", self.scores[trainer.current_epoch])


def test_of_equal_epochs_the_earlier_is_the_best(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "new", monitor="score")
    trainer(checkpoints, Scores([0.5, 0.75, 0.75, 0.25]), epochs=4).fit(classifier(), datamodule=DigitsDataModule())
    assert load_checkpoint(checkpoints.best)["epoch"] == checkpoints.best_epoch == 1
    assert load_checkpoint(checkpoints.last)["epoch"] == 3
    assert sorted(file.name for file in checkpoints.folder.iterdir()) == ["best.ckpt", "last.ckpt"]


def test_random_state_is_set_again_on_resuming(tmp_path: Path) -> None:
    drawn: list[float] = []

    class Draw(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module, batch, batch_idx: int) -> None:
            drawn.append(float(torch.rand(())))

    def fit(epochs: int, ckpt_path: Path | None, seed: int) -> list[float]:
        drawn.clear()
        torch.manual_seed(seed)
        run = trainer(RandomState(), Checkpoints(tmp_path), Draw(), epochs=epochs)
        run.fit(classifier(), datamodule=DigitsDataModule(), ckpt_path=ckpt_path, weights_only=True)
        return list(drawn)

    whole = fit(2, None, 1)
    half = fit(1, None, 1)
    assert half + fit(2, tmp_path / "last.ckpt", 99) == whole


def test_each_process_resumes_with_the_state_of_the_first_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {f"cuda:{index}": torch.tensor([index], dtype=torch.uint8) for index in range(4)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[str(device)].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({str(device): state}))
    first, third, cpu = RandomState(), RandomState(), RandomState()
    for state, device in ((first, "cuda:0"), (third, "cuda:2"), (cpu, "cpu")):
        run: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)))
        state.setup(run, classifier(), "fit")
    stored = first.state_dict()
    states["cuda:0"] += 7
    third.load_state_dict(stored)
    third.on_train_epoch_start(run, classifier())
    assert [int(state) for state in states.values()] == [7, 1, 0, 3]
    cpu.load_state_dict(stored)
    cpu.on_train_epoch_start(run, classifier())  # without a GPU there is nothing to set
    assert cpu.state_dict()["cuda"] == []


@pytest.mark.drawn
def test_history_has_one_full_row_an_epoch(tmp_path: Path) -> None:
    history = History(tmp_path)
    make = make_trainer(accelerator="cpu", max_epochs=4, callbacks=[history], check_val_every_n_epoch=2)
    make.fit(classifier(), datamodule=DigitsDataModule())
    rows = rows_of(tmp_path / "metrics.csv")
    assert {*rows[0]} == {"epoch", "step", "lr", "train_accuracy", "train_loss", "val_accuracy", "val_loss"}
    assert [(row["epoch"], row["step"]) for row in rows] == [("0", "19"), ("1", "38"), ("2", "57"), ("3", "76")]
    assert ["val_loss" in row for row in history.rows] == [False, True, False, True]
    assert all(0 <= float(row["train_accuracy"]) <= 1 for row in history.rows)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.drawn
def test_curves_need_no_validation_and_touch_no_global_state(tmp_path: Path) -> None:
    import matplotlib

    backend = matplotlib.get_backend(auto_select=False)
    draw_curves([{"epoch": 0, "train_loss": 0.0, "train_accuracy": 1.0}], tmp_path / "one.png")
    rows = [{"epoch": e, "train_loss": 2.0 / (e + 1), "val_loss": 1.0, "val_accuracy": 0.1 * e} for e in range(5)]
    draw_curves(rows, tmp_path / "five.png")
    assert (tmp_path / "one.png").read_bytes() != (tmp_path / "five.png").read_bytes()
    assert matplotlib.get_backend(auto_select=False) == backend
    assert sorted(file.name for file in tmp_path.iterdir()) == ["five.png", "one.png"]


def test_memory_is_kept_on_glibc_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    import platform

    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert keep_freed_memory() is False


@pytest.mark.drawn
def test_diagnostics_of_a_run(tmp_path: Path) -> None:
    module = classifier()
    trainer(Diagnostics(tmp_path), epochs=2).fit(module, datamodule=DigitsDataModule(batch_size=256))
    rows = rows_of(tmp_path / "diagnostics.csv")
    assert [(row["epoch"], row["layer"]) for row in rows] == [
        (str(epoch), f"blocks.{index}.conv") for epoch in range(2) for index in (1, 2, 3)
    ]
    for row in rows:
        figures = FIGURES.keys() - {"weights_oscillating", "weights_frozen"}  # those of qconv.optim.Oscillations
        assert set(row) == {"epoch", "layer", "step", *figures}
        assert all(0 <= float(row[name]) <= 1 for name in figures)
        assert float(row["step"]) == 1
    assert (tmp_path / "diagnostics.png").read_bytes().startswith(b"\x89PNG")
    for row, later in zip(rows[:3], rows[3:], strict=True):
        assert float(later["weights_never_flipped"]) <= float(row["weights_never_flipped"])


@pytest.mark.drawn
def test_a_loop_of_ones_own_gets_what_a_run_gets(tmp_path: Path) -> None:
    """With its batches, and its state in between."""
    fitted = trainer(Diagnostics(tmp_path / "run"), epochs=2)
    fitted.fit(classifier(), datamodule=DigitsDataModule(batch_size=256))
    module, data = classifier(), DigitsDataModule(batch_size=256)
    data.setup("fit")
    optimizer = torch.optim.SGD(network(module).parameters(), lr=0.05)
    qconv.after_every_step(optimizer, network(module))
    diagnostics = qconv.Diagnostics(network(module))
    images, labels = next(iter(data.val_dataloader()))
    for epoch in range(2):
        loss = nn.functional.cross_entropy(network(module)(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rows = diagnostics.step(images, train_loss=loss, val_accuracy=0.5, lr=0.05)
        assert [row["epoch"] for row in rows] == [epoch] * 3
        again = qconv.Diagnostics(network(module))
        again.load_state_dict(diagnostics.state_dict())
        diagnostics = again
    diagnostics.save(tmp_path / "own")
    assert {path.name for path in (tmp_path / "own").iterdir()} == {
        *("metrics.csv", "curves.png", "diagnostics.csv", "diagnostics.png")
    }
    heads = [(tmp_path / each / "diagnostics.csv").read_text().splitlines()[0] for each in ("own", "run")]
    assert heads[0] == heads[1]


def test_diagnostics_count_what_they_say() -> None:
    layer = qconv.QConv2d(4, 2, 1, scheme=schemes.bwn())
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.5, -0.5, 0.5, 0.5], [0.5, -1.5, -1.5, 0.0]]).view(2, 4, 1, 1))
    diagnostics = qconv.Diagnostics(layer)
    with torch.no_grad():
        layer.weight[0, 0] *= -1
        layer.weight[1, :2] *= -1
    (row,) = diagnostics.step()
    assert row["flip_rate"] == 3 / 8
    assert row["weights_never_flipped"] == 5 / 8
    w, w_q = layer.weight.detach().flatten(), layer.quantized_weight().flatten()
    scale = (w * w_q).sum() / w_q.square().sum()
    assert row["weight_error"] == pytest.approx(float((scale * w_q - w).square().sum() / w.square().sum()), rel=1e-5)
    assert row["step"] == pytest.approx((0.75 + 0.875) / 2)
    bnn = qconv.QConv2d(4, 2, 1, scheme=schemes.bnn())
    input = torch.tensor([[0.5, 2.0, -3.0, 0.1], [-0.5, 0.2, -0.3, 0.1]]).view(2, 4, 1, 1)
    found = of_input(bnn, input)
    assert (found["inputs_saturated"], found["inputs_dead"]) == (2 / 8, 3 / 4)


def test_inputs_are_examined_by_the_quantizers_of_the_validation(tmp_path: Path) -> None:
    """Where those are averages, the quantizers of the training are others."""
    layer: Any = qconv.QConv2d(4, 2, 1, scheme=schemes.lsq(4, 4))
    input = torch.randn(3, 4, 5, 5)
    qconv.calibrate(layer, [input])
    module: Any = nn.Module()
    module.model = layer.eval()
    callback: Any = Diagnostics(tmp_path)
    fake = SimpleNamespace(
        is_global_zero=True, current_epoch=0, global_step=1, loggers=[], optimizers=[], sanity_checking=False
    )
    callback.on_fit_start(fake, module)
    callback.on_validation_batch_start(fake, module, None, 0)
    layer(input)
    callback.on_validation_batch_end(fake, module, None, None, 0)
    expected = of_input(layer, input)
    with torch.no_grad():
        layer.input_quantizer.step *= 3
    callback.on_train_epoch_end(fake, module)
    assert callback.measured.rows[0]["input_error"] == expected["input_error"] != of_input(layer, input)["input_error"]
    assert not layer._forward_pre_hooks  # which would keep memory


class Breaks(Callback):
    """Ends an evaluation after its first batch."""

    def on_test_batch_end(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError("interrupted")


def test_an_evaluation_that_was_interrupted_leaves_nothing() -> None:
    classifier = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), torch.optim.SGD)
    data = DigitsDataModule(batch_size=50)
    with pytest.raises(ValueError, match="interrupted"):
        make_trainer(accelerator="cpu", callbacks=[Breaks()]).test(classifier, data, verbose=False)
    assert classifier.evaluated["test_loss"].sums[1] == 45  # of 8 batches of 360 images
    (again,) = make_trainer(accelerator="cpu").test(classifier, data, verbose=False)
    pictures, labels = data.splits["test"]
    expected = nn.functional.cross_entropy(classifier(pictures), labels).item()
    assert again["test_loss"] == pytest.approx(expected, rel=1e-5)


class Own(LightningModule):
    """A module that nobody here wrote: other names, batches that are dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.model = qconv.convert(small_cnn(1, 10, width=4), schemes.bnn())

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.model(batch["x"]), batch["y"])
        self.log("fit_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("valid_acc", (self.model(batch["x"]).argmax(1) == batch["y"]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.Adam(self.parameters())
        qconv.after_every_step(optimizer, self)
        return optimizer


def dictionaries() -> torch.utils.data.DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(16, 1, 8, 8, generator=generator), torch.arange(16) % 10
    return torch.utils.data.DataLoader([{"x": x, "y": y} for x, y in zip(images, labels, strict=True)], batch_size=8)  # pyright: ignore[reportArgumentType]


def test_a_module_with_other_names_and_batches(tmp_path: Path) -> None:
    history, checkpoints = History(tmp_path), Checkpoints(tmp_path, monitor="valid_acc")
    run = make_trainer(
        accelerator="cpu", max_epochs=3, check_val_every_n_epoch=2, callbacks=[history, checkpoints, FiniteGuard()]
    )
    run.fit(Own(), dictionaries(), dictionaries())
    assert all("fit_loss" in row for row in history.rows)
    assert ["valid_acc" in row for row in history.rows] == [False, True, False]
    assert checkpoints.best_epoch == 1
    bad = dictionaries()
    bad.dataset[3]["x"][0, 0, 0] = math.inf
    with pytest.raises(FloatingPointError, match="inf in the input batch"):
        make_trainer(accelerator="cpu", max_epochs=1, callbacks=[FiniteGuard()]).fit(Own(), bad, bad)


def test_an_epoch_of_weight_averaging_is_none_of_the_schedules() -> None:
    final = []

    class Seen(Callback):
        def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
            final.append(is_final(pl_module))

    module = classifier()
    module.model = qconv.convert(small_cnn(1, 10, width=4), schemes.two_stage(schemes.bnn(), start=0.75))
    averaging = StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2)
    callbacks = [Progress(), averaging, Seen()]
    trainer(*callbacks, epochs=4).fit(module, datamodule=DigitsDataModule())
    assert final == [False, False, False, True, True]


def test_batches_to_overfit_are_the_same_in_each_epoch() -> None:
    labels: list[list[int]] = []

    class Seen(Callback):
        def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            labels.append(batch[1].tolist())

    run = make_trainer(accelerator="cpu", max_epochs=2, overfit_batches=2, callbacks=[Seen()])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "You requested to overfit")
        run.fit(classifier(), datamodule=DigitsDataModule(batch_size=16))
    assert labels[:2] == labels[2:]
    assert labels[0] != labels[1]
    assert len({*labels[0]}) > 4, "mixed"


def test_progress_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for options, bars in (({}, 1), ({"enable_progress_bar": False}, 0), ({"callbacks": [TQDMProgressBar()]}, 1)):
        made = make_trainer(accelerator="cpu", max_epochs=1, **options)  # pyright: ignore[reportArgumentType]
        assert sum(isinstance(each, ProgressBar) for each in made.callbacks) == bars  # pyright: ignore[reportAttributeAccessIssue]


def test_a_loader_without_a_length_is_named() -> None:
    class Endless(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            while True:
                yield torch.zeros(1, 8, 8), 1

    loader = torch.utils.data.DataLoader(Endless(), batch_size=4)
    with pytest.raises(ValueError, match=r"the training loader has no length, .* set \+trainer.limit_train_batches"):
        trainer(epochs=1).fit(classifier(), loader, loader)


def test_layers_that_no_longer_learn_are_named(tmp_path: Path) -> None:
    module = Classifier(qconv.convert(small_cnn(1, 10, width=4), schemes.ewgs(2, 2)), partial(torch.optim.SGD, lr=0.05))
    quantizer = cast(Any, network(module).blocks[1]).conv.weight_quantizer

    def leave(module: Classifier) -> None:
        with torch.no_grad():
            for tensor in (quantizer.lower, quantizer.upper):
                tensor.add_(100.0)

    with pytest.warns(UserWarning, match=r"epoch 0: no gradient passes the weights of 'blocks.1.conv': all lie beyond"):
        trainer(Diagnostics(tmp_path), Break(18, leave), epochs=1).fit(module, datamodule=DigitsDataModule())


def test_weights_that_a_method_freezes_are_no_fault(tmp_path: Path) -> None:
    module = Classifier(qconv.convert(small_cnn(1, 10, width=4), schemes.inq()), partial(torch.optim.SGD, lr=0.05))
    diagnostics = Diagnostics(tmp_path)
    trainer(Progress(), diagnostics, epochs=4).fit(module, datamodule=DigitsDataModule(batch_size=400))
    assert max(row["weights_saturated"] for row in cast(Any, diagnostics).measured.rows) == 1


@pytest.mark.parametrize("check", [True, False])
def test_layers_made_by_hand_are_watched_in_a_fit(check: bool) -> None:
    layer = qconv.QConv2d(4, 4, 3, scheme=schemes.bnn())
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), layer, nn.Flatten(), nn.Linear(64, 10))
    module = Classifier(model, partial(torch.optim.SGD, lr=0.01), check=check)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer(epochs=1).fit(module, datamodule=DigitsDataModule())
    said = [str(each.message) for each in told if "training batches" in str(each.message)]
    assert len(said) == check
    assert not layer._forward_hooks
    if check:
        assert said[0].startswith("layer '2' (QConv2d, bnn()): in each of its first 3 training batches 100.0%")


# Schedules


def scheduled() -> Classifier:
    torch.manual_seed(0)
    input = partial(Sign, partial(EDE, t_min=0.01), stochastic=True)
    weight = partial(Stages, [(0.0, Identity), (0.5, partial(Sign, ReSTE))])
    model = qconv.convert(small_cnn(1, 10, width=4), Scheme("scheduled", input, weight))
    return Classifier(model, partial(torch.optim.SGD, lr=0.05, momentum=0.9))


class Seen(Callback):
    """The schedule's values at each training step."""

    def __init__(self) -> None:
        self.values: list[tuple[int, float, float, int]] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module, batch, batch_idx: int) -> None:
        layer: Any = pl_module.get_submodule("model.blocks.1.conv")
        surrogate, weight = layer.input_quantizer.surrogate, layer.weight_quantizer
        step = int(layer.input_quantizer.stream.step)
        assert step == trainer.global_step
        self.values.append(
            (trainer.current_epoch, float(surrogate.t), float(weight.quantizers[1].surrogate.o), weight.stage)
        )


def test_once_an_epoch() -> None:
    seen = Seen()
    trainer(Progress(), seen, epochs=4).fit(scheduled(), datamodule=DigitsDataModule(batch_size=256))
    by_epoch = {epoch: values for epoch, *values in seen.values}
    assert [values[2] for values in by_epoch.values()] == [0, 0, 1, 1]
    for epoch, (t, o, _) in by_epoch.items():
        assert t == pytest.approx(0.01 * 1000 ** (epoch / 4), rel=1e-6)
        assert o == pytest.approx(
            1 if epoch < 2 else 3 - 2 * math.cos(math.pi / 2 * (epoch - 2) / 2), rel=1e-6
        )  # from its stage's start
    assert len(set(seen.values)) == 4  # nothing moves within an epoch


def test_a_resumed_run_has_the_same_weights_schedules_and_random_numbers(tmp_path: Path) -> None:
    data = partial(DigitsDataModule, batch_size=256)
    trainer(Progress(), RandomState(), Checkpoints(tmp_path / "whole"), epochs=4).fit(scheduled(), datamodule=data())
    half = trainer(Progress(), RandomState(), Checkpoints(tmp_path / "half"), StopAfter(2), epochs=4)
    half.fit(scheduled(), datamodule=data())
    last = tmp_path / "half/last.ckpt"
    assert load_checkpoint(last)["epoch"] == 2
    torch.rand(7)
    resumed = trainer(Progress(), RandomState(), Checkpoints(tmp_path / "rest"), epochs=4)
    resumed.fit(scheduled(), datamodule=data(), ckpt_path=last, weights_only=True)
    one, other = (load_checkpoint(tmp_path / name / "last.ckpt")["state_dict"] for name in ("whole", "rest"))
    assert any("surrogate.t" in name for name in one)
    assert same(one, other)


def test_all_go_on_with_the_first_random_state_if_the_processes_are_others() -> None:
    one = RandomState().state_dict()
    expected = torch.rand(3)
    other = RandomState().state_dict()
    for state in (one, {**one, "processes": [one, other]}):
        resumed = RandomState()
        resumed.load_state_dict(state)
        resumed.on_train_epoch_start(cast(Any, None), cast(Any, None))
        assert torch.rand(3).equal(expected)


def test_epochs_must_be_known() -> None:
    endless = make_trainer(accelerator="cpu", max_epochs=-1, callbacks=[Progress()])
    with pytest.raises(ValueError, match=r"max_epochs \(=-1\) must be given"):
        endless.fit(scheduled(), datamodule=DigitsDataModule(batch_size=256))


# The moving average of the weights


ITS = ("callbacks=ema", "callbacks.ema.decay=0.9")


class Follow(Callback):
    """Averages the state dict of each step by hand."""

    average: dict[str, Tensor]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 1:
            Follow.average = {name: value.clone() for name, value in pl_module.state_dict().items()}
            return
        n = trainer.global_step - 1
        decay = min(0.9, (1 + n) / (10 + n))
        for name, value in pl_module.state_dict().items():
            now = Follow.average[name]
            Follow.average[name] = decay * now + (1 - decay) * value if value.is_floating_point() else value.clone()


@pytest.mark.parametrize(
    "scheme", ["recu", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("lsq", "inq"))]
)
def test_the_average_is_validated_and_tested(scheme: str, tmp_path: Path) -> None:
    follow = "+callbacks.follow={_target_:test_training_callbacks.Follow}"
    arguments = (*QUICK, *ITS, f"scheme={scheme}")
    result = train(config(*arguments, follow, f"run_dir={tmp_path}"))
    last = load_checkpoint(tmp_path / "checkpoints/last.ckpt")
    for name, value in Follow.average.items():
        torch.testing.assert_close(last["state_dict"][name], value, rtol=1e-4, atol=1e-6)
    differ = [not torch.equal(last["state_dict"][k], last["current_model_state"][k]) for k in last["state_dict"]]
    assert any(differ)
    best = tmp_path / "checkpoints/best.ckpt"
    again = evaluate(config(*arguments, f"evaluate={best}", f"run_dir={tmp_path / 'again'}"))
    assert (again.test_accuracy, again.test_loss) == (result.test_accuracy, result.test_loss)
    assert again.val_accuracy == result.val_accuracy_best


@pytest.mark.nightly
def test_the_average_of_stages_is_in_their_last(tmp_path: Path) -> None:
    result = train(config(*QUICK, *ITS, "scheme=two_stage", "scheme.start=0.5", f"run_dir={tmp_path}"))
    assert result.quantized
    assert result.best_epoch >= 2


@pytest.mark.nightly
def test_the_average_of_other_precisions(tmp_path: Path) -> None:
    double = (*QUICK, *ITS, "trainer.max_epochs=2", "trainer.precision=64-true")
    train(config(*double, "+callbacks.stop={_target_:runs.StopAfter,epoch:0}", f"run_dir={tmp_path}"))
    result = train(config(*double, f"run_dir={tmp_path}", "resume=auto"))
    whole = train(config(*double, f"run_dir={tmp_path / 'whole'}"))
    assert (result.test_loss, result.val_accuracy_best) == (whole.test_loss, whole.val_accuracy_best)
    with pytest.raises(ValueError, match=r"precision \(=bf16-true\) keeps weights in 16 bits.*: use bf16-mixed"):
        train(config(*QUICK, *ITS, "trainer.precision=bf16-true", f"run_dir={tmp_path / '16'}"))
