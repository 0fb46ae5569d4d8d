"""What the tests share: seeds, and the schemes and quantizers that every contract runs over."""

import pytest
import torch

import qconv
from qconv import schemes

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


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    # On tensors as small as these a second thread costs more than it saves, and far more on a busy machine.
    torch.set_num_threads(1)


@pytest.fixture(params=SCHEMES.values(), ids=list(SCHEMES))
def scheme(request: pytest.FixtureRequest) -> qconv.Scheme:
    return request.param
