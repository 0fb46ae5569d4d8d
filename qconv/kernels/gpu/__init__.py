"""Triton kernels of the operators for NVIDIA GPUs: registered here, compiled at first use.

`by_triton` makes what the dispatcher calls for CUDA tensors. A kernel takes the arguments of its operator and returns
None for what it leaves to the definition. Triton comes with torch on Linux and takes as long to import as all of qconv,
so nothing imports it before a tensor on a GPU is there.

Bits, codes, sums of signs and the elements of a pass are those of the definitions bit for bit, but for the sign of a
zero and the bits of a NaN. No gradient of a convolution is here: `sign_grad_input` and `sign_grad_weight` unpack the
signs into the dtype of the gradient and call cuDNN, by their definitions.

The kernels have run on an NVIDIA H200, but for `pointwise` and the present `round_values` and `step_backward`. All run
in Triton's interpreter (``TRITON_INTERPRET=1``), and compile for compute capabilities 8.0 and 9.0.
"""

import logging
import os
import shutil
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_OLDEST = (8, 0)
"""The compute capability from which on Triton multiplies 8-bit integers by tensor cores."""


def by_triton(name: str, definition: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator for CUDA tensors: the kernel ``name``, as "bits.pack_signs", or else the definition.

    The first argument is a tensor.
    """
    module, _, function = name.partition(".")

    def run(first: Tensor, *others: Any) -> Any:
        index = first.device.index or 0
        if not has_kernels(index):
            return definition(first, *others)
        kernel = getattr(import_module(f"{__name__}.{module}"), function)
        with torch.cuda.device(index):  # Triton launches on the current one
            found = kernel(first, *others)
        return definition(first, *others) if found is None else found

    return run


def has_kernels(index: int) -> bool:
    """Whether Triton kernels run the operators on the GPU with this number."""
    return _has_triton() and _is_supported(index)


@cache
def _has_triton() -> bool:
    """Whether kernels can be compiled; warns once if only a C compiler is missing."""
    if torch.version.hip is not None or find_spec("triton") is None:
        return False
    if os.environ.get("CC") or any(map(shutil.which, ("gcc", "clang"))):
        return True
    logging.getLogger("qconv").warning(
        "Triton needs a C compiler (gcc or clang) to launch qconv's kernels: on the GPU, operators run by their "
        "definitions, which are exact, but slow."
    )
    return False


@cache
def _is_supported(index: int) -> bool:
    return torch.cuda.get_device_capability(index) >= _OLDEST
