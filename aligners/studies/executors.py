"""Where cells run: executors with the interface of `concurrent.futures`.

A future's exception means that its worker was lost: what goes wrong within a cell is the cell's result.
"""

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import (
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
)
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from aligners.errors import UserError, check_extra, check_known, check_range

PATIENCE = 20.0  # seconds that a worker has to end by itself
THREADS = "OMP_NUM_THREADS"
VISIBLE = "CUDA_VISIBLE_DEVICES"
OFTEN = 10**6  # so many times may a job's time be over, as long as it gets further
CODE = str(Path(__file__).resolve().parents[2])


def cpu_cores() -> int:
    """How many CPU cores this process may use; on macOS, which does not say, those of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Unfinished(SystemExit):
    """A function was stopped and has got further: another call of it goes on from there."""


class Processes(Executor):
    """Processes of this machine, each a pool of its own: one that is killed takes no other with it.

    Args:
        workers: number of processes.
        gpus: the GPUs, by their names in CUDA_VISIBLE_DEVICES; each process sees one of them. Default: none.
    """

    def __init__(self, workers: int, gpus: Sequence[str] = ()) -> None:
        self.workers, self.gpus = workers, gpus
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for place in range(workers):
            self._free.put(place)
        self._pools: dict[
            int, tuple[ProcessPoolExecutor, BaseProcess]
        ] = {}  # each with its process

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function in the next free process; wait until there is one."""
        place = self._free.get()
        try:
            future = self._pool(place).submit(_in_worker, fn, *args, **kwargs)
        except BrokenExecutor:  # killed while it was idle
            self._drop(place)
            future = self._pool(place).submit(_in_worker, fn, *args, **kwargs)
        future.add_done_callback(lambda done: self._release(place, done))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End all processes, at once with `cancel_futures`."""
        if cancel_futures:
            processes = [process for _, process in list(self._pools.values())]
            for process in processes:
                process.terminate()
            for process in processes:
                process.join(PATIENCE)
                process.kill()
        for pool, _ in list(
            self._pools.values()
        ):  # those of workers that were ended are dropped meanwhile
            pool.shutdown(wait, cancel_futures=cancel_futures)

    def _pool(self, place: int) -> ProcessPoolExecutor:
        if place not in self._pools:
            gpu = self.gpus[place % len(self.gpus)] if self.gpus else None
            threads = max(1, cpu_cores() // self.workers)
            threads = min(
                threads, int(os.environ.get(THREADS) or threads)
            )  # the user may have asked for fewer
            spawn = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(1, spawn, _begin_worker, (gpu, threads))
            number = pool.submit(os.getpid).result()
            self._pools[place] = (
                pool,
                next(each for each in multiprocessing.active_children() if each.pid == number),
            )
        return self._pools[place][0]

    def _drop(self, place: int) -> None:
        self._pools.pop(place)[0].shutdown(wait=False)

    def _release(self, place: int, done: Future[Any]) -> None:
        if not done.cancelled() and isinstance(done.exception(), BrokenExecutor):
            self._drop(place)
        self._free.put(place)


def visible_gpus(count: int) -> list[str]:
    """The GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES: numbers, or UUIDs of GPUs or parts.

    Args:
        count: how many CUDA counts. Of the parts of a GPU (MIG) it counts one, however many are visible.
    """
    names = [name.strip() for name in os.environ.get(VISIBLE, "").split(",") if name.strip()]
    if count and names and names[0].startswith("MIG"):
        return names
    return (names or [str(number) for number in range(count)])[:count]


def in_groups(gpus: Sequence[str], devices: int) -> list[str]:
    """The GPUs that each process sees, as CUDA_VISIBLE_DEVICES names them.

    Args:
        gpus: all.
        devices: of a process. GPUs that are left over are not used.

    Raises:
        ValueError: there are fewer, or they are parts of GPUs: a process sees only one of those.
    """
    if gpus:
        check_range(
            least=1, most=1 if gpus[0].startswith("MIG") else len(gpus), cell_devices=devices
        )
    return [
        ",".join(gpus[first : first + devices])
        for first in range(0, len(gpus) - devices + 1, devices)
    ]


def _begin_worker(gpu: str | None, threads: int) -> None:
    """Prepare a process that was just started: its GPU, its threads, and that it ends with the one that started it."""
    if gpu is not None:
        os.environ[VISIBLE] = gpu
    os.environ[THREADS] = str(threads)  # torch is not imported yet
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started it
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _in_worker(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function in a process that would wait for another; if it is stopped, so is the process."""
    try:
        return fn(*args, **kwargs)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)


def _end_with_parent() -> None:
    if parent := multiprocessing.parent_process():
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)


class SlurmJobs(Executor):
    """Jobs of SLURM, by submitit; each cell is a job.

    Args:
        workers: most jobs at a time.
        folder: for submitit's files.
        cluster: `slurm`, or `local` for processes of this machine.
        options: parameters of submitit's `AutoExecutor`, such as `timeout_min` and `slurm_partition`.
    """

    def __init__(self, workers: int, folder: Path, cluster: str = "slurm", **options: Any) -> None:
        import submitit

        let_jobs_import()
        self._jobs: list[Any] = []
        often = {f"{cluster}_max_num_timeout": OFTEN}
        self._executor = submitit.AutoExecutor(folder=folder, cluster=cluster, **often)
        self._executor.update_parameters(**options)
        self._waiting = ThreadPoolExecutor(workers)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit a job; the future waits for it."""
        job = self._executor.submit(_Job(), fn, *args, **kwargs)
        self._jobs.append(job)
        return self._waiting.submit(job.result)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for all jobs, or cancel them."""
        if cancel_futures:
            for job in self._jobs:
                if not job.done():
                    job.cancel(check=False)
        self._waiting.shutdown(wait, cancel_futures=cancel_futures)


class _Job:
    """A function as a job of submitit. Once its time is over it ends as at SIGTERM; if it got further, it is requeued.

    submitit calls `checkpoint` for what to queue again: nothing, unless the function has ended as `Unfinished`.
    """

    _unfinished = False

    def __call__(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        from submitit.core.job_environment import JobEnvironment

        over, wall_time = (
            False,
            signal.Signals[f"SIG{JobEnvironment.USR_SIG}"],
        )  # it comes before SLURM's SIGTERM

        def end(*_: Any) -> None:
            nonlocal over
            over = True
            signal.raise_signal(signal.SIGTERM)

        requeue: Any = signal.signal(wall_time, end)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which submitit ignores
        # It ends jobs of this machine by SIGINT, even if begun under nohup.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            return fn(*args, **kwargs)
        except Unfinished:
            self._unfinished = True
            if over:
                requeue(wall_time, None)  # this ends the process
            raise

    def checkpoint(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What submitit is to queue again; None: nothing."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(_Job(), fn, *args, **kwargs) if self._unfinished else None


class RayTasks(Executor):
    """Tasks of a Ray cluster; each cell is a task.

    Args:
        address: of the cluster; default: $RAY_ADDRESS, or a new one on this machine.
        options: what a task needs: `num_cpus`, `num_gpus`, `resources`, as `ray.remote` takes them.
    """

    def __init__(self, address: str | None = None, **options: Any) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        import ray

        let_jobs_import()
        self._ray = ray
        self._tasks: list[Any] = []
        self._own = not ray.is_initialized()
        if self._own:
            ray.init(
                address=address, log_to_driver=False, include_dashboard=None if address else False
            )
        self._remote = ray.remote(max_retries=0, **options)(_in_worker)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit a task."""
        task = self._remote.remote(fn, *args, **kwargs)
        self._tasks.append(task)
        return task.future()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for all tasks, or cancel them, and leave the cluster."""
        if cancel_futures:
            for task in self._tasks:
                self._ray.cancel(task, force=True)
        elif wait:
            self._ray.wait(self._tasks, num_returns=len(self._tasks)) if self._tasks else None
        if self._own:
            self._ray.shutdown()


def let_jobs_import() -> None:
    """Name the folder of this code in $PYTHONPATH, which jobs inherit: they may start in another folder."""
    known = [CODE, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, known)))


# Name -> the package that it needs.
EXECUTORS = {
    "processes": None,
    "slurm": ("slurm", "submitit"),
    "ray": ("cluster", "ray"),
}  # extra and its package
RESERVED = {"slurm": "gpus_per_node", "ray": "num_gpus"}  # the option with a job's GPUs


def make_executor(
    name: str,
    workers: int,
    gpus: Sequence[str],
    folder: Path,
    options: dict[str, Any],
    devices: int = 1,
) -> Executor:
    """Make an executor.

    Args:
        name: one of `EXECUTORS`.
        workers: cells at a time.
        gpus: see `Processes`.
        folder: of the study.
        options: of the executor.
        devices: of a cell; a job reserves as many GPUs, unless `options` say how many.

    Raises:
        ValueError: there is no such executor or option, too few GPUs for a cell, or its package is not installed.
    """
    check_known(EXECUTORS, executor=name)
    if needed := EXECUTORS[name]:
        check_extra(*needed, f"The executor {name!r}")
    if devices > 1 and name in RESERVED:
        reserved = options.setdefault(RESERVED[name], devices)
        check_range(
            least=devices if reserved else 0, **{f"executor_options.{RESERVED[name]}": reserved}
        )
    try:
        if name == "slurm":
            return SlurmJobs(workers, folder / "slurm", **options)
        return RayTasks(**options) if name == "ray" else Processes(workers, gpus, **options)
    except (TypeError, NameError) as error:  # of an option that there is not
        raise UserError(f"Expected `executor_options` of {name!r}, but: {error}") from error
