"""Runs the cells of a study: each once those that it needs are done, as many at a time as there are workers."""

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from graphlib import TopologicalSorter
from statistics import mean

from aligners.files.whole import remove, write_text
from aligners.studies.cells import KINDS, Cell
from aligners.studies.folder import ERROR, RESULT, StudyFolder

ATTEMPTS = 2  # of a cell whose worker was lost, without getting any further
PAUSE = 2.0  # seconds between two looks at cells that others are making


def missing(folder: StudyFolder, cells: Sequence[Cell]) -> dict[str, Cell]:
    """The cells to run: those that are not done, and those that left something which one of them needs and is gone."""
    known = {cell.id: cell for cell in cells}
    to_run = {cell.id: cell for cell in cells if folder.state(cell.id) != "done"}
    ahead = deque(to_run.values())
    while ahead:
        for need in ahead.popleft().needs:
            if need not in to_run and not folder.leaves(known[need]):
                to_run[need] = known[need]
                ahead.append(known[need])
    return {number: to_run[number] for number in known if number in to_run}


class Schedule:
    """The cells that are to run.

    Args:
        folder: of the study.
        cells: of the study, each after those that it needs.
        run_cell: runs one, in whatever process: from the study's folder and the cell's id to `done`, `failed`, `busy`.
        say: shows a line.
    """

    def __init__(
        self,
        folder: StudyFolder,
        cells: Sequence[Cell],
        run_cell: Callable[[str, str], str],
        say: Callable[[str], None],
    ) -> None:
        self.folder, self.run_cell, self.say = folder, run_cell, say
        self.todo = missing(folder, cells)
        self._fits = {cell.id: KINDS[cell.kind].leaves for cell in cells if cell.kind in ("fit", "fit_pairs")}
        self._done: set[str] = set()
        self.ended: Counter[str] = Counter()  # by kind
        self.seconds: dict[str, list[float]] = {}
        self._lost: Counter[str] = Counter()
        self._reached: dict[str, object] = {}  # how far each cell was as its last attempt began
        self._ready: deque[str] = deque()
        self._running: dict[Future[str], tuple[str, float]] = {}
        self._elsewhere: set[str] = set()

    def run(self, executor: Executor, workers: int, *, again: bool = False) -> None:
        """Run them.

        Args:
            executor: runs each cell.
            workers: cells at a time.
            again: whether those that failed before are run, too, and what needs them.
        """
        failed = {number for number in self.todo if not again and self.folder.state(number) == "failed"}
        needs = {number: [n for n in cell.needs if n in self.todo] for number, cell in self.todo.items()}
        self._order = TopologicalSorter(needs)
        self._order.prepare()
        self._workers = workers
        while True:
            for number in self._order.get_ready():
                if number not in failed:  # what goes on from something comes first: it may free its disk
                    (self._ready.appendleft if needs[number] else self._ready.append)(number)
            while self._ready and len(self._running) < workers:
                self._submit(executor, self._ready.popleft())
            if not self._running and not self._elsewhere:
                return
            self._wait()

    def _wait(self) -> None:
        """Wait until a cell is finished, or a little, and look at those that others are making."""
        if self._running:
            pause = PAUSE if self._elsewhere else None
            for future in wait(self._running, pause, return_when=FIRST_COMPLETED).done:
                self._finish(future)
        else:
            time.sleep(PAUSE)
        for number in sorted(self._elsewhere):
            state = self.folder.state(number)
            if state != "running":
                self._elsewhere.remove(number)
                if state == "waiting":  # whoever made it was killed
                    self._ready.append(number)
                else:
                    self._end(number, state)

    def _submit(self, executor: Executor, number: str) -> None:
        if self.folder.state(number) == "running":
            self._leave(number)
        elif self.folder.leaves(self.todo[number]):  # done by a job that an earlier command submitted, meanwhile
            self._elsewhere.add(number)
        else:
            (self.folder.cell(number) / RESULT).unlink(missing_ok=True)  # done, but what it left is gone
            self._reached[number] = self.folder.reached(number)
            future = executor.submit(self.run_cell, str(self.folder.path.resolve()), number)
            self._running[future] = (number, time.monotonic())

    def _finish(self, future: Future[str]) -> None:
        number, began = self._running.pop(future)
        cell, seconds, error = self.todo[number], time.monotonic() - began, future.exception()
        if error is not None:
            further = self.folder.reached(number) != self._reached[number]
            self._lost[number] = 0 if further else self._lost[number] + 1
            if self._lost[number] < ATTEMPTS:
                again = "goes on from where it was" if further else "is run once more"
                self.say(f"The worker of {cell.said()} was lost ({error!r}). It {again}.")
                self._ready.append(number)
                return
            lost = f"Its worker was lost {ATTEMPTS} times before it got any further: was it killed, or out of memory?"
            write_text(self.folder.cell(number) / ERROR, f"{lost}\n{error!r}\n")
        state = "failed" if error is not None else future.result()
        if state == "busy":
            self._leave(number)
            return
        if state == "done":
            self.seconds.setdefault(cell.kind, []).append(seconds)
        self._end(number, state, f"{seconds:.0f} s")

    def _leave(self, number: str) -> None:
        """Leave a cell to the process that has locked it, such as a job that an earlier command has submitted."""
        self._elsewhere.add(number)
        self.say(f"Waiting for another process that is making {self.todo[number].said()}.")

    def _end(self, number: str, state: str, time_taken: str = "by another process") -> None:
        cell = self.todo[number]
        self.ended[cell.kind] += 1
        if state == "done":
            self._order.done(number)
            self._done.add(number)
            self.forget()
        left = self.left()
        about = f"; about {left / 60:.0f} min left" if left is not None and left > 60 else ""
        words = time_taken if state == "done" else state
        self.say(f"[{self.ended.total()}/{len(self.todo)}] {cell.said()}: {words}{about}")

    def left(self) -> float | None:
        """Seconds that the rest will take, if its cells take as long as those of their kinds so far; None: unknown."""
        rest = Counter(cell.kind for cell in self.todo.values()) - self.ended
        if not rest.keys() <= self.seconds.keys():
            return None
        return sum(count * mean(self.seconds[kind]) for kind, count in rest.items()) / self._workers

    def forget(self) -> None:
        """Remove the maps that no cell needs any more, if the study keeps results alone."""
        if self.folder.study["keep"] == "results":
            left = [cell for cell in self.todo.values() if cell.id not in self._done]
            needed = {number for cell in left for number in (cell.id, *cell.needs)}
            for number in self._fits.keys() - needed:
                remove(self.folder.cell(number) / self._fits.pop(number))
