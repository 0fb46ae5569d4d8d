"""What the tests share: seeds, and the schemes that every contract runs over."""

import sys

import pytest
import torch
from methods import METHODS as METHODS, SCHEMES as SCHEMES

import qconv
import train  # noqa: F401  # gives Hydra the configs of the schemes


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _compiled_anew() -> None:
    # After eight graphs of one function dynamo refuses another, whichever tests they were for.
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.reset()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    # On tensors as small as these a second thread costs more than it saves, and far more on a busy machine.
    torch.set_num_threads(1)


@pytest.fixture(params=SCHEMES.values(), ids=list(SCHEMES))
def scheme(request: pytest.FixtureRequest) -> qconv.Scheme:
    return request.param


@pytest.fixture(params=METHODS.values(), ids=list(METHODS))
def method(request: pytest.FixtureRequest) -> qconv.Scheme:
    return request.param
