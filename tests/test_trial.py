"""A model that was run to see what it does is as it was before."""

import warnings
from contextlib import suppress
from typing import Self

import pytest
import torch
from torch import Tensor, nn

from qconv.layers.observed_run import random_state_kept, trial


class Changing(nn.Module):
    """Writes to all that it has, draws, and warns."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.BatchNorm1d(3).eval()
        self.register_buffer("count", torch.zeros(()))
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("its own", stacklevel=1)
        self.count += 1
        self.seen.append(len(x))
        self.last = x
        return self.part(x) + torch.rand(3)


def test_everything_comes_back() -> None:
    model = Changing()
    before = torch.get_rng_state()
    with suppress(ZeroDivisionError), trial(model, keep_state=True):
        assert not model.training
        assert not model(torch.rand(2, 3, requires_grad=True)).requires_grad
        assert model.seen == [2]
        raise ZeroDivisionError
    assert (model.training, model.part.training, model.count, model.seen) == (True, False, 0, [])
    assert not hasattr(model, "last")
    assert torch.get_rng_state().equal(before)
    assert torch.is_grad_enabled()


class Merging(nn.Linear):
    """Merges a part into its weight for evaluation, and takes it out again, as LoRA's layers do."""

    merged = False

    def train(self, mode: bool = True) -> Self:
        if self.merged == mode:
            self.weight.data += -1 if mode else 1
            self.merged = not mode
        return super().train(mode)


def test_modules_go_back_to_training_by_themselves() -> None:
    model = nn.Sequential(Merging(3, 3), nn.Sequential(Merging(3, 3), nn.BatchNorm1d(3).eval()))
    weights = [parameter.clone() for parameter in model.parameters()]
    with trial(model):
        assert model[0].merged
    assert [module.training for module in model.modules()] == [True, True, True, True, False]
    assert not model[0].merged
    torch.testing.assert_close(list(model.parameters()), weights)


def test_what_is_not_asked_for_stays() -> None:
    model = Changing()
    before = torch.get_rng_state()
    with pytest.warns(UserWarning, match="its own"), trial(model, keep_random=False, warns=True):
        model(torch.ones(2, 3))
    assert model.count == 1
    assert model.training
    assert not torch.get_rng_state().equal(before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_random_numbers_of_the_models_device_go_on() -> None:
    model = nn.Linear(1, 1, device="cuda")
    before = torch.cuda.get_rng_state()
    with random_state_kept(model):
        torch.rand(3, device="cuda")
    assert torch.cuda.get_rng_state().equal(before)
