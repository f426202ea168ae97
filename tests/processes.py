"""Processes that tests start: split off one that has imported what takes long, and has done nothing else."""

import itertools
import os
import runpy
import socket
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, chdir, nullcontext
from multiprocessing import forkserver, get_context
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

HANGS = 3600  # seconds after which a process is given up, on however slow a machine
ROOT = Path(__file__).parent.parent
PROCESSES = get_context("forkserver")
PRELOADED = [
    *("wandb.sdk.launch.inputs.internal", "lightning.pytorch.cli", "transformers.models.bert.modeling_bert"),
    *("transformers.generation.utils", "datasets", "matplotlib.pyplot", "matplotlib.backends.backend_agg"),
    *("torch.distributed.checkpoint", "multiprocessing.synchronize", "requests", "scipy.io", "pytest"),
    *(f"aligners.cli.train.{name}" for name in ("fit", "finetune", "probe", "stitch", "universe")),
    *(f"aligners.cli.evaluate.{name}" for name in ("pairs", "similarity", "surgery")),
    *("aligners.cli.study.run_cells", "tests.warm"),
]
PROCESSES.set_forkserver_preload(PRELOADED)


class _Process(ForkServerProcess):
    def start(self) -> None:
        with chdir(ROOT):  # where the server finds what it imports
            forkserver.ensure_running()
        super().start()


PROCESSES.Process = _Process


_OF_THE_TESTS = ("WANDB_SERVICE", "ALIGNERS_RUN_FOLDER")  # not inherited: that service may end, that folder is taken
_number = itertools.count()


class Started:
    """A command as a user types it, in a process of its own.

    Args:
        folder: in which it works. What it prints goes to files there.
        script: its name, without `.py`, or the path of another.
        words: of the command line.
        around: makes the context in which the script runs, in the process: a function of a module, or a partial one.
        environment: added to that of the tests.
    """

    def __init__(
        self,
        folder: Path,
        script: str,
        *words: str,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
        environment: dict[str, str] | None = None,
    ) -> None:
        number = next(_number)
        self.files = [folder / f"{stream}-{number}.txt" for stream in ("screen", "errors")]
        inherited = {name: value for name, value in os.environ.items() if name not in _OF_THE_TESTS}
        given = (folder, script, words, self.files, inherited | (environment or {}), around)
        self.process: ForkServerProcess = PROCESSES.Process(target=_run_script, args=given)
        self.process.start()

    def signal(self, number: int) -> None:
        """Send a signal, if there is still a process to get it."""
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, number)

    def wait_until(self, there: Callable[[], Any]) -> None:
        """Wait for a condition; fail if the process ends before, or hangs."""
        last = time.monotonic() + HANGS
        while not there():
            assert time.monotonic() < last, f"it has not come that far: {self.said()}"
            assert self.process.is_alive(), f"it ended with {self.process.exitcode}: {self.said()}"
            time.sleep(0.05)

    def end(self) -> int:
        """Wait for its end; the exit status."""
        self.process.join(HANGS)
        assert self.process.exitcode is not None, "hangs"
        return self.process.exitcode

    def printed(self) -> list[str]:
        """What it has printed to its standard output, and to that of errors."""
        return [file.read_text(errors="replace") if file.exists() else "" for file in self.files]

    def said(self) -> str:
        """Both, one after the other."""
        return "".join(self.printed())


def all_ended(processes: Iterable[ForkServerProcess]) -> list[int | None]:
    """Wait for the ranks of a job; their exit statuses. If one fails, the others are killed: they would wait for it."""
    running = every = list(processes)
    try:
        while running and not any(process.exitcode for process in every):
            assert wait([process.sentinel for process in running], HANGS)
            running = [process for process in running if process.exitcode is None]
    finally:
        for process in running:
            process.kill()
    return [process.exitcode for process in every]


def rank_addresses(ranks: int) -> list[dict[str, str]]:
    """The environment of each rank of a job whose processes Lightning does not start itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    shared = {**address, "NODE_RANK": "0", "WORLD_SIZE": str(ranks)}
    return [{**shared, "LOCAL_RANK": str(rank)} for rank in range(ranks)]


def _run_script(
    folder: Path,
    script: str,
    words: list[str],
    files: list[Path],
    environment: dict[str, str],
    around: Callable[[], AbstractContextManager[Any]],
) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for stream, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    as_rank()
    sys.argv = [script if Path(script).is_absolute() else str(ROOT / f"{script}.py"), *words]
    with around():
        runpy.run_path(sys.argv[0], run_name="__main__")


def as_rank() -> None:
    """Tell Lightning which rank this process is, as if it had been imported in this environment."""
    from lightning.pytorch.utilities import rank_zero_only

    rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", "0"))
