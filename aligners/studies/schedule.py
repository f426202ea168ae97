"""Runs the cells of a study: each once the cells that it needs are done, as many at a time as there are workers."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from graphlib import TopologicalSorter

from aligners.files.atomic import remove, write_text
from aligners.progress import Progress
from aligners.studies.cells import KINDS, Cell
from aligners.studies.study_folder import ERROR, RESULT, StudyFolder

ATTEMPTS = 2  # of a cell whose worker was lost, without getting any further
PAUSE = 2.0  # seconds between two looks at cells that others are making


def missing(folder: StudyFolder, cells: Sequence[Cell]) -> dict[str, Cell]:
    """Return the cells to run: those not done, and those whose output is gone although another of them needs it."""
    to_run: set[str] = set()
    needed: set[str] = set()
    for cell in reversed(cells):  # each before those that it needs
        gone = cell.id in needed and not folder.leaves(cell)
        if gone or folder.state(cell.id) != "done":
            to_run.add(cell.id)
            needed.update(cell.needs)
    return {cell.id: cell for cell in cells if cell.id in to_run}


class Pace:
    """The time that cells of each kind take, as measured on those that are done."""

    def __init__(self) -> None:
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def add(self, kind: str, seconds: float | None) -> None:
        """Take into account what a cell took, where that is known."""
        if seconds is not None:
            self._seconds[kind].append(seconds)

    def left(self, kinds: Iterable[str], workers: int) -> str:
        """Return the remaining time for cells of these kinds, so many at a time; empty until all are measured."""
        total = 0.0
        for kind, number in Counter(kinds).items():
            if not self._seconds[kind]:
                return ""
            total += number * sum(self._seconds[kind]) / len(self._seconds[kind])
        return f"about {duration(total / max(1, workers))} left"


def duration(seconds: float) -> str:
    """Write a time in a suitable unit."""
    for name, length in (("days", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.1f} {name}"
    return f"{seconds:.1f} s"


class Schedule:
    """The cells that are to run.

    Args:
        folder: folder of the study.
        cells: cells of the study, each after those that it needs.
        run_cell: runs one of them, in whatever process: from the study's folder and the cell's id to how it ended:
            `done`, `failed` or `busy`.
        say: shows a line.
    """

    def __init__(
        self,
        folder: StudyFolder,
        cells: Sequence[Cell],
        run_cell: Callable[[str, str], str],
        say: Callable[[str], None],
    ) -> None:
        self.folder = folder
        self.run_cell = run_cell
        self.say = say
        self.todo = missing(folder, cells)
        self.pace = Pace()
        self._fits: dict[str, str] = {}  # cell -> its maps, below its folder
        for cell in cells:
            if cell.kind in ("fit", "fit_pairs"):
                self._fits[cell.id] = KINDS[cell.kind].leaves
            if cell.id not in self.todo:
                self.pace.add(cell.kind, folder.took(cell.id))
        self._before = len(cells) - len(self.todo)
        self._ended: dict[str, str] = {}  # cell -> `done` or `failed`

    def run(self, executor: Executor, workers: int, *, again: bool = False) -> None:
        """Run them.

        Args:
            executor: runs each cell.
            workers: cells at a time.
            again: whether those that failed before are run, too, and what needs them.
        """
        self._workers = workers
        self._prepare(again)
        try:
            self._offer()
            while self._ready or self._running or self._elsewhere:
                self._start_cells(executor)
                self._wait()
        finally:
            self._shown.end()

    def _prepare(self, again: bool) -> None:
        """Begin with no cell running."""
        self._ready: list[str] = []
        self._running: dict[Future[str], str] = {}
        self._elsewhere: set[str] = set()
        self._failed: set[str] = set()  # before this run
        self._lost: Counter[str] = Counter()
        # How far each cell was as its last attempt began.
        self._reached: dict[str, object] = {}
        needs = {}
        for number, cell in self.todo.items():
            needs[number] = [need for need in cell.needs if need in self.todo]
            if not again and self.folder.state(number) == "failed":
                self._failed.add(number)
        self._order = TopologicalSorter(needs)
        self._order.prepare()
        self._shown = Progress("", self._before + len(self.todo), self._before)

    def _offer(self) -> None:
        """Make those cells ready whose needs are all done."""
        for number in self._order.get_ready():
            if number in self._failed:
                continue
            if self.todo[number].needs:  # first: it may free the disk of what it needs
                self._ready.insert(0, number)
            else:
                self._ready.append(number)

    def _start_cells(self, executor: Executor) -> None:
        """Start as many cells as there are free workers."""
        place = str(self.folder.path.resolve())
        while self._ready and len(self._running) < self._workers:
            number = self._ready.pop(0)
            if self._begins(number):
                future = executor.submit(self.run_cell, place, number)
                self._running[future] = number

    def _begins(self, number: str) -> bool:
        """Prepare a cell for an attempt; return False if another process has it or has done it."""
        if self.folder.state(number) == "running":
            self._leave(number)
            return False
        if self.folder.leaves(self.todo[number]):  # done by an earlier command's job
            self._elsewhere.add(number)
            return False
        folder = self.folder.cell(number)
        (folder / RESULT).unlink(missing_ok=True)  # done, but what it left is gone
        (folder / ERROR).unlink(missing_ok=True)
        self._reached[number] = self.folder.reached(number)
        return True

    def _wait(self) -> None:
        """Wait until a cell has ended, or for a moment, and check the cells of other processes."""
        if self._running:
            pause = PAUSE if self._elsewhere else None
            ended = wait(self._running, pause, return_when=FIRST_COMPLETED).done
            for future in ended:
                self._finish(future)
        elif self._elsewhere:
            time.sleep(PAUSE)
        for number in sorted(self._elsewhere):
            state = self.folder.state(number)
            if state == "running":
                continue
            self._elsewhere.remove(number)
            if state == "waiting":  # whoever made it was killed
                self._ready.append(number)
            else:
                self._end(number, state, "by another process")

    def _finish(self, future: Future[str]) -> None:
        number = self._running.pop(future)
        error = future.exception()
        state: str | None
        if error is None:
            state = future.result()
        else:  # it may have ended before its worker was lost
            state = self.folder.ended(number)
        if state == "busy":
            self._leave(number)
        elif state is not None:
            self._end(number, state)
        else:
            self._lose(number, error)

    def _lose(self, number: str, error: BaseException | None) -> None:
        """Run a cell again whose worker was lost, as long as it makes progress."""
        further = self.folder.reached(number) != self._reached[number]
        self._lost[number] = 0 if further else self._lost[number] + 1
        if self._lost[number] < ATTEMPTS:
            again = "goes on from where it was" if further else "is run once more"
            self.say(
                f"The worker of {self.todo[number].said()} was lost ({error!r}). It {again}."
            )
            self._ready.append(number)
            return
        lost = f"Its worker was lost {ATTEMPTS} times before it got any further: was it killed, or out of memory?"
        write_text(self.folder.cell(number) / ERROR, f"{lost}\n{error!r}\n")
        self._end(number, "failed")

    def _leave(self, number: str) -> None:
        """Leave a cell to the process that has locked it, such as a job that an earlier command has submitted."""
        self._elsewhere.add(number)
        self.say(
            f"Waiting for another process that is making {self.todo[number].said()}."
        )

    def _end(self, number: str, state: str, by: str = "") -> None:
        cell = self.todo[number]
        self._ended[number] = state
        said = by or state
        if state == "done":
            seconds = self.folder.took(number)
            self.pace.add(cell.kind, seconds)
            if not by and seconds is not None:
                said = f"{seconds:.0f} s"
            self._order.done(number)
            self._offer()
            self.forget()
        aloud = state != "done" or by != ""
        self._show(f"{cell.said()}: {said}", aloud)

    def _show(self, said: str, aloud: bool) -> None:
        """Show how a cell ended, on a separate line if `aloud`, and the progress of the study."""
        count = self._before + len(self._ended)
        line = f"[{count}/{self._shown.total}] {said}"
        if aloud:
            self.say(line)
        first_or_last = len(self._ended) in (1, len(self.todo))
        self._shown.show(
            count,
            lambda: f"{line}; {self.words()}",
            beside=self.words,
            at_once=first_or_last and not aloud,
        )

    def words(self) -> str:
        """Return how many cells are running, failed and waiting, and the remaining time."""
        failed = set(self._failed)
        rest = []
        for number, cell in self.todo.items():
            if self._ended.get(number) == "failed":
                failed.add(number)
            elif number not in self._ended and number not in failed:
                rest.append(cell.kind)
        running = len(self._running)
        said = f"{running} running or queued, {len(failed)} failed, {len(rest) - running} waiting"
        return "; ".join(filter(None, [said, self.pace.left(rest, self._workers)]))

    def forget(self) -> None:
        """Remove the maps that no cell needs any more, if the study only keeps results."""
        if self.folder.study["keep"] != "results":
            return
        needed: set[str] = set()
        for cell in self.todo.values():
            if self._ended.get(cell.id) != "done":
                needed.update((cell.id, *cell.needs))
        for number in self._fits.keys() - needed:
            remove(self.folder.cell(number) / self._fits.pop(number))
