"""Two gloo processes under DistributedDataParallel do what one process does on the joined batch.

Rank 1 starts with another seed, so whatever is equal in the end was handed out, or never depended on the rank. The
joined batch has the samples of rank 0 and rank 1 in turn; the loss is a mean, as DDP's average of gradients assumes.
"""

import copy
import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lean_processes import CASES, FREED, MODES, NETWORKS, train_lean
from settings import Recomputed
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import qconv
from qconv import Scheme, schemes
from qconv.layers import QuantizedLayer
from qconv.quantizers import (
    EDE,
    INQ,
    LSQ,
    DoReFaGradient,
    Identity,
    Int8Stochastic,
    LSQInput,
    Quantizer,
    ReCUWeight,
    ReSTE,
    ShiftPS,
    ShiftQ,
    Sign,
    Stages,
)

pytestmark = pytest.mark.nightly  # test_survival.py has a run of two processes that is none
State = dict[str, Tensor]

STOCHASTIC_WEIGHT = partial(Sign, stochastic=True, sharded=False)


def by_name(*made: Scheme) -> dict[str, Scheme]:
    return {scheme.name: scheme for scheme in made}


RANDOM = by_name(
    *(schemes.bnn(stochastic=True), schemes.shift_q(rounding="stochastic"), schemes.shift_ps(rounding="stochastic")),
    schemes.dorefa(2, 3, grad_bits=6),
    schemes.minmax(4, 4, input_symmetric=True).with_grad(Int8Stochastic),
    Scheme("random", partial(Sign, stochastic=True), STOCHASTIC_WEIGHT, DoReFaGradient),
)
"""Those that draw random numbers."""
JOINED = RANDOM | by_name(
    *(schemes.bnn(), schemes.xnor(), schemes.xnorpp(), schemes.reactnet(), schemes.irnet(), schemes.recu()),
    *(schemes.adabin(), schemes.reste(), schemes.twn(), schemes.ttq(), schemes.inq(), schemes.shift_q()),
    *(schemes.shift_ps(), schemes.apot(), schemes.dorefa(2, 3), schemes.lsq(signed_input=True), schemes.lsq_plus()),
    schemes.pact(alpha=0.5),  # so low that inputs lie above it: they are alpha's gradient
    schemes.lsq(1, 1, signed_input=True, per_channel=True),
    *(schemes.n2uq(), schemes.dsq(), schemes.minmax(), schemes.percentile(4, 4, 90.0)),
)
"""Those whose gradient is a function of each sample and of the learned tensors."""
METHODS = JOINED | by_name(
    # What these take from the batch depends on how it is cut: the number of elements, the largest one.
    *(schemes.lsq(signed_input=True, grad_scale="numel"), schemes.fp8(grad_format="e5m2"))
)
CALIBRATED = [name for name, scheme in METHODS.items() if not scheme.input().calibrated]


SHARDED = by_name(
    *(schemes.xnor(center=True), schemes.ttq(), schemes.shift_ps(), schemes.lsq(), schemes.pact(), schemes.apot()),
    *(schemes.dsq(), schemes.n2uq(), schemes.lsq_plus(), schemes.adabin(), schemes.recu(), schemes.minmax()),
    *(schemes.inq(), schemes.two_stage(schemes.lsq(), 0.2)),
)
"""Each with learned numbers of another kind, or with weights that are frozen one by one."""


def stages(*parts: tuple[float, Callable[[], Quantizer]]) -> partial[Stages]:
    return partial(Stages, parts)


SCHEDULES = by_name(
    *(schemes.irnet(), schemes.adabin(), schemes.recu(), schemes.reste(), schemes.inq(portions=(0.3, 0.6, 1.0))),
    Scheme("input first", partial(Sign, EDE), stages((0, Identity), (0.5, partial(Sign, ReSTE)))),
    Scheme(
        "fewer bits",
        stages((0, partial(LSQInput, 4, signed=True)), (0.5, partial(LSQInput, 2, signed=True))),
        stages((0, partial(LSQ, 4)), (0.5, partial(LSQ, 2)), (0.8, INQ)),
    ),
    Scheme("random at last", stages((0, Identity), (0.5, partial(Sign, stochastic=True))), STOCHASTIC_WEIGHT),
)
PROGRESS = 0.0, 0.4, 0.4, 0.5, 0.5, 0.8, 1.0
"""At each step; it is set where it changes, as at the start of an epoch."""
CUTS = 2, 4
"""Steps after which a run goes on from what was saved: in the middle of an epoch, where nothing sets the progress."""


def network(scheme: Scheme, seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(
        qconv.QConv2d(2, 4, 3, padding=1, scheme=scheme), nn.Flatten(), qconv.QLinear(4 * 25, 3, scheme=scheme)
    )
    for module in model.modules():
        if isinstance(module, ShiftPS):  # starts at whole numbers, which stochastic rounding leaves as they are
            nn.init.uniform_(module.shift, -3, 0)
            nn.init.uniform_(module.sign, -1, 1)
    return model.double()


def pictures() -> Tensor:
    return torch.randn(8, 2, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def shard(rank: int) -> Tensor:
    return pictures()[rank::2]


def state_of(model: nn.Module) -> State:
    """A copy; Python's numbers are in it as tensors (``calibrated``, the stage)."""
    return copy.deepcopy(model.state_dict())


def layers(model: nn.Module) -> list[QuantizedLayer]:
    return [module for module in model.modules() if isinstance(module, QuantizedLayer)]


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.05, momentum=0.9)
    qconv.after_every_step(optimizer, model)
    return optimizer


def first_step(model: nn.Module, forward: nn.Module, input: Tensor) -> dict[str, State]:
    """The state that the first forward leaves, the gradients, and the state after the step."""
    optimizer = optimizer_of(model)
    loss = forward(input).square().mean()
    calibrated = state_of(model)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    return {"calibrated": calibrated, "grads": grads, "after": state_of(model)}


def batches(rank: int) -> list[Tensor]:
    """For `qconv.calibrate`: a rank may have more of them than another."""
    return list(shard(rank).split(4 - rank))


def draws(model: nn.Module, inputs: Tensor) -> list[dict[str, Tensor]]:
    """What the quantizers give for the same values in three steps."""
    steps = []
    for _ in range(3):
        steps.append({})
        for name, quantizer in model.named_modules():
            if isinstance(quantizer, Sign | DoReFaGradient | Int8Stochastic | ShiftQ | ShiftPS):
                layer: Any = model.get_submodule(name.rpartition(".")[0])
                x = layer.weight.detach() if name.endswith("weight_quantizer") else inputs
                steps[-1][name] = quantizer.quantize(x, *quantizer.tensors()).detach()
        qconv.after_step(model)
    return steps


def scheduled(
    model: nn.Module, wrapped: Callable[[nn.Module], nn.Module], input: Tensor, start: Any = None
) -> Iterator[tuple[State, Any]]:
    """The model's and the optimizer's state after each step, or after those since ``start``."""
    done, state, optimizer_state = (0, None, None) if start is None else start
    if state is not None:
        model.load_state_dict(state)
    forward, optimizer = wrapped(model), optimizer_of(model)
    if optimizer_state is not None:
        optimizer.load_state_dict(optimizer_state)
    for step in range(done, len(PROGRESS)):
        if step == 0 or PROGRESS[step] != PROGRESS[step - 1]:
            qconv.set_progress(model, PROGRESS[step])
        optimizer.zero_grad()
        forward(input).square().mean().backward()
        optimizer.step()
        yield state_of(model), copy.deepcopy(optimizer.state_dict())


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def train_methods(rank: int) -> dict[str, Any]:
    found = {}
    for name, scheme in METHODS.items():
        model = network(scheme, 3 + rank)
        qconv.set_progress(model, 0.5)
        found[name] = first_step(model, DistributedDataParallel(model), shard(rank))
    return found


def calibrate_by_hand(rank: int, given: Callable[[int], list[Tensor]]) -> dict[str, Any]:
    found = {}
    for name in CALIBRATED:
        model = network(METHODS[name], 3 + rank)
        names = qconv.calibrate(DistributedDataParallel(model), given(rank))
        found[name] = names, state_of(model)
    return found


def draw(rank: int) -> dict[str, Any]:
    found = {}
    for name, scheme in RANDOM.items():
        model = network(scheme, 3 + rank)
        DistributedDataParallel(model)  # hands out the keys
        found[name] = draws(model, shard(rank))
    return found


def recompute(rank: int) -> dict[str, Any]:
    found = {}
    for name in (*RANDOM, *CALIBRATED):
        plain, recomputed = (network(METHODS[name], 3 + rank) for _ in range(2))
        found[name] = (
            first_step(plain, DistributedDataParallel(plain), shard(rank)),
            first_step(recomputed, DistributedDataParallel(Recomputed(recomputed)), shard(rank)),
        )
    return found


def follow_schedules(rank: int) -> dict[str, Any]:
    """Each schedule to its end, and again from what rank 0 had saved at the `CUTS`."""
    found = {}
    for name, scheme in SCHEDULES.items():
        run = list(scheduled(network(scheme, 3 + rank), DistributedDataParallel, shard(rank)))
        found[name] = {"run": [state for state, _ in run]}
        for done in CUTS:
            start: list[Any] = [(done, *run[done - 1])]
            dist.broadcast_object_list(start)
            fresh = network(scheme, 7 + rank)
            rest = [state for state, _ in scheduled(fresh, DistributedDataParallel, shard(rank), start[0])]
            found[name][f"from {done}"] = rest
    return found


def one_rank_without(first: bool, rank: int) -> dict[str, Any]:
    """Rank 1 has an empty batch: the first of its training, or the only one that it gives `qconv.calibrate`."""
    empty = shard(1)[:0]
    if not first:
        return calibrate_by_hand(rank, lambda rank: [empty] if rank else [shard(0)])
    found = {}
    for name in CALIBRATED:
        model = network(METHODS[name], 3 + rank)
        DistributedDataParallel(model)(empty if rank else shard(0))
        found[name] = state_of(model)
    return found


def begin_recu(rank: int) -> State:
    """Starts a stage whose learned tensors start at random numbers."""
    weight = stages((0, Identity), (0.5, ReCUWeight))
    model = network(Scheme("recu at last", weight=weight), 3 + rank)
    DistributedDataParallel(model)
    qconv.set_progress(model, 0.5)
    return state_of(model)


def sharded(model: nn.Module) -> nn.Module:
    for layer in layers(model):
        fully_shard(layer)
    fully_shard(model)
    return model


def whole_state(model: nn.Module) -> State:
    state = model.state_dict()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def from_meta(scheme: Scheme) -> State:
    """The state of a network that gets its memory in shards, and then its first weights."""
    with torch.device("meta"):
        model = sharded(network(scheme))
    model.to_empty(device="cpu")
    for layer in layers(model):
        layer.reset_parameters()
    return whole_state(model)


def two_steps(scheme: Scheme, fully_sharded: bool) -> State:
    """The state behind two optimizer steps of a calibrated network, each process with all images."""
    model = network(scheme)
    qconv.calibrate(model, [pictures()])
    if fully_sharded:
        sharded(model)
    qconv.set_progress(model, 0.3)  # INQ freezes weights, and the second stage begins
    optimizer = optimizer_of(model)
    for _ in range(2):
        optimizer.zero_grad()
        model(pictures()).square().mean().backward()
        optimizer.step()
    return whole_state(model)


def train_fully_sharded(rank: int) -> dict[str, Any]:
    """Under ``fully_shard``: what becomes of each scheme, and what an uncalibrated layer says."""
    model = network(schemes.lsq())
    fully_shard(model)
    refused = outcome(lambda: model(shard(rank)))
    return {
        "states": {name: two_steps(scheme, True) for name, scheme in SHARDED.items()},
        "from meta": {name: from_meta(scheme) for name, scheme in SHARDED.items()},
        "uncalibrated": refused,
    }


def bad_batches(rank: int) -> dict[str, str]:
    """What `qconv.calibrate`, and at last the first training step, say to batches of which rank 1's are wrong."""
    model = network(METHODS[CALIBRATED[0]])
    wrong = shard(1).fill_(torch.nan)
    return {
        "nan": outcome(lambda: qconv.calibrate(model, [wrong if rank else shard(0)])),
        "none": outcome(lambda: qconv.calibrate(model, [])),
        "one has none": outcome(lambda: qconv.calibrate(model, [] if rank else [shard(0)])),
        "first step": outcome(lambda: network(METHODS[CALIBRATED[0]])(wrong if rank else shard(0))),
    }


def go_on_drawing(rank: int) -> list[Tensor]:
    """What a process draws after a checkpoint, and what it draws after resuming from that."""
    from qconv.training import RandomState  # with Lightning, which the rest does without

    torch.manual_seed(rank)
    states = [RandomState().state_dict()]
    expected = torch.rand(3)
    dist.broadcast_object_list(states)  # the first process writes the checkpoint
    resumed = RandomState()
    resumed.load_state_dict(states[0])
    resumed.on_train_epoch_start(cast(Any, None), cast(Any, None))
    return [expected, torch.rand(3)]


def worker(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    # What waits for a process that never comes is an error, soon.
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    found = {
        "methods": train_methods(rank),
        "by hand": calibrate_by_hand(rank, batches),
        "draws": draw(rank),
        "recomputed": recompute(rank),
        "schedules": follow_schedules(rank),
        "empty by hand": one_rank_without(False, rank),
        "empty first": one_rank_without(True, rank),
        "recu": begin_recu(rank),
        "sharded": train_fully_sharded(rank),
        "lean": train_lean(rank),
        "drawing": go_on_drawing(rank),
        "bad": bad_batches(rank),  # comes last: what one of them leaves waiting ends with the other process
    }
    torch.save(found, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes found."""
    folder = tmp_path_factory.mktemp("ddp")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, (port, str(folder)), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]  # documented API
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


def assert_equal(one: Any, other: Any) -> None:
    """The same tensors in the same places, in every bit."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype
        assert one.equal(other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_equal(one[name], other[name])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            assert_equal(first, second)
    else:
        assert one == other


def assert_close(found: State, expected: State) -> None:
    """Up to the rounding of float64, which is that of the largest terms where a sum cancels; whole numbers exactly."""
    assert found.keys() == expected.keys()
    floats = [tensor for tensor in expected.values() if tensor.is_floating_point()]
    atol = 1e-14 * max((tensor.abs().max().item() for tensor in floats), default=0.0)
    for name, tensor in expected.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(
                found[name], tensor, rtol=1e-12, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
            )
        else:
            assert_equal(found[name], tensor)


@pytest.mark.parametrize("name", SHARDED)
def test_fully_sharded_parameters_are_trained_as_whole_ones(name: str, ranks: list[dict[str, Any]]) -> None:
    assert_close(ranks[0]["sharded"]["states"][name], two_steps(SHARDED[name], False))


@pytest.mark.parametrize("name", SHARDED)
def test_shards_from_the_meta_device_start_anew(name: str, ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["sharded"]["from meta"][name]
    whole = network(SHARDED[name])
    whole.load_state_dict({key: value for key, value in found.items() if "quantizer" not in key}, strict=False)
    assert_equal(found, dict(whole.state_dict()))


def test_a_first_batch_that_sharding_would_lose_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert (
        "call qconv.calibrate(model, batches) before fully_shard; no later stage may need"
        in ranks[0]["sharded"]["uncalibrated"]
    )


def mean(states: list[State]) -> State:
    return {
        name: torch.stack([state[name] for state in states]).mean(0) if tensor.is_floating_point() else tensor
        for name, tensor in states[0].items()
    }


@pytest.mark.parametrize("name", METHODS)
def test_both_ranks_have_the_same_state(name: str, ranks: list[dict[str, Any]]) -> None:
    one, other = (rank["methods"][name] for rank in ranks)
    assert_equal(one, other)
    assert all(flag for key, flag in one["after"].items() if key.endswith("calibrated"))
    assert all(grad.any() for grad in one["grads"].values())  # no tensor is equal because it never moves


@pytest.mark.parametrize("name", JOINED)
def test_the_gradients_are_those_of_the_joined_batch(name: str, ranks: list[dict[str, Any]]) -> None:
    found = ranks[0]["methods"][name]
    model = network(JOINED[name])
    qconv.set_progress(model, 0.5)
    model.load_state_dict(found["calibrated"])
    expected = first_step(model, model, pictures())
    assert_equal(expected["calibrated"], found["calibrated"])
    assert_close(found["grads"], expected["grads"])
    assert_close(found["after"], expected["after"])


def inputs_of(model: nn.Module, input: Tensor) -> list[Tensor]:
    """What reaches each layer in training."""
    seen: list[Tensor] = []
    for layer in layers(model):
        layer.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    model(input)
    return seen


@pytest.mark.parametrize("name", CALIBRATED)
def test_the_first_step_calibrates_with_the_mean_over_the_ranks(name: str, ranks: list[dict[str, Any]]) -> None:
    state = ranks[0]["methods"][name]["calibrated"]
    trained = network(METHODS[name])
    trained.load_state_dict(state)
    alone = [network(METHODS[name]) for _ in ranks]
    for rank, model in enumerate(alone):
        for layer, input in zip(layers(model), inputs_of(copy.deepcopy(trained), shard(rank)), strict=True):
            layer.input_quantizer.initialize(input)
    for index, layer in enumerate(layers(trained)):
        each = [layers(model)[index].input_quantizer.state_dict() for model in alone]
        assert_close(layer.input_quantizer.state_dict(), mean(each))
        assert any(not tensor.equal(each[1][key]) for key, tensor in each[0].items())  # the ranks saw other inputs


@pytest.mark.parametrize("name", CALIBRATED)
def test_calibrate_takes_the_mean_over_the_ranks(name: str, ranks: list[dict[str, Any]]) -> None:
    (names, found), other = (rank["by hand"][name] for rank in ranks)
    assert_equal((names, found), other)
    assert names == ["module.0", "module.2"]
    alone = [network(METHODS[name]) for _ in ranks]
    for rank, model in enumerate(alone):
        qconv.calibrate(model, batches(rank))
    assert_close(found, mean([state_of(model) for model in alone]))


@pytest.mark.parametrize("first", [False, True], ids=["by hand", "first"])
@pytest.mark.parametrize("name", CALIBRATED)
def test_a_rank_without_data_takes_what_the_other_saw(name: str, first: bool, ranks: list[dict[str, Any]]) -> None:
    found = [rank["empty first" if first else "empty by hand"][name] for rank in ranks]
    assert_equal(*found)
    alone = network(METHODS[name])
    if first:
        alone(shard(0))
        for layer in layers(alone):
            layer.input_quantizer.settle_()  # as with several processes, without a backward
        assert_equal(found[0], state_of(alone))
    else:
        qconv.calibrate(alone, [shard(0)])
        assert_equal(found[0][1], state_of(alone))


def test_what_is_wrong_on_one_rank_is_an_error_on_both(ranks: list[dict[str, Any]]) -> None:
    one, other = (rank["bad"] for rank in ranks)
    for found in (one, other):
        first = found.pop("first step")
        assert "ValueError: the input of QConv2d(" in first
        assert "has NaN or inf" in first
    assert one == other
    assert "ValueError: the input of layer '0' (Q" in one["nan"]
    assert "has NaN or inf" in one["nan"]
    assert "ValueError: batches must hold at least one batch" in one["none"]
    assert one["one has none"] == "done"


@pytest.mark.parametrize("name", RANDOM)
def test_both_ranks_draw_their_parts_of_one_stream(name: str, ranks: list[dict[str, Any]]) -> None:
    expected = draws(network(RANDOM[name]), pictures())
    assert all(expected)
    for step, (whole, one, other) in enumerate(zip(expected, *(rank["draws"][name] for rank in ranks), strict=True)):
        for key, values in whole.items():
            if key.endswith("weight_quantizer"):
                assert_equal([one[key], other[key]], [values, values])
            else:
                assert_equal(torch.stack([one[key], other[key]], 1).flatten(0, 1), values)
            if network(RANDOM[name]).get_submodule(key).stream is not None:
                assert all(not before[key].equal(values) for before in expected[:step])


@pytest.mark.parametrize("name", [*RANDOM, *CALIBRATED])
def test_a_recomputed_forward_is_the_same(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        plain, recomputed = rank["recomputed"][name]
        assert_equal(plain, recomputed)


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_are_those_of_one_process(name: str, ranks: list[dict[str, Any]]) -> None:
    runs = [rank["schedules"][name]["run"] for rank in ranks]
    assert_equal(*runs)
    expected = [state for state, _ in scheduled(network(SCHEDULES[name]), lambda model: model, pictures())]
    for found, reference in zip(runs[0], expected, strict=True):
        assert_close(found, reference)


@pytest.mark.parametrize("done", CUTS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_resumed_run_has_the_same_state(name: str, done: int, ranks: list[dict[str, Any]]) -> None:
    for found in (rank["schedules"][name] for rank in ranks):
        assert_equal(found[f"from {done}"], found["run"][done:])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NETWORKS)
def test_lean_models_learn_the_same(name: str, case: str, ranks: list[dict[str, Any]]) -> None:
    """As those that are not lean, if exact: the gradients of each step, and the state behind the last one."""
    for mode in MODES:
        one, other = (rank["lean"][f"{name}, {case}, {mode}"] for rank in ranks)
        assert_equal(one["grads"], other["grads"])
        learned = [key for key in one["state"] if "running" not in key]
        assert_equal({key: one["state"][key] for key in learned}, {key: other["state"][key] for key in learned})
    for rank in ranks:
        assert_equal(*(rank["lean"][f"{name}, {case}, {mode}"] for mode in (None, "exact")))
        assert any(grad is None for grad in rank["lean"][f"{name}, {case}, exact"]["grads"][0]) == (case == "skipping")


def test_each_rank_goes_on_with_its_own_random_numbers(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert_equal(*rank["drawing"])
    assert not ranks[0]["drawing"][0].equal(ranks[1]["drawing"][0])
    assert_equal(*(rank["recu"] for rank in ranks))  # but a stage begins alike on both


def test_batch_norms_over_all_processes_stay_as_they_are(ranks: list[dict[str, Any]]) -> None:
    texts = [text for rank in ranks for text in rank["lean"]["synchronized"]]
    assert all("expected input tensor to be on GPU" in text for text in texts)


@pytest.mark.parametrize("scheme", FREED, ids=str)
def test_lean_layers_whose_parameters_are_sharded(scheme: Scheme, ranks: list[dict[str, Any]]) -> None:
    """A batch norm needs the weights of the layer before it: those that are freed by then would be read no more."""
    for rank in ranks:
        together, lean, apart, refused = rank["lean"]["sharded"][scheme.name]
        assert_equal(lean, together)
        assert_equal(apart, together)
        assert "(32, 32, 3, 3) of a layer before it was freed; pass modules that" in refused
