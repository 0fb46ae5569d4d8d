"""The base of quantizers that start from statistics of the data."""

from typing import Generic, TypeVar, cast

import torch
from torch import Tensor

from .base import Quantizer
from .observers import Observer

Figures = TypeVar("Figures", bound=Observer)


class FromData(Quantizer, Generic[Figures]):
    """Base of input quantizers that start from statistics of the data, such as its mean magnitude or its range.

    A subclass creates the observer (`new_observer`) and sets its learned tensors from it (`start`), so any number of
    batches needs the memory of one.
    """

    def new_observer(self) -> Figures:
        """Return a new observer that collects what `start` needs."""
        raise NotImplementedError(f"{type(self).__name__} defines no new_observer()")

    def start(self, observer: Figures) -> bool:
        """Set the learned tensors from ``observer``; return whether it has a range.

        It is never called with an observer whose values were all equal. If it returns False it leaves the tensors
        alone.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no start()")

    def initialize(self, x: Tensor) -> None:
        observer = self.new_observer()
        observer.observe(x)
        self._start(observer)

    def observer(self) -> Observer:
        # A subclass with its own `initialize` may look at anything.
        return self.new_observer() if type(self).initialize is FromData.initialize else super().observer()

    def initialize_from(self, observer: Observer) -> None:
        if type(self).initialize is FromData.initialize:
            self._start(cast(Figures, observer))
        else:
            super().initialize_from(observer)

    @torch.no_grad()
    def _start(self, observer: Figures) -> None:
        if not observer.is_blank and self.start(observer):
            self.calibrated = True
