"""Ctrl-C and SIGTERM during training: noted at once, obeyed where the state of the run is whole."""

import os
import signal
import threading
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import SIGTERMException

NOTICE = b"\nStopping after this batch, to save what has been reached. Again: stop at once, without saving.\n"


class Interruption:
    """Holds Ctrl-C and SIGTERM back until the run is between two steps.

    An exception that is raised wherever the signal arrives can cut an optimiser's step in two, separate it from its
    learning rate, or come between a validation and what is kept of it. Such a run cannot be resumed exactly.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._received: int | None = None
        self._holding = False

    def hold(self) -> None:
        """From now on, only note the signals. A second one ends the process. Only in the main thread."""
        if threading.current_thread() is threading.main_thread():
            if not self._holding:
                self._received = None
                self._holding = True
            for signum in (signal.SIGINT, signal.SIGTERM):
                before = signal.signal(signum, self._note)
                if before != self._note:
                    self._before.setdefault(signum, before)

    def release(self) -> None:
        """Handle the signals as before, and raise if one was held back."""
        self.end()
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}
        self._raise(self._received)

    def end(self) -> None:
        """Hold nothing back any more, even where the Trainer sets this handler again as it ends."""
        self._holding = False

    def check(self, trainer: pl.Trainer) -> None:
        """Raise if a signal was held back, on all ranks at the same batch.

        Raises:
            KeyboardInterrupt: it was Ctrl-C.
            SIGTERMException: it was SIGTERM.
        """
        if trainer.world_size == 1:
            self._raise(self._received)
        elif trainer.strategy.reduce_boolean_decision(
            self._received is not None, all=False
        ):
            self._raise(self._received or signal.SIGINT)

    def _note(self, number: int, _: Any) -> None:
        if self._received is not None or not self._holding:
            signal.signal(
                number, signal.SIG_DFL if self._holding else self._before[number]
            )
            os.kill(os.getpid(), number)
            return
        self._received = number
        if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
            os.write(2, NOTICE)  # `print` may be what was interrupted

    def _raise(self, number: int | None) -> None:
        if number == signal.SIGTERM:
            raise SIGTERMException(128 + signal.SIGTERM)
        if number is not None:
            raise KeyboardInterrupt
