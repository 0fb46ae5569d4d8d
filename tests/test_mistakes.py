"""Mistakes on the command line of `qconv train`: the message names the key, the rule, and the nearest key."""

from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import MissingConfigException
from omegaconf import DictConfig

from qconv.cli import train_as
from qconv.cli.configs import folder
from qconv.cli.messages import message
from qconv.cli.mistakes import check_direction, check_flags, check_given, check_types, leave_out


def composed(words: list[str], check: bool = True) -> DictConfig:
    with initialize_config_dir(str(folder()), version_base="1.3"):
        cfg = compose("config", words)
        if check:
            check_types(cfg, words)
            check_given(cfg)
    return cfg


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["modle=resnet20"], "the config has no modle: did you mean model?"),
        (["lr=0.1"], "the config has no lr: did you mean optimizer.lr?"),
        (["epochs=5"], "the config has no epochs: did you mean trainer.max_epochs?"),
        (["optimizer=sgd", "weight_decay=5"], "the config has no weight_decay: did you mean optimizer.weight_decay?"),
        (["ckpt_path=last"], "the config has no ckpt_path: resume=RUN continues a run"),
        (["optimizer.lrr=0.1"], "optimizer has no lrr: did you mean optimizer.lr?; +optimizer.lrr=… adds a key"),
        (["scheme=lsq", "scheme.weight_bit=3"], "scheme (qconv.schemes.lsq) has no weight_bit: did you mean scheme.w"),
        (["loss.qqq=3"], "loss has no qqq: there are "),
        (["loss=distillation", "loss.teacher.width=3"], "loss.teacher must be given: loss.teacher='{_target_: qconv."),
        (["grad_quantizer.bits=4"], "grad_quantizer is empty: choose one of grad_quantizer=dorefa, grad_quantizer=fp8"),
        (["logger.wandb.project=a"], "logger is empty: choose one of logger=csv, "),
        (["overrides.foo=1"], "overrides is empty: give it as a whole, overrides='{…}'"),
        (["optimzer.lr=0.1"], "the config has no optimzer: did you mean optimizer.lr?"),
        (["scheme.weight_bits=4"], "scheme (qconv.schemes.bnn) has no weight_bits: these schemes have one: apot, "),
        (["experiment=irnet_resnet20"], "there is no experiment=irnet_resnet20: did you mean experiment=cifar10/irnet"),
        (["experiment=cifar10/irnet"], "there is no experiment=cifar10/irnet: did you mean experiment=cifar10/irnet"),
        (["experiment=reactnet"], "there is no experiment=reactnet: did you mean experiment=imagenet/reactnet_resnet"),
        (["+experiment=finetune"], "experiment is there already: write experiment=finetune, without +"),
        (["logger=[csv,tensorbord]"], "there is no logger=tensorbord: did you mean logger=tensorboard?"),
        (["hydra.sweeper.n_trials=3"], "hydra.sweeper has no n_trials: there are max_batch_size, params"),
        (["model=resnet21"], "there is no model=resnet21: did you mean model=resnet"),
        (["scheme=nosuch"], "there is no scheme=nosuch; there are adabin, "),
        (["foo"], "'foo' is not KEY=VALUE"),
        (["experiment=cifar10/lsq_resnet20_w4a4", "data.root=/data", "resume=auto"], "init_from must be given: init_"),
        (["init_from=a=9.ckpt"], "can't read 'init_from=a=9.ckpt': a value with brackets, colons, commas or = needs"),
        (["a..b=1"], "can't read 'a..b=1' (qconv train --help lists the keys)"),
        (["experiment=cifar10"], "experiment=cifar10 is a folder: it has experiment=cifar10/adabin_resnet20, "),
        (["model="], "there is no model=; there are "),
        (["model.width=)"], "can't read 'model.width=)': a value with brackets"),
        (["data=image_folder"], "data.root must be given: data.root=FOLDER, which has a subfolder of"),
        (["data=cifar10", "experiment=cifar10/lsq_resnet20_w4a4", "data.root=/data"], "init_from must be given: init_"),
        (["optimizer.lr=abc"], "optimizer.lr (=abc) must be a number, as its default 0.01"),
        (["optimizer=sgd", "optimizer.lr=true"], "optimizer.lr (=true) must be a number"),
        (["optimizer=sgd", "optimizer.nesterov=[true]"], "optimizer.nesterov (=[true]) must be true or false"),
        (["skip=3"], "skip (=3) must be a list, as its default [first, last]"),
        (["skip=null"], "skip (=null) must be a list, as its default [first, last]"),
        (["trainer.max_epochs=null"], "trainer.max_epochs (=null) must be a whole number, as its default 20"),
        (["trainer.max_epochs=2.5"], "trainer.max_epochs (=2.5) must be a whole number, as its default 20"),
        (["data.batch_size=1e2"], "data.batch_size (=100.0) must be a whole number, as its default 64"),
        (["callbacks.progress.x=3"], "callbacks.progress has no x: there are none; +callbacks.progress.x=… adds a key"),
        (["skip={a:1}"], "Error merging override skip={a:1}: a list must stay a list, and a mapping a mapping"),
        (["scheduler=null"], "a group of the config can't be null or a number: name one of its files, such as schedul"),
        (
            ["scheme=lsq", "scheme.weight_bits=four"],
            "scheme.weight_bits (=four) must be a whole number, as its default 4",
        ),
    ],
    ids=str,
)
def test_mistakes(words: list[str], said: str) -> None:
    with pytest.raises(Exception, match=r".") as caught:
        composed(words)
    assert message(caught.value).startswith(said)


@pytest.mark.parametrize(
    "words",
    [
        ["trainer.devices=auto"],
        ["trainer.devices=[0,1]"],
        ["optimizer.lr=1"],
        ["callbacks.diagnostics=null"],
        ["resume=null"],
        ["optimizer.weight_decay=1e-4"],
        ["skip=[]"],
        ["overrides={fc:{_target_:qconv.schemes.bwn}}"],
        ["lean=true"],
        ["lean=exact"],
        ["scheme=lsq", "scheme.input_bits=null"],
        ["+scheme.more=word"],
        ["~scheduler.warmup"],
        ["model=resnet20", "model.shortcut=per_conv"],
        ["loss.label_smoothing=0.1"],
        ["channels_last=true"],
    ],
    ids=str,
)
def test_what_is_right_passes(words: list[str]) -> None:
    composed(words)


@pytest.mark.parametrize(
    ("objective", "direction", "word"),
    [
        ("val_accuracy_best", "minimize", "maximize"),
        (["test_loss", "test_accuracy"], ["minimize", "minimize"], r"\[minimize,maximize\]"),
    ],
)
def test_a_search_for_the_worst_network(objective: Any, direction: Any, word: str) -> None:
    with pytest.raises(ValueError, match=rf"accuracy.*\) would be minimized: write hydra.sweeper.direction={word}"):
        check_direction(objective, {"direction": direction})
    check_direction("test_loss", {"direction": "minimize"})
    check_direction("test_accuracy", {"direction": "maximize"})
    check_direction("test_accuracy", {})
    check_direction(None, {"direction": "minimize"})


def test_plugins_that_an_extra_installs() -> None:
    with pytest.raises(SystemExit, match=r'launcher/nosuch(?s:.*)\npip install "qconv\[sweep\]" adds those of'):
        train_as("qconv train", ["hydra/launcher=nosuch", "-m", "seed=1,2"])


def test_configs_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text("_target_: qconv.models.small_cnn\nwidth: 8\n")
    words = [f"hydra.searchpath=[file://{tmp_path}]", "model=mine", "model.width=wide"]
    with pytest.raises(ValueError, match=r"model.width \(=wide\) must be a whole number, as its default 8"):
        composed(words)
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra/mine.yaml").write_text("more: 1\n")
    with pytest.raises(MissingConfigException) as caught:
        composed([*words[:1], "+extra=[mine,yours]"])
    assert message(caught.value) == "there is no extra=yours"


def test_flags_that_nobody_has() -> None:
    with pytest.raises(SystemExit, match=r"there is no flag --lr: settings are KEY=VALUE, such as lr=…"):
        train_as("qconv train", ["--lr", "3"])
    check_flags(["--multirun", "--cfg", "job", "--config-d", "x", "--info=all", "-m"])


@pytest.mark.parametrize("word", ["evaluate=best.ckpt", "init_from=null"])
def test_what_an_evaluation_does_not_need(word: str) -> None:
    cfg = composed(["experiment=cifar10/lsq_resnet20_w4a4", "data.root=/data", word])
    assert cfg.scheme.weight_bits == 4


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["model=small_cnn"], []),
        (["model=small_cnn", "experiment=digits_resnet20_bwn"], ["model: ignored shortcut, activation, which qconv."]),
        (["model._target_=torchvision.models.resnet18"], ["model: ignored width, which torchvision.models.resnet18"]),
        (["model._target_=torchvision.models.resnet18", "model.width=3"], []),  # which the function refuses
        (["scheme._target_=qconv.schemes.lsq"], ["scheme: ignored "]),
        (["optimizer=sgd", "optimizer.lr=1"], []),
    ],
    ids=str,
)
def test_arguments_of_another_function_are_left_out(words: list[str], told: list[str]) -> None:
    found = leave_out(composed(words), words)
    assert len(found) == len(told)
    assert all(line.startswith(start) for line, start in zip(found, told, strict=True))
