"""Where cells run: processes, jobs of submitit, or tasks of Ray, as executors of `concurrent.futures`.

A future's exception means that its worker was lost: what goes wrong within a cell is the cell's result.
"""

import multiprocessing
import os
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
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from aligners.errors import UserError, check_extra, check_known, check_range

PATIENCE = 20.0  # seconds that a worker has to end by itself
THREADS = "OMP_NUM_THREADS"
VISIBLE = "CUDA_VISIBLE_DEVICES"
CODE = str(Path(__file__).resolve().parents[2])
Function = Callable[..., Any]
# Name -> the extra that it needs, and its package.
EXECUTORS = {
    "processes": None,
    "slurm": ("slurm", "submitit"),
    "ray": ("cluster", "ray"),
}
RESERVED = {"slurm": "gpus_per_node", "ray": "num_gpus"}  # the option with a job's GPUs


def cpu_cores() -> int:
    """Return how many CPU cores this process may use; on macOS, which does not say, all of the machine's."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Processes(Executor):
    """Processes of this machine, each a pool of one: if one is killed, the others continue.

    Args:
        workers: number of processes.
        gpus: the GPUs, by their names in CUDA_VISIBLE_DEVICES; each process sees one of them. Default: none.
    """

    def __init__(self, workers: int, gpus: Sequence[str] = ()) -> None:
        self._gpus: Sequence[str | None] = gpus or [None]
        share = max(1, cpu_cores() // workers)
        asked = int(os.environ.get(THREADS) or share)
        self._threads = min(share, asked)
        self._pools: list[ProcessPoolExecutor] = []
        self._free: SimpleQueue[int] = SimpleQueue()
        for place in range(workers):
            self._pools.append(self._new_pool(place))
            self._free.put(place)

    def submit(self, fn: Function, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function in the next free process; wait until there is one."""
        place = self._free.get()
        try:
            future = self._pools[place].submit(_in_worker, fn, *args, **kwargs)
        except BrokenExecutor:  # killed while it was idle
            self._pools[place] = self._new_pool(place)
            future = self._pools[place].submit(_in_worker, fn, *args, **kwargs)
        future.add_done_callback(partial(self._release, place))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End all processes, at once with `cancel_futures`."""
        if cancel_futures:
            processes = multiprocessing.active_children()
            for process in processes:
                process.terminate()
            for process in processes:
                process.join(PATIENCE)
                process.kill()
        for pool in self._pools:
            pool.shutdown(wait, cancel_futures=cancel_futures)

    def _new_pool(self, place: int) -> ProcessPoolExecutor:
        gpu = self._gpus[place % len(self._gpus)]
        spawn = multiprocessing.get_context("spawn")
        return ProcessPoolExecutor(1, spawn, _begin_worker, (gpu, self._threads))

    def _release(self, place: int, done: Future[Any]) -> None:
        if not done.cancelled() and isinstance(done.exception(), BrokenExecutor):
            self._pools[place] = self._new_pool(place)
        self._free.put(place)


def visible_gpus(count: int) -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them: by number or by UUID.

    Args:
        count: how many CUDA counts. Of the parts of a GPU (MIG) it counts one, however many are visible.
    """
    listed = os.environ.get(VISIBLE, "").split(",")
    names = [name.strip() for name in listed if name.strip()]
    if not count:
        return []
    if not names:
        return [str(number) for number in range(count)]
    if names[0].startswith("MIG"):
        return names
    return names[:count]


def in_groups(gpus: Sequence[str], devices: int) -> list[str]:
    """Return the GPUs that each process sees, as CUDA_VISIBLE_DEVICES names them.

    Args:
        gpus: all.
        devices: devices of a process. GPUs that are left over are not used.

    Raises:
        ValueError: there are fewer, or they are parts of GPUs: a process sees only one of those.
    """
    if gpus:
        most = 1 if gpus[0].startswith("MIG") else len(gpus)
        check_range(least=1, most=most, cell_devices=devices)
    groups = []
    for first in range(0, len(gpus) - devices + 1, devices):
        group = gpus[first : first + devices]
        groups.append(",".join(group))
    return groups


def _begin_worker(gpu: str | None, threads: int) -> None:
    """Prepare a new process: set its GPU and threads, and make it end with the process that started it."""
    if gpu is not None:
        os.environ[VISIBLE] = gpu
    os.environ[THREADS] = str(threads)  # torch is not imported yet
    # Ctrl-C is for the process that started it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)


def _in_worker(fn: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function in a process that stays for other calls; if the function is stopped, so is the process."""
    try:
        return fn(*args, **kwargs)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)


class SlurmJobs(Executor):
    """Jobs of submitit, one for each call.

    Args:
        workers: most jobs at a time.
        folder: for submitit's files.
        cluster: `slurm`, or `local` for processes of this machine.
        options: parameters of submitit's `AutoExecutor`, such as `timeout_min` and `slurm_partition`.
    """

    def __init__(
        self, workers: int, folder: Path, cluster: str = "slurm", **options: Any
    ) -> None:
        import submitit

        let_jobs_import()
        self._jobs: list[Any] = []
        self._executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
        self._executor.update_parameters(**options)
        self._waiting = ThreadPoolExecutor(workers)

    def submit(self, fn: Function, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit a job; the future waits for it."""
        job = self._executor.submit(_in_job, fn, *args, **kwargs)
        self._jobs.append(job)
        return self._waiting.submit(job.result)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for all jobs, or cancel them."""
        if cancel_futures:
            for job in self._jobs:
                if not job.done():
                    job.cancel(check=False)
        self._waiting.shutdown(wait, cancel_futures=cancel_futures)


def _in_job(fn: Function, /, *args: Any, **kwargs: Any) -> Any:
    """Call a function in a job of submitit. When the job's time is over, it is stopped as by SIGTERM."""
    from submitit.core.job_environment import JobEnvironment

    # Comes before SLURM's SIGTERM.
    time_is_over = signal.Signals[f"SIG{JobEnvironment.USR_SIG}"]
    signal.signal(time_is_over, lambda *_: signal.raise_signal(signal.SIGTERM))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which submitit ignores
    # submitit ends jobs of this machine by SIGINT, which `nohup` has them ignore.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return fn(*args, **kwargs)


class RayTasks(Executor):
    """Tasks of a Ray cluster, one for each call.

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
            dashboard = None if address else False
            ray.init(address=address, log_to_driver=False, include_dashboard=dashboard)
        self._remote = ray.remote(max_retries=0, **options)(_in_worker)

    def submit(self, fn: Function, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit a task."""
        task = self._remote.remote(fn, *args, **kwargs)
        self._tasks.append(task)
        return task.future()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Wait for all tasks, or cancel them, and leave the cluster."""
        if cancel_futures:
            for task in self._tasks:
                self._ray.cancel(task, force=True)
        elif wait and self._tasks:
            self._ray.wait(self._tasks, num_returns=len(self._tasks))
        if self._own:
            self._ray.shutdown()


def let_jobs_import() -> None:
    """Add the folder of this code to $PYTHONPATH, which jobs inherit: they may start in another folder."""
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [CODE]
    for folder in known:
        if folder and folder not in folders:
            folders.append(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)


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
        folder: folder of the study.
        options: options of the executor.
        devices: devices of a cell; a job reserves as many GPUs, unless `options` say how many.

    Raises:
        ValueError: there is no such executor or option, too few GPUs for a cell, or its package is not installed.
    """
    check_known(EXECUTORS, executor=name)
    needed = EXECUTORS[name]
    if needed is not None:
        check_extra(*needed, f"The executor {name!r}")
    if devices > 1 and name in RESERVED:
        reserved = options.setdefault(RESERVED[name], devices)
        least = devices if reserved else 0  # 0: cells compute on CPUs
        check_range(least=least, **{f"executor_options.{RESERVED[name]}": reserved})
    try:
        if name == "slurm":
            return SlurmJobs(workers, folder / "slurm", **options)
        if name == "ray":
            return RayTasks(**options)
        return Processes(workers, gpus, **options)
    except (TypeError, NameError) as error:  # there is no such option
        raise UserError(
            f"Expected `executor_options` of {name!r}, but: {error}"
        ) from error
