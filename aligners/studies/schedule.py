"""Runs the cells of a study: each once those that it needs are done, as many at a time as there are workers."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from graphlib import TopologicalSorter

from aligners.files.atomic import remove, write_text
from aligners.progress import Progress
from aligners.studies.cells import KINDS, Cell
from aligners.studies.study_folder import ERROR, RESULT, StudyFolder
from aligners.studies.study_plan import Pace, duration

ATTEMPTS = 2  # of a cell whose worker was lost, without getting any further
PAUSE = 2.0  # seconds between two looks at cells that others are making


def missing(folder: StudyFolder, cells: Sequence[Cell]) -> dict[str, Cell]:
    """The cells to run: those that are not done, and those that left something which one of them needs and is gone."""
    to_run, needed = set[str](), set[str]()
    for cell in reversed(cells):  # each before those that it needs
        if folder.state(cell.id) != "done" or (cell.id in needed and not folder.leaves(cell)):
            to_run.add(cell.id)
            needed.update(cell.needs)
    return {cell.id: cell for cell in cells if cell.id in to_run}


class Schedule:
    """The cells that are to run.

    Args:
        folder: of the study.
        cells: of the study, each after those that it needs.
        run_cells: runs some of them one after another, in whatever process: from the study's folder and the cells' ids
            to how each has ended: `done`, `failed`, `busy`, or `waiting` if what it needs was not done.
        say: shows a line.
        planned: seconds that each cell is to take, by its id.
        minutes_a_job: cells run one after another in a job, as many as are expected to take so long.
    """

    def __init__(
        self,
        folder: StudyFolder,
        cells: Sequence[Cell],
        run_cells: Callable[[str, Sequence[str]], Mapping[str, str]],
        say: Callable[[str], None],
        planned: Mapping[str, float] | None = None,
        minutes_a_job: float = 0.0,
    ) -> None:
        self.folder, self.run_cells, self.say, self.minutes_a_job = (
            folder,
            run_cells,
            say,
            minutes_a_job,
        )
        self.todo = missing(folder, cells)
        self._fits = {
            cell.id: KINDS[cell.kind].leaves for cell in cells if cell.kind in ("fit", "fit_pairs")
        }
        self._before = len(cells) - len(self.todo)
        self._ended: dict[str, str] = {}  # how each has ended: `done` or `failed`
        self._lost: Counter[str] = Counter()
        self._reached: dict[str, object] = {}  # how far each cell was as its last attempt began
        self._ready: list[str] = []
        self._offered: set[str] = set()  # those that were ready at some time
        self._running: dict[
            Future[Mapping[str, str]], list[str]
        ] = {}  # jobs, each with its cells that have not ended
        self._elsewhere: set[str] = set()
        self.pace = Pace(planned or {})
        for cell in cells:
            if cell.id not in self.todo:
                self.pace.add(cell, folder.took(cell.id))

    def run(self, executor: Executor, workers: int, *, again: bool = False) -> None:
        """Run them.

        Args:
            executor: runs each job.
            workers: jobs at a time.
            again: whether those that failed before are run, too, and what needs them.
        """
        self._failed = {
            number for number in self.todo if not again and self.folder.state(number) == "failed"
        }
        self._needs = {
            number: [n for n in cell.needs if n in self.todo] for number, cell in self.todo.items()
        }
        needed = Counter(need for needs in self._needs.values() for need in needs)
        self._next = {
            needs[-1]: n for n, needs in self._needs.items() if needs and needed[needs[-1]] == 1
        }
        self._order = TopologicalSorter(self._needs)
        self._order.prepare()
        self._workers, place = workers, str(self.folder.path.resolve())
        self._shown = Progress("", self._before + len(self.todo), self._before)
        try:
            self._offer()
            while self._ready or self._running or self._elsewhere:
                while self._ready and len(self._running) < workers:
                    if job := [number for number in self._job() if self._begins(number)]:
                        self._running[executor.submit(self.run_cells, place, tuple(job))] = job
                self._wait()
        finally:
            self._shown.end()

    def _offer(self) -> None:
        """Make those cells ready whose needs are all done, unless a job has them already."""
        busy = {number for job in self._running.values() for number in job}
        for number in self._order.get_ready():
            self._offered.add(number)
            if (
                number not in self._failed | busy
            ):  # what goes on from something comes first: it may free its disk
                self._ready.insert(0 if self._needs[number] else len(self._ready), number)

    def _job(self) -> list[str]:
        """Choose the cells of the next job: one, what alone goes on from it, and others like it while there is time.

        A cell whose worker was lost is alone, and no other worker is left without work.
        """
        first = self._ready.pop(0)
        like = {model.path for model in self.todo[first].models}

        def unlike(number: str) -> tuple[bool, bool, int]:
            cell = self.todo[number]
            task, kind = cell.task != self.todo[first].task, cell.kind != self.todo[first].kind
            return task, kind, -len(like & {model.path for model in cell.models})

        free = self._workers - len(self._running)
        share = -(-(1 + len(self._ready)) // free)
        alone = not self.minutes_a_job or self._lost[first] > 0
        left, job = 60 * self.minutes_a_job, list[str]()
        for number in [first, *([] if alone else sorted(self._ready, key=unlike)[: share - 1])]:
            more: str | None = number
            while more is not None and (
                more == first or self.pace.expected(self.todo[more]) <= left
            ):
                left -= self.pace.expected(self.todo[more])
                job.append(more)
                more = None if alone else self._after(more, job)
        self._ready = [number for number in self._ready if number not in job]
        return job

    def _after(self, number: str, job: Sequence[str]) -> str | None:
        """The only cell that needs this one, if it needs nothing else that is not done by then."""
        more = self._next.get(number)
        return (
            more
            if more is not None and more not in self._failed and self._can_begin(more, job)
            else None
        )

    def _wait(self) -> None:
        """Wait until a job is finished, or a little, and look at the cells of jobs and those that others are making."""
        if self._running:
            pause = (
                PAUSE
                if self._elsewhere or any(len(job) > 1 for job in self._running.values())
                else None
            )
            for future in wait(self._running, pause, return_when=FIRST_COMPLETED).done:
                self._finish(future)
        else:
            time.sleep(PAUSE)
        for job in self._running.values():
            while len(job) > 1 and (
                (state := self.folder.ended(job[0])) or not self._can_begin(job[0])
            ):
                self._end(job[0], state) if state else None
                job.pop(0)
        for number in sorted(self._elsewhere):
            state = self.folder.state(number)
            if state != "running":
                self._elsewhere.remove(number)
                if state == "waiting":  # whoever made it was killed
                    self._ready.append(number)
                else:
                    self._end(number, state, "by another process")

    def _begins(self, number: str) -> bool:
        """Prepare a cell for an attempt; false if others have it, or have done it."""
        taken = self.folder.state(number) == "running"
        if taken or self.folder.leaves(
            self.todo[number]
        ):  # done by a job that an earlier command submitted, meanwhile
            if number in self._offered:  # otherwise it will be
                self._leave(number) if taken else self._elsewhere.add(number)
            return False
        for name in (RESULT, ERROR):  # the former where it is done, but what it left is gone
            (self.folder.cell(number) / name).unlink(missing_ok=True)
        self._reached[number] = self.folder.reached(number)
        return True

    def _can_begin(self, number: str, job: Sequence[str] = ()) -> bool:
        """Whether what a cell needs is done, or in a job."""
        return all(need in job or self._ended.get(need) == "done" for need in self._needs[number])

    def _finish(self, future: Future[Mapping[str, str]]) -> None:
        """Take what a job has left; if it was lost, so was the cell at which it was, and the others run again."""
        job, error = self._running[future], future.exception()
        states = {} if error is not None else future.result()
        while job:
            number = job[0]
            state = states.get(number) or self.folder.ended(number)
            if state in ("done", "failed"):
                self._end(number, state)
            elif state == "busy":
                self._leave(number)
            elif error is not None and self._can_begin(number):
                self._lose(number, error)
                error = None
            elif number in self._offered:
                self._ready.append(number)
            job.pop(0)
        del self._running[future]

    def _lose(self, number: str, error: BaseException) -> None:
        """Run a cell again whose worker was lost, as long as it gets further."""
        cell, further = self.todo[number], self.folder.reached(number) != self._reached[number]
        self._lost[number] = 0 if further else self._lost[number] + 1
        if self._lost[number] < ATTEMPTS:
            again = "goes on from where it was" if further else "is run once more"
            self.say(f"The worker of {cell.said()} was lost ({error!r}). It {again}.")
            self._ready.append(number)
            return
        lost = f"Its worker was lost {ATTEMPTS} times before it got any further: was it killed, or out of memory?"
        write_text(self.folder.cell(number) / ERROR, f"{lost}\n{error!r}\n")
        self._end(number, "failed")

    def _leave(self, number: str) -> None:
        """Leave a cell to the process that has locked it, such as a job that an earlier command has submitted."""
        self._elsewhere.add(number)
        self.say(f"Waiting for another process that is making {self.todo[number].said()}.")

    def _end(self, number: str, state: str, by: str = "") -> None:
        cell, aloud = self.todo[number], state != "done" or bool(by)
        self._ended[number] = state
        if state == "done":
            seconds = self.folder.took(number)
            self.pace.add(cell, seconds)
            by = by or ("done" if seconds is None else f"{seconds:.0f} s")
            self._order.done(number)
            self._offer()
            self.forget()
        count = self._before + len(self._ended)
        line = f"[{count}/{self._shown.total}] {cell.said()}: {by or state}"
        if aloud:
            self.say(line)
        at_once = not aloud and len(self._ended) in (1, len(self.todo))
        self._shown.show(
            count, lambda: f"{line}; {self.words()}", beside=self.words, at_once=at_once
        )

    def words(self) -> str:
        """How many cells are running, failed and waiting, and how long they will take."""
        failed = self._failed | {
            number for number, state in self._ended.items() if state == "failed"
        }
        rest = [
            cell
            for number, cell in self.todo.items()
            if number not in self._ended and number not in failed
        ]
        at_work = sum(not self._ended.keys() >= {*job} for job in self._running.values())
        left = duration(self.pace.left(rest, self._workers))
        return f"{at_work} running or queued, {len(failed)} failed, {len(rest) - at_work} waiting; about {left} left"

    def forget(self) -> None:
        """Remove the maps that no cell needs any more, if the study keeps results alone."""
        if self.folder.study["keep"] == "results":
            left = [cell for cell in self.todo.values() if self._ended.get(cell.id) != "done"]
            needed = {number for cell in left for number in (cell.id, *cell.needs)}
            for number in self._fits.keys() - needed:
                remove(self.folder.cell(number) / self._fits.pop(number))
