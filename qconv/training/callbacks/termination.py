"""SIGTERM, with which schedulers announce that they will stop a run: noted, and answered at the next checkpoint."""

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.utilities.exceptions import SIGTERMException

Handler = Callable[[int, FrameType | None], Any] | int | None


class Termination:
    """Replaces the process's handler of SIGTERM for a while, only in the main thread, as Python requires.

    Lightning's own handler ends a run in the middle of a validation, or only one process.
    """

    def __init__(self) -> None:
        self.noticed = False
        self._taken = False
        self._before: Handler = None

    def notice(self, trainer: Trainer) -> None:
        """Make SIGTERM wait for `asked` from now on."""
        self.noticed = trainer.received_sigterm
        self._take(self._note)

    def end_at_once(self) -> None:
        """Make SIGTERM raise a SIGTERMException at once from now on."""
        self._take(self._raise)

    def give_back(self) -> None:
        """Restore the former handler; calling it again does nothing."""
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
