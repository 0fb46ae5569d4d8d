"""What the tests share: seeds, and the schemes and quantizers that every contract runs over."""

import sys

import pytest
import torch

import qconv
import train  # noqa: F401  # gives Hydra the configs of the schemes
from qconv import schemes
from qconv.quantizers import Int8Stochastic

SCHEMES: dict[str, qconv.Scheme] = {
    scheme.name: scheme
    for scheme in (
        schemes.identity(),
        schemes.bnn(),
        schemes.bnn(padding_value=1),
        schemes.bwn(),
        schemes.bwn(detach_scale=True),
        schemes.xnor(),
        schemes.xnor(scale_map=True),
        schemes.shift_q(),
        schemes.shift_q(weight_bits=3, fixed_point=(4, 6)),
        schemes.shift_ps(),
    )
}
"""One of each kind, for what is slow."""
METHODS: dict[str, qconv.Scheme] = SCHEMES | {
    scheme.name: scheme
    for scheme in (
        schemes.bnn(stochastic=True),
        schemes.xnor(center=True, paper_gradient=True),
        schemes.bwn(numel_gradient=True),
        schemes.xnorpp(),
        schemes.bireal(),
        schemes.bireal("paper"),
        schemes.reactnet(),
        schemes.irnet(),
        schemes.irnet(binary_input=False),
        schemes.recu(),
        schemes.adabin(),
        schemes.adabin(offset="code"),
        schemes.reste(),
        schemes.twn(),
        schemes.twn(per_channel=False),
        schemes.ttq(),
        schemes.inq(),
        schemes.shift_q(4, rounding="stochastic"),
        schemes.shift_ps(4, rounding="stochastic"),
        schemes.apot(),
        schemes.apot(2, None, "imagenet"),
        schemes.dorefa(),
        schemes.dorefa(2, 3, grad_bits=6),
        schemes.pact(),
        schemes.lsq(),
        schemes.lsq(1, 1, signed_input=True),
        schemes.lsq(3, 3, per_channel=True),
        schemes.lsq_plus(),
        schemes.n2uq(),
        schemes.dsq(),
        schemes.minmax(),
        schemes.minmax(2, 4, symmetric=False),
        schemes.percentile(4, 4, 99.0),
        schemes.fp8(grad_format="e5m2"),
        schemes.minmax().with_grad(Int8Stochastic),
        schemes.two_stage(schemes.reactnet()),
        schemes.staged([(0, schemes.lsq(4, 4)), (0.5, schemes.lsq(2, 2))]),
    )
}
"""Every method."""


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
