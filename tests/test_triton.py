"""The Triton kernels: on a GPU if there is one, else in Triton's interpreter, in a process that imports it so."""

import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from settings import mostly_nightly

from qconv.kernels import gpu

pytest.importorskip("triton")
import triton_cases  # imports it

Run = Callable[..., None]
PLACE = pytest.param("cuda", marks=pytest.mark.cuda) if torch.cuda.is_available() else "interpreter"


def another_process(**environment: str) -> Iterator[ProcessPoolExecutor]:
    """One that starts with these variables."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            pool.submit(os.getpid).result()
        yield pool


@pytest.fixture(scope="session")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    yield from another_process(TRITON_INTERPRET="1")


@pytest.fixture(scope="session")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    yield from another_process(TRITON_CACHE_DIR=str(tmp_path_factory.mktemp("triton")), TRITON_INTERPRET="0")


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a case on the place that the test is for."""
    if request.node.callspec.params["place"] == "cuda":
        return lambda case, *arguments: case(*arguments, "cuda")
    pool: ProcessPoolExecutor = request.getfixturevalue("interpreter")
    return lambda case, *arguments: pool.submit(case, *arguments, "cpu").result()


@pytest.mark.parametrize("place", [PLACE])
@pytest.mark.parametrize(
    ("name", "seed"),
    mostly_nightly(
        [(name, seed) for name, (_, count) in triton_cases.SEEDED.items() for seed in range(count)],
        [(name, 0) for name in triton_cases.SEEDED],
    ),
)
def test_a_kernel_gives_what_its_definition_says(name: str, seed: int, place: str, run: Run) -> None:
    run(triton_cases.SEEDED[name][0], seed)


@pytest.mark.parametrize("place", [PLACE])
@pytest.mark.parametrize("case", triton_cases.ALONE, ids=lambda case: case.__name__.removeprefix("check_"))
def test_kernels(case: Any, place: str, run: Run) -> None:
    run(case)


@pytest.mark.parametrize("has_triton", [True, False], ids=["kernels", "definitions"])
def test_no_operator_waits_for_a_gpu(has_triton: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "_has_triton", lambda: has_triton)
    ops = torch.ops.qconv
    x, weight = torch.randn(2, 70, 6, 6, device=device), torch.randn(8, 70, 3, 3, device=device)
    geometry = (1, 1), (1, 1, 1, 1), (1, 1)
    step, of_channels = torch.ones((), device=device), torch.ones(3, 70, device=device)

    def call_all() -> tuple[torch.Tensor, ...]:
        signs, passes, _ = ops.pack_signs_and_passes(x, -1.0, 1.0)
        bits, sums = ops.pack_weight(weight)
        output = ops.binary_conv2d(signs, bits, sums, 70, 8, *geometry, 0).float()
        grads = (
            ops.sign_grad_input(output, bits, None, 70, (6, 6), *geometry, passes),
            ops.sign_grad_weight(output, signs, 70, (3, 3), *geometry, 1, 0),
        )
        ops.approx_sign_backward_(grads[0], x)
        over = output.clone()
        others = ops.norm_backward_(output, over, None, *torch.ones(2, 8, device=device))
        codes = ops.unpack_codes(ops.pack_codes(x.relu(), 4), 70, 4, torch.float32, True)
        return (
            *grads,
            over,
            *others,
            codes,
            *ops.clamp_and_pack(x, 0.0, None),
            *ops.round_codes(x, step, 0.0, 15.0, 1.0, 0),
            *ops.step_backward(x, x, step, 0, 15, False, 1.0, 1e-6),
            ops.round_values(x, step, 0.0, 15.0, 1.0, 0.0),
            ops.round_range(x, -step, step, 8),
            ops.rprelu(x, *of_channels),
            *ops.rprelu_backward(x, x, *of_channels[:2]),
            ops.unpack_signs(signs, 70, 1, x.dtype, False),
            ops.sign(x),
            ops.pass_between(x, x, -step, step),
            ops.round_power_of_two(x, -7, 0),
        )

    first = call_all()  # compiles
    if device == "cuda":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is a prototype
            torch.cuda.set_sync_debug_mode("error")
    try:
        again = call_all()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, first, again))


@pytest.mark.nightly
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_without_a_gpu(capability: int, compiler: ProcessPoolExecutor) -> None:
    compiler.submit(triton_cases.check_it_compiles, capability).result()
