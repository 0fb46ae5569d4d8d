"""torch's defaults while models are converted for shipping: float32 on the CPU, and no tensors of inference mode."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

_CPU = torch.device("cpu")


@contextmanager
def of_shipping() -> Iterator[None]:
    """Context manager: new tensors are float32 on the CPU, whatever torch's defaults are; none has a gradient."""
    before = torch.get_default_dtype()
    if before != torch.float32:  # the dtype is that of all threads
        torch.set_default_dtype(torch.float32)
    try:
        # As a context, a device is asked at each call of torch: only where it isn't the default.
        device = nullcontext() if torch.get_default_device() == _CPU else _CPU
        with device, torch.inference_mode(mode=False), torch.no_grad():
            yield
    finally:
        if before != torch.float32:
            torch.set_default_dtype(before)
