"""The signals that end a run: SIGTERM of schedulers and Ctrl-C are noted, and answered at the next checkpoint."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

from pytorch_lightning import Trainer
from pytorch_lightning.utilities.exceptions import SIGTERMException

Handler = Callable[[int, FrameType | None], Any] | int | None
HEARD = "\nCtrl-C: the run ends after this step or validation, and writes last.ckpt. Press it again to end at once.\n"


class Termination:
    """Replaces the process's handlers of SIGTERM and SIGINT for a while, only in the main thread, as Python requires.

    Lightning's own handlers end a run in the middle of a validation, or only one process. A second Ctrl-C ends it at
    once. A SIGINT that the process was started to ignore, as a shell's background job, stays ignored.
    """

    def __init__(self) -> None:
        self.noticed: int | None = None
        self._is_first = True
        self._before: dict[int, Handler] = {}

    def notice(self, trainer: Trainer) -> None:
        """Make both signals wait for `end_if_asked` from now on."""
        self.noticed = signal.SIGTERM if trainer.received_sigterm else None
        self._is_first = trainer.is_global_zero
        self._take(self._note, self._note_ctrl_c)

    def end_at_once(self) -> None:
        """Make both signals raise their exceptions at once from now on."""
        self._take(self._raise, signal.default_int_handler)

    def give_back(self) -> None:
        """Restore the former handlers; calling it again does nothing."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def asked(self, trainer: Trainer) -> bool:
        """Whether any process was told to stop: all of them stop together, or the others would wait for it."""
        return trainer.strategy.reduce_boolean_decision(self.noticed is not None, all=False)

    def end(self, trainer: Trainer) -> NoReturn:
        """Raise KeyboardInterrupt if any process had a SIGINT, else SIGTERMException: in all, which were `asked`."""
        if trainer.strategy.reduce_boolean_decision(self.noticed == signal.SIGINT, all=False):
            raise KeyboardInterrupt
        raise SIGTERMException

    def _take(self, of_term: Handler, of_int: Handler) -> None:
        if threading.current_thread() is threading.main_thread():
            self.give_back()
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, of_term)
            if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
                self._before[signal.SIGINT] = signal.signal(signal.SIGINT, of_int)

    def _note(self, *_: object) -> None:
        self.noticed = signal.SIGTERM

    def _note_ctrl_c(self, *_: object) -> None:
        self.noticed = signal.SIGINT
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self._is_first:
            os.write(2, HEARD.encode())  # a handler may interrupt a write to sys.stderr

    def _raise(self, *_: object) -> None:
        raise SIGTERMException
