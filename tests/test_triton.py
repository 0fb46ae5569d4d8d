"""The Triton kernels: on a GPU if there is one, else in Triton's interpreter, in a process that imports it so."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import torch
import triton_cases

pytest.importorskip("triton")
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
    ("name", "seed"), [(name, seed) for name, (_, count) in triton_cases.SEEDED.items() for seed in range(count)]
)
def test_a_kernel_gives_what_its_definition_says(name: str, seed: int, place: str, run: Run) -> None:
    run(triton_cases.SEEDED[name][0], seed)


@pytest.mark.parametrize("place", [PLACE])
@pytest.mark.parametrize("case", triton_cases.ALONE, ids=lambda case: case.__name__.removeprefix("check_"))
def test_kernels(case: Any, place: str, run: Run) -> None:
    run(case)


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_without_a_gpu(capability: int, compiler: ProcessPoolExecutor) -> None:
    compiler.submit(triton_cases.check_it_compiles, capability).result()
