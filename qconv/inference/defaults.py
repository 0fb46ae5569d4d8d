"""torch's defaults for what shipped forms of a model make: float32 on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def of_shipping() -> Iterator[None]:
    """Context manager: new tensors are float32 and on the CPU, whatever the user has set as torch's defaults."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(before)
