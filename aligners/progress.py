"""How far something is: a bar in a terminal; a line now and then in a file, or in the log of a terminal."""

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from operator import length_hint
from typing import Any, TypeVar

import rich
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from aligners.errors import visible

EVERY = 30.0  # seconds between two lines
COLUMNS = (
    TextColumn("{task.description}", markup=False),
    BarColumn(),
    MofNCompleteColumn(),
    TimeRemainingColumn(),
)
T = TypeVar("T")


class Progress:
    """Shows how far something is: by a bar, or by a line at its beginning and at most every 30 seconds.

    Args:
        what: is done: `Training`; empty where `show` is given all lines, with the time that is left.
        total: steps; infinite where it is not known.
        begin: steps that were done before.
    """

    def __init__(self, what: str, total: float, begin: int = 0) -> None:
        self.what = what
        self.total = total
        self.done = begin
        self._begin = begin
        self._began = self._said = self._now = time.monotonic()
        self._bar: Bar | None = None
        console = rich.get_console()
        if console.is_terminal or console.is_jupyter:  # where the output goes
            columns = COLUMNS if what else COLUMNS[:-1]
            steps = total if math.isfinite(total) else None
            self._bar = Bar(*columns, console=console, transient=True)
            self._bar.add_task(what, total=steps, completed=begin)
            self._bar.start()
        if what:
            self._say(f"{what}: {total:,.0f} steps.")

    def step(self, words: Callable[[], str] = str) -> None:
        """Count a step, and say how far it is if the last line is old enough.

        Args:
            words: returns what is said besides; called only if something is said.
        """
        self.show(self.done + 1, lambda: self._line(words()))

    def show(
        self,
        done: int,
        line: Callable[[], str],
        *,
        beside: Callable[[], str] | None = None,
        at_once: bool = False,
    ) -> None:
        """Show that so many steps are done, and say a line if the last one is old enough.

        Args:
            done: steps.
            line: returns the line; called only if it is said.
            beside: returns what stands beside the bar from now on; default: what stands there.
            at_once: whether it is said however old the last one is.
        """
        self.done, self._now = done, time.monotonic()
        if self._bar is not None:
            self._bar.update(
                self._bar.task_ids[0], completed=done, description=beside and beside()
            )
        if at_once or self._now - self._said >= EVERY:
            self._said = self._now
            self._say(line())

    def _line(self, words: str) -> str:
        a_step = (self._now - self._began) / (self.done - self._begin)
        left = a_step * (self.total - self.done) / 60
        return f"{self.what}: step {self.done:,} of {self.total:,.0f}{words}, about {left:.1f} min left"

    def end(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()

    def _say(self, words: str) -> None:
        """Write a line to the file that the output goes to, or to the log beside a terminal, if there is one."""
        if self._bar is None:
            tell(words)
        elif hasattr(sys.stdout, "log"):
            sys.stdout.log(f"{visible(words)}\n")


def tell(*lines: str) -> None:
    """Print lines at once, with their control characters spelt out."""
    print(visible("\n".join(lines)), flush=True)


def hidden(trainer: Any) -> bool:
    """Whether a process shows no progress: a further rank of a run, or one without a Trainer that has a bar."""
    return (
        trainer is None
        or not trainer.is_global_zero
        or trainer.progress_bar_callback is None
    )


def track(
    each: Iterable[T], what: str, total: float | None = None, *, disable: bool = False
) -> Iterator[T]:
    """Yield each, and show how far it is; see `Progress`."""
    shown = None
    if not disable:
        shown = Progress(what, length_hint(each) if total is None else total)
    try:
        for one in each:
            yield one
            if shown is not None:
                shown.step()
    finally:
        if shown is not None:
            shown.end()
