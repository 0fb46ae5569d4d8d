"""The counter-based random stream, and stochastic signs that draw from it."""

import pytest
import torch
from torch import Tensor

import qconv
from qconv.quantizers import Stream, stochastic


def hashed(index: int, key: int, step: int) -> float:
    """The stream's definition in Python's integers, which don't overflow."""

    def mix(x: int) -> int:
        x &= 0xFFFFFFFF
        x = (x ^ (x >> 16)) * 0x21F0AAAD & 0xFFFFFFFF
        x = (x ^ (x >> 15)) * 0x735A2D97 & 0xFFFFFFFF
        return x ^ (x >> 15)

    return (mix(mix(index ^ mix(key)) ^ mix(step + 0x5851F42D)) >> 8) / 2**24


@pytest.mark.parametrize(("key", "step", "rank"), [(0, 0, 0), (2**31 - 1, 7, 1), (12345, 10**9, 2)])
def test_numbers_against_python(key: int, step: int, rank: int) -> None:
    shape = torch.Size((4, 5, 10))
    found = stochastic.uniform(shape, torch.tensor(key), torch.tensor(step), torch.device("cpu"), rank, 3)
    assert found.dtype == torch.float32
    samples = [3 * i + rank for i in range(4)]
    assert found.flatten().tolist() == [hashed(50 * i + j, key, step) for i in samples for j in range(50)]


def test_numbers_are_uniform_and_independent() -> None:
    def draw(key: int, step: int) -> Tensor:
        return stochastic.uniform(torch.Size((100_000,)), torch.tensor(key), torch.tensor(step), torch.device("cpu"))

    one = draw(1, 0)
    assert one.min() >= 0
    assert one.max() < 1
    counts = torch.histc(one, 100, 0, 1)
    assert ((counts - 1000).square() / 1000).sum() < 150  # chi-square, 99 degrees of freedom: 1 in 1000
    pairs = [(one, draw(2, 0)), (one, draw(1, 1)), (one[1:], one[:-1]), (one, draw(1 + 2**16, 0))]
    assert all(torch.corrcoef(torch.stack(pair))[0, 1].abs() < 0.015 for pair in pairs)


def test_a_shard_draws_its_part_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.zeros(7, 3)
    inputs, weights = Stream(sharded=True), Stream(sharded=False)
    together = inputs.uniform(whole, *inputs.tensors())
    alone = weights.uniform(whole, *weights.tensors())
    for rank in (0, 1):
        monkeypatch.setattr(stochastic, "rank_and_count", lambda rank=rank: (rank, 2))
        assert inputs.uniform(whole[rank::2], *inputs.tensors()).equal(together[rank::2])
        assert weights.uniform(whole, *weights.tensors()).equal(alone)


def test_streams_differ_follow_the_seed_and_come_back() -> None:
    torch.manual_seed(5)
    one, other = Stream(True), Stream(True)
    torch.manual_seed(5)
    again = Stream(True)
    x = torch.zeros(50)
    first = one.uniform(x, *one.tensors())
    assert first.equal(again.uniform(x, *again.tensors()))
    assert not first.equal(other.uniform(x, *other.tensors()))
    one.after_step_()
    assert not first.equal(one.uniform(x, *one.tensors()))
    again.load_state_dict(one.state_dict())
    assert one.uniform(x, *one.tensors()).equal(again.uniform(x, *again.tensors()))


def test_loading_draws_no_numbers() -> None:
    layer = qconv.QConv2d(4, 4, 3, scheme=qconv.schemes.bnn(stochastic=True))
    before = torch.get_rng_state()
    layer.load_state_dict(layer.state_dict())
    assert torch.get_rng_state().equal(before)
