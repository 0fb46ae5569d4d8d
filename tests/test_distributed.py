"""Two gloo processes under DistributedDataParallel give the gradients of one process on the joined batch."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import qconv
from qconv import schemes

METHODS: dict[str, Any] = {
    "bnn": schemes.bnn,
    "xnor": schemes.xnor,
    "shift_q": schemes.shift_q,
    "shift_ps": schemes.shift_ps,
}


def network(method: str) -> nn.Sequential:
    torch.manual_seed(3)
    scheme = METHODS[method]()
    return nn.Sequential(
        qconv.QConv2d(2, 4, 3, padding=1, scheme=scheme), nn.Flatten(), qconv.QLinear(4 * 25, 3, scheme=scheme)
    ).double()


def pictures() -> torch.Tensor:
    return torch.randn(8, 2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def worker(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for method in METHODS:
        model = network(method)
        if rank == 1:  # DDP hands out the parameters of rank 0
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
        parallel = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        qconv.after_every_step(optimizer, model)
        parallel(pictures()[rank::2]).square().mean().backward()
        grads = [parameter.grad for parameter in model.parameters()]
        optimizer.step()
        torch.save((grads, model.state_dict()), Path(folder) / f"{method}{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ddp")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, (port, str(folder)), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]  # documented API
    return folder


@pytest.mark.parametrize("method", METHODS)
def test_two_processes(method: str, folder: Path) -> None:
    model = network(method)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    qconv.after_every_step(optimizer, model)
    model(pictures()).square().mean().backward()
    expected = [parameter.grad for parameter in model.parameters()]
    optimizer.step()
    ranks = [torch.load(folder / f"{method}{rank}.pt", weights_only=True) for rank in (0, 1)]
    for grads, state in ranks:
        for found, reference in zip(grads, expected, strict=True):
            torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-14)
        for found, reference in zip(state.values(), model.state_dict().values(), strict=True):
            torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-14)
    for one, other in zip(ranks[0][1].values(), ranks[1][1].values(), strict=True):
        assert one.equal(other)
