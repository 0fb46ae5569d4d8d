"""What the tests share: seeds, and the schemes that every contract runs over."""

import gc
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from methods import METHODS as METHODS, SCHEMES as SCHEMES

import qconv
from qconv.cli.configs import store_schemes

store_schemes()  # for tests that compose configs
# For the processes that tests start: as many threads as here, so that they add up in the same order; and a second one
# beside the tests of another worker would only wait.
os.environ["OMP_NUM_THREADS"] = "1"
# Tables would fit themselves to it. pytest-xdist sets it, and readline does so where os.environ does not show it.
os.environ.pop("COLUMNS", None)
os.unsetenv("COLUMNS")
# Hydra ends all handlers of logs when it configures its own. That of absl, which OpenVINO and others bring, would close
# the stream that it began with, which is pytest's.
logging.shutdown = lambda handlers=(): None  # pyright: ignore


def pytest_collection_finish() -> None:
    # A million objects of torch and of the tests themselves, which no collection of garbage needs to look at again.
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # at the end, libraries look for objects that nobody has freed


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    # Half the time of a small run goes into its two charts.
    if "pytorch_lightning" in sys.modules and "drawn" not in request.keywords:
        monkeypatch.setattr("matplotlib.backends.backend_agg.FigureCanvasAgg.print_png", _print_nothing)


def _print_nothing(canvas: Any, file: Any) -> None:
    file.write(b"a chart that is not drawn")


@pytest.fixture(autouse=True)
def _compiled_anew() -> None:
    # After eight graphs of one function dynamo refuses another, whichever tests they were for.
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    # On tensors as small as these a second thread costs more than it saves, and far more on a busy machine.
    torch.set_num_threads(1)


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether the same names have the same tensors: of two state dicts, that nothing has changed."""
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.cuda)] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    """The CPU, and where there is one the GPU, which then repeats its sums and rounds float32 as the CPU does."""
    with ExitStack() as stack:
        if request.param == "cuda":
            flags = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)
            stack.enter_context(flags)
        yield request.param


@pytest.fixture(params=SCHEMES.values(), ids=list(SCHEMES))
def scheme(request: pytest.FixtureRequest) -> qconv.Scheme:
    return request.param


@pytest.fixture(params=METHODS.values(), ids=list(METHODS))
def method(request: pytest.FixtureRequest) -> qconv.Scheme:
    return request.param
