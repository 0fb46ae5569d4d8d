"""Lean models and others under DistributedDataParallel, for `test_distributed`."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import qconv
from qconv import schemes
from qconv.models.activations import RPReLU

STEPS = 3
MODES = None, "exact", "fast"
FREED = schemes.bireal(), schemes.lsq(4, 4), schemes.dorefa(4, 4)


class Net(nn.Module):
    """Residual blocks, of which one may be left out, and one computed again in the backward."""

    def __init__(self, scheme: qconv.Scheme, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.convs = nn.ModuleList(qconv.QConv2d(32, 32, 3, padding=1, bias=False, scheme=scheme) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(32) for _ in range(3))
        self.acts = nn.ModuleList(activation() for _ in range(3))
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(32, 5)
        self.skipped: int | None = None
        self.recomputed = False

    def block(self, index: int, x: Tensor) -> Tensor:
        return self.acts[index](self.norms[index](self.convs[index](x)) + x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem_norm(self.stem(x))
        for index in range(3):
            if index == self.skipped:
                continue
            again = self.recomputed and index == 1
            x = checkpoint(self.block, index, x, use_reentrant=False) if again else self.block(index, x)
        return self.head(self.pool(x).mean((2, 3)))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "bnn": lambda: Net(schemes.bnn(), nn.Hardtanh),
    "reactnet": lambda: Net(schemes.reactnet(), lambda: RPReLU(32)),
    "lsq": lambda: Net(schemes.lsq(4, 4), nn.ReLU),
}
WRAPPED: dict[str, dict[str, Any]] = {
    "plain": {},
    "unused": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01},
    "static": {"static_graph": True},
    "static views": {"static_graph": True, "gradient_as_bucket_view": True},
}
CASES = *WRAPPED, "skipping", "accumulated", "recomputed", "hooked"
"""The options of the wrapper; a block that each step leaves out; ``no_sync``; checkpointing; gradients in bfloat16."""


def trained(model: nn.Module, case: str, rank: int) -> dict[str, Any]:
    """The gradients of each step and the state after them."""
    options = WRAPPED.get(case, {"find_unused_parameters": True} if case == "skipping" else {})
    wrapped = DistributedDataParallel(model, **options)
    if case == "hooked":
        wrapped.register_comm_hook(None, bf16_compress_hook)
    model.recomputed = case == "recomputed"  # pyright: ignore
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    qconv.after_every_step(optimizer, model)
    generator = torch.Generator().manual_seed(rank)
    grads: list[Any] = []
    for step in range(STEPS):
        model.skipped = step if case == "skipping" else None  # pyright: ignore
        optimizer.zero_grad()
        for last in (False, True) if case == "accumulated" else (True,):
            with nullcontext() if last else wrapped.no_sync():
                wrapped(torch.randn(8, 3, 10, 10, generator=generator)).square().mean().backward()
        grads.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
    return {"grads": grads, "state": copy.deepcopy(model.state_dict())}


def synchronized(model: nn.Module) -> str:
    """What batch norms over all processes say, which run on GPUs alone."""
    try:
        nn.SyncBatchNorm.convert_sync_batchnorm(model)(torch.randn(4, 3, 10, 10)).sum().backward()
    except ValueError as error:
        return str(error)
    return "done"


def sharded(scheme: qconv.Scheme, apart: bool, lean: bool) -> str | list[Tensor]:
    """The gradients where ``fully_shard`` holds all weights together, or those of each convolution apart."""
    torch.manual_seed(0)
    model, input = Net(scheme, nn.ReLU6), torch.randn(4, 3, 10, 10)
    model(input)  # some layers take their ranges from it
    qconv.lean(model, lean, exact=True)
    for conv in model.convs if apart else ():
        fully_shard(conv)
    fully_shard(model)
    try:
        model(input).square().mean().backward()
    except RuntimeError as error:
        return str(error)
    return [cast(DTensor, p.grad).full_tensor() for p in model.parameters()]


def train_lean(rank: int) -> dict[str, Any]:
    """Each case with a model that is not lean, an exact and a fast one, which start apart on the ranks."""
    found: dict[str, Any] = {}
    for name in NETWORKS:
        for case in CASES:
            for mode in MODES:
                torch.manual_seed(rank)
                model = NETWORKS[name]()
                if mode is not None:
                    qconv.lean(model, exact=mode == "exact")
                found[f"{name}, {case}, {mode}"] = trained(model, case, rank)
    found["synchronized"] = [synchronized(net) for net in (NETWORKS["bnn"](), qconv.lean(NETWORKS["bnn"]()))]
    found["sharded"] = {
        scheme.name: [sharded(scheme, apart, lean) for apart in (False, True) for lean in (False, True)]
        for scheme in FREED
    }
    return found
