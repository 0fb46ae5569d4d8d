"""Networks that are compiled for training, as a whole or block by block."""

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pytorch_lightning.accelerators import CPUAccelerator, CUDAAccelerator
from torch import nn
from torch._inductor import config as inductor
from torch._inductor.cpp_builder import cpp_compiler_search

import qconv
from qconv import models, schemes
from qconv.training.classifier import Classifier
from qconv.training.compilation import blocks, chosen_mode, compile_, starts

LAYERWISE = schemes.layerwise(schemes.reactnet())


class Wrapped(nn.Module):
    """A network in another, whose blocks are in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"blocks": nn.ModuleList([pair(), nn.Conv2d(4, 4, 1), pair()]), "last": nn.ReLU()})

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Block after block."""
        for block in cast(Any, self.inner["blocks"]):
            input = block(input)
        return self.inner["last"](input)


def pair() -> nn.Sequential:
    """Two convolutions with batch norms."""
    return nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))


def resnet() -> nn.Module:
    """A small ResNet for binary layers."""
    options: Any = {"downsample": "A", "shortcut": "per_conv", "activation": nn.Hardtanh}
    return models.ResNet(3, 10, widths=(4, 8), blocks=(2, 1), **options)


def names(model: nn.Module, scheme: schemes.Scheme, skip: tuple[str, ...] = ()) -> list[str]:
    """Those of the blocks of the converted model."""
    qconv.convert(model, scheme, skip=skip)
    of = {module: name for name, module in model.named_modules()}
    return [of[block] for block in blocks(model)]


@pytest.mark.parametrize(
    ("asked", "scheme", "count", "mode", "told"),
    [
        ("auto", schemes.bwn(), 14_999, False, "compile: auto, off, because 14,999 images in all epochs are few for 1"),
        ("auto", schemes.bwn(), 15_000, True, ""),
        ("auto", LAYERWISE, 100_000, False, "compile: auto, off, because 100,000 images in all epochs are few for "),
        ("auto", LAYERWISE, None, True, ""),
        ("reduce-overhead", LAYERWISE, 1, "reduce-overhead", ""),
        (False, LAYERWISE, None, False, ""),
    ],
    ids=str,
)
def test_a_network_is_compiled_where_it_pays_and_can_be(
    asked: Any, scheme: schemes.Scheme, count: int | None, mode: Any, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = qconv.convert(resnet(), scheme, skip=())
    found, note = chosen_mode(asked, model, count)
    assert (found, note[: len(told)]) == (mode, told)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cpp_compiler_search.cache_clear()
    with inductor.patch({"cpp.cxx": ("/nowhere/g++",)}):
        found, note = chosen_mode(asked, model, count)
    cpp_compiler_search.cache_clear()
    assert found is False
    assert note.startswith(told or ("compile: off, because there is no C++ compiler" if asked else ""))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.11 looks at it
@pytest.mark.nightly
@pytest.mark.parametrize("scheme", [schemes.bwn(), schemes.two_stage(schemes.bwn())], ids=str)
def test_batches_of_two_sizes(scheme: schemes.Scheme, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its code, in training and in evaluation; with stages there is code for any size."""
    graphs: list[list[int]] = []  # the sizes for which each ran

    def backend(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Callable[..., Any]:
        ran: list[int] = []
        graphs.append(ran)
        images = next(place for place, each in enumerate(example) if type(each) is torch.Tensor and each.ndim == 4)

        def run(*inputs: Any) -> Any:
            ran.append(len(inputs[images]))
            return graph(*inputs)

        return run

    whole = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, mode: whole(self, backend=backend))
    model = nn.Sequential(nn.Conv2d(4, 4, 1), pair(), nn.Sequential(nn.Conv2d(4, 2, 1), nn.Flatten()))
    qconv.convert(model, scheme, skip=("0", "2.0"))
    classifier = Classifier(model, cast(Any, None), compile=True)
    for training in (True, False, True, False):
        classifier.train(training)
        with torch.set_grad_enabled(training):
            for size in (7, 8, 8, 7):
                classifier(torch.randn(size, 4, 5, 5))
    if torch.__version__ < "2.12":  # it compiles layer after layer if the network itself is a class of torch's
        assert set().union(*graphs) == {7, 8}
    elif scheme.name == "bwn()":
        assert [set(sizes) for sizes in graphs] == [{7}, {8}, {7}, {8}]
    else:
        assert [set(sizes) for sizes in graphs] == [{7}, {7, 8}, {7, 8}]


def test_blocks() -> None:
    assert names(resnet(), LAYERWISE, skip=("first", "last")) == ["stages.0.0", "stages.0.1", "stages.1.0"]
    assert names(Wrapped(), LAYERWISE) == ["inner.blocks.0", "inner.blocks.1", "inner.blocks.2"]
    timm_like = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Sequential(pair(), nn.Sequential(pair(), pair())))
    assert names(timm_like, LAYERWISE, skip=("first",)) == ["1.0", "1.1.0", "1.1.1"]
    # As a whole: without stages, with layers of its own, and if there is one block only.
    assert names(resnet(), schemes.reactnet(), skip=("first", "last")) == [""]
    assert names(resnet(), LAYERWISE) == [""]
    assert names(nn.Sequential(pair()), LAYERWISE) == [""]
    shared = pair()
    assert names(nn.Sequential(shared, nn.Sequential(shared, pair())), LAYERWISE) == ["0", "1.1"]


def test_a_copy_of_a_compiled_layer_computes_with_its_own_weight() -> None:
    layer, input = qconv.QConv2d(2, 3, 1, bias=False, scheme=schemes.bwn()), torch.randn(2, 2, 3, 3)
    layer.compile(backend="eager")
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with torch.no_grad():
            other.weight.neg_()
        assert other(input).equal(-layer(input))


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch 2.11 looks at it
def test_a_plain_sequence_of_many_layers_stays_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.11 compiles its layers one by one, which share one forward."""
    compile_one = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, mode: compile_one(self, backend="eager"))
    model = nn.Sequential(*(qconv.QConv2d(2, 2, 1, scheme=schemes.bwn()) for _ in range(12)))
    config: Any = torch._dynamo.config
    with config.patch(recompile_limit=8, accumulated_recompile_limit=8, fail_on_recompile_limit_hit=True):
        classifier = Classifier(model, cast(Any, None), compile=True)
        for training in (True, False):
            classifier.train(training)
            with torch.set_grad_enabled(training):
                for size in (7, 8):
                    classifier(torch.randn(size, 2, 3, 3))


def test_sums_over_batches_need_gradients_that_stay() -> None:
    for compile, accelerator, is_refused in (
        *(("reduce-overhead", CUDAAccelerator(), True), ("reduce-overhead", CPUAccelerator(), False)),
        *((True, CUDAAccelerator(), False), ("max-autotune", CUDAAccelerator(), True)),
    ):
        classifier: Any = Classifier(nn.Identity(), cast(Any, None), compile=cast(Any, compile))
        classifier._trainer = SimpleNamespace(accumulate_grad_batches=2, accelerator=accelerator, callbacks=[])
        message = r"accumulate_grad_batches \(=2\) must be 1 .* compile=true does not"
        with pytest.raises(ValueError, match=message) if is_refused else nullcontext():
            classifier._check_accumulation()


def test_modes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go to torch, and what a graph overwrites is copied."""
    asked: list[str | None] = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, mode: asked.append(mode))
    for compile, wanted in ((False, []), (True, [None]), ("default", ["default"]), ("max-autotune", ["max-autotune"])):
        Classifier(nn.Identity(), cast(Any, None), compile=cast(Any, compile))
        assert asked == wanted
        asked.clear()
    for wrong in ("fast", "true", 1, None):
        with pytest.raises(
            ValueError, match=rf"compile \(={wrong!r}\) must be true, false, auto, or a mode of torch.compile"
        ):
            Classifier(nn.Identity(), cast(Any, None), compile=cast(Any, wrong))
    images = torch.randn(2, 3, 4, 4, device=device)
    whole = nn.Sequential(nn.Conv2d(3, 1, 1))  # for its dtype
    monkeypatch.setattr(whole, "forward", lambda images: images)  # what a graph returns is not ours
    assert Classifier(whole, cast(Any, None), compile=True)(images) is images
    kept = Classifier(whole, cast(Any, None), compile="reduce-overhead")(images)
    assert (kept is images) == (device == "cpu")
    assert kept.equal(images)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch hides it otherwise
@pytest.mark.parametrize("make", [resnet, Wrapped, pair], ids=["resnet", "wrapped", "one block"])
def test_a_change_of_stage_compiles_the_blocks_that_change(
    make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And they stay compiled through all stages, though Dynamo gives up after 8 by default."""
    skip = ("first", "last") if make is resnet else ()
    model, eager = (qconv.convert(make(), LAYERWISE, skip=skip) for _ in range(2))
    eager.load_state_dict(model.state_dict())
    input = torch.randn(2, *((3, 8, 8) if make is resnet else (4, 3, 3)))
    compiled = []

    def backend(graph: Any, example: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    compile_one = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda self, mode: compile_one(self, backend=backend))
    config: Any = torch._dynamo.config
    with config.patch(recompile_limit=1, accumulated_recompile_limit=1, fail_on_recompile_limit_hit=True):
        compile_(model)
        count = 0
        for start in sorted(starts(model)):
            compiled.clear()
            for network in (model, eager):
                qconv.set_progress(network, start)
            torch.testing.assert_close(model(input), eager(input))
            count += len(compiled)
            if torch.__version__ >= "2.12":  # before, blocks that are alike may share what was compiled
                assert 1 <= len(compiled) <= sum(start in starts(block) for block in blocks(model))
            compiled.clear()
            model(input)
            assert not compiled
    assert count >= len(starts(model)) / 2
    assert len(starts(model)) == {resnet: 11, Wrapped: 9, pair: 3}[make]
    assert model.state_dict().keys() == eager.state_dict().keys()
