"""SIGTERM, by which schedulers announce that they stop a run: noticed, and answered where a checkpoint stands."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.utilities.exceptions import SIGTERMException

Handler = Callable[[int, FrameType | None], Any] | int | None


class Termination:
    """Holds the process's handler of SIGTERM for a while, in the main thread alone, as Python has it.

    Lightning's own ends in the middle of a validation, or of one process alone.
    """

    def __init__(self) -> None:
        self.noticed = False
        self._taken = False
        self._before: Handler = None

    def notice(self, trainer: Trainer) -> None:
        """From here on a SIGTERM waits for `asked`."""
        self.noticed = trainer.received_sigterm
        self._take(self._note)

    def end_at_once(self) -> None:
        """From here on a SIGTERM raises a SIGTERMException wherever the program is."""
        self._take(self._raise)

    def give_back(self) -> None:
        """Put the handler back that was there before; a second time nothing happens."""
        if self._taken:
            signal.signal(signal.SIGTERM, self._before)
            self._taken = False

    def asked(self, trainer: Trainer) -> bool:
        """Whether any process was told to stop: all of them stop together, or the others would wait for it."""
        return trainer.strategy.reduce_boolean_decision(self.noticed, all=False)

    def _take(self, handler: Handler) -> None:
        if threading.current_thread() is threading.main_thread():
            self.give_back()
            self._before = signal.signal(signal.SIGTERM, handler)
            self._taken = True

    def _note(self, *_: object) -> None:
        self.noticed = True

    def _raise(self, *_: object) -> None:
        raise SIGTERMException
