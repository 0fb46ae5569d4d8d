"""First batches' ranges where processes take different paths, under gloo and under DataParallel."""

import copy
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DataParallel

import qconv
from qconv import schemes
from qconv.after_training.ewgs_deltas import deltas_of, write_deltas
from qconv.ground.processes import meet

SECONDS = 1  # of the store's timeout, at last


class Paths(nn.Module):
    """A layer, then those of ``path``, by their numbers."""

    def __init__(self, named: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        made = [qconv.QConv2d(2, 2, 3, padding=1, scheme=schemes.minmax(4, 4)) for _ in range(3)]
        self.layers = nn.ModuleList(made)
        self.path: list[int] = []
        for index, layer in enumerate(made if named else ()):
            layer.__dict__["name_in_model"] = f"layers.{index}"  # as `qconv.convert` does

    def forward(self, input: Tensor) -> Tensor:
        for index in self.path:
            input = self.layers[index](input)
        return input

    def ranges(self) -> list[float]:
        return [layer.input_quantizer.high.item() for layer in self.layers]  # pyright: ignore


def pictures(rank: int) -> Tensor:
    return torch.rand(2, 2, 5, 5, generator=torch.Generator().manual_seed(rank)) * (1 if rank == 0 else 50)


def outcome(call: Callable[[], object]) -> tuple[str, float]:
    start = time.monotonic()
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "done", time.monotonic() - start


def trained(rank: int, paths: tuple[list[int], list[int]], *, named: bool, calibrated: bool = False) -> dict[str, Any]:
    """What comes of a training step where each process takes its own path; the weights are the same."""
    model = Paths(named)
    if calibrated:
        model.path = [0, 1, 2] if rank == 0 else [0]
        qconv.calibrate(model, [pictures(rank)])
    model.path = paths[rank]
    text, seconds = outcome(lambda: model(pictures(rank)).square().mean().backward())
    dist.barrier()
    return {"text": text, "seconds": seconds, "ranges": model.ranges()}


def blank(rank: int) -> list[float]:
    """Process 1 begins with an empty image."""
    model = Paths(named=True)
    model.path = [0]
    model(pictures(1) if rank == 0 else torch.zeros(2, 2, 5, 5))
    return model.ranges()


def deltas(seeds: tuple[int, ...]) -> dict[str, float]:
    """The δ of EWGS from these images."""
    torch.manual_seed(0)
    layer = qconv.QConv2d(2, 2, 3, scheme=schemes.ewgs(2, 2))
    model = nn.Sequential(layer, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    layer.input_quantizer.calibrated = True
    generator = torch.Generator().manual_seed(0)
    labels = torch.tensor([0, 1])
    found = [deltas_of(model, (pictures(seed), labels), 1, generator.manual_seed(0), cross_entropy) for seed in seeds]
    return write_deltas(model, found)


def corrected(seeds: tuple[int, ...]) -> list[float]:
    """The bias that `qconv.correct_bias` leaves, from these images."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(2, 3, 3))
    model = qconv.convert(copy.deepcopy(network), schemes.bwn(), skip=())
    qconv.correct_bias(model, network, torch.cat([pictures(seed) for seed in seeds]))
    return model[0].bias.tolist()  # pyright: ignore


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)  # pyright: ignore[reportPrivateImportUsage]  # documented API
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store, timeout=timedelta(seconds=60))
    found: dict[str, Any] = {
        "blank": blank(rank),
        "calibrated": trained(rank, ([0, 1], [0, 2]), named=True, calibrated=True),
        "apart": trained(rank, ([0, 1], [0, 2]), named=True),
        "apart without names": trained(rank, ([0, 1], [0, 2]), named=False),
        "one more": trained(rank, ([0, 1], [0]), named=True),
        "deltas": deltas((rank,)),
        "corrected": corrected((rank,)),
    }
    dist.distributed_c10d._get_default_store().set_timeout(timedelta(seconds=SECONDS))
    if rank == 0:  # the other one never comes
        found["alone"] = outcome(lambda: meet("there", "the layer"))
    dist.barrier()
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes found."""
    folder = tmp_path_factory.mktemp("gloo")
    mp.spawn(worker, (str(folder),), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]  # documented API
    return [torch.load(folder / f"{rank}.pt") for rank in (0, 1)]


@pytest.mark.nightly
def test_two_layers_are_never_paired_up(ranks: list[dict[str, Any]]) -> None:
    layer = Paths(named=False).layers[0]
    scheme = "minmax(weight_bits=4, input_bits=4)"
    for case, label in (("apart", f"layer 'layers.{{}}' (QConv2d, {scheme})"), ("apart without names", repr(layer))):
        for rank, mine, others in ((0, 1, 2), (1, 2, 1)):
            found = ranks[rank][case]
            assert found["text"].startswith(f"RuntimeError: {label.format(mine)}: its range is the mean over all")
            assert f"process {1 - rank} is at {label.format(others)}" in found["text"]
            assert "call qconv.calibrate(model, batches) in all of them before training" in found["text"]
            assert found["ranges"][1:] == [1, 1]  # nothing was set


@pytest.mark.nightly
def test_a_layer_that_one_process_alone_comes_to_does_not_hang(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["one more"] for rank in ranks)
    assert second["text"] == "done"
    assert "layer 'layers.1' (QConv2d, minmax(weight_bits=4, input_bits=4))" in first["text"]
    assert "process 1 has gone on to the backward without it" in first["text"]
    text, seconds = ranks[0]["alone"]
    assert "the layer: its range is the mean over all processes, but process 1 did not arrive within" in text
    assert SECONDS <= seconds < 10 * SECONDS


@pytest.mark.nightly
def test_calibrate_lets_processes_take_different_paths(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["calibrated"] for rank in ranks)
    assert first["text"] == second["text"] == "done"
    assert first["ranges"] == second["ranges"]
    assert first["ranges"][0] == pytest.approx((pictures(0).max().item() + pictures(1).max().item()) / 2)


@pytest.mark.nightly
def test_a_blank_batch_of_one_process_does_not_count(ranks: list[dict[str, Any]]) -> None:
    assert [rank["blank"][0] for rank in ranks] == [pictures(1).max().item()] * 2


@pytest.mark.nightly
def test_processes_have_the_same_delta(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["deltas"] == ranks[1]["deltas"] == pytest.approx(deltas((0, 1)))
    assert any(ranks[0]["deltas"].values())


@pytest.mark.nightly
def test_processes_have_the_same_corrected_bias(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["corrected"] == ranks[1]["corrected"] == pytest.approx(corrected((0, 1)))
    assert ranks[0]["corrected"] != pytest.approx(corrected((0,)))


@pytest.mark.filterwarnings("ignore:calibrate. the model did not call")
def test_a_replica_of_data_parallel_calibrates_nothing() -> None:
    model = Paths(named=True)
    model.path = [0]
    replica: Any = model.layers[0]._replicate_for_data_parallel()
    replica.weight, replica.bias = model.layers[0].weight, model.layers[0].bias
    with pytest.raises(RuntimeError, match=r"layer 'layers.0' \(QConv2d, .*\) is a replica of DataParallel"):
        replica(pictures(0))
    assert qconv.calibrate(DataParallel(model), [pictures(0)]) == ["module.layers.0"]
    replica = model.layers[0]._replicate_for_data_parallel()
    replica.weight, replica.bias = model.layers[0].weight, model.layers[0].bias
    assert replica(pictures(0)).equal(model.layers[0](pictures(0)))
