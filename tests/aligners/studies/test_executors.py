"""Where cells run, with the real libraries; a worker that is killed takes no other with it."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from concurrent.futures import BrokenExecutor, CancelledError
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.processes import ROOT

from aligners.cli.endings import ended_by_signals
from aligners.errors import UserError
from aligners.studies import executors
from aligners.studies.executors import Processes, cpu_cores, make_executor

if TYPE_CHECKING:
    from tests.world import World


def pid() -> int:
    return os.getpid()


def threads() -> str:
    return os.environ["OMP_NUM_THREADS"]


def gpu() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def until_its_time_is_over(path: str) -> None:
    """Say that it has begun; leave a file when it is stopped."""
    try:
        with ended_by_signals():
            os.kill(os.getpid(), signal.SIGUSR2)
            time.sleep(60)
    except SystemExit:
        Path(path).touch()
        raise


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(path: str) -> str:
    """Wait for what another process writes into a named pipe; leave a file if Ctrl-C comes first."""
    try:
        return Path(path).read_text()
    except KeyboardInterrupt:
        Path(path).with_suffix(".interrupted").touch()
        raise


def test_a_killed_process_costs_its_own_cell_and_all_end_at_once_where_they_are_told_to(tmp_path: Path) -> None:
    pipe, executor = tmp_path / "pipe", Processes(2)
    os.mkfifo(pipe)
    other = executor.submit(wait_for, str(pipe))
    assert isinstance(executor.submit(killed).exception(), BrokenExecutor)
    new = executor.submit(pid).result()  # it has taken the place of the one that was killed: the other is still waiting
    assert new != os.getpid()
    pipe.write_text("still here")
    assert other.result() == "still here"
    assert executor.submit(threads).result() == str(max(1, cpu_cores() // 2))
    waiting = executor.submit(wait_for, str(pipe))
    executor.shutdown(cancel_futures=True)
    with pytest.raises((BrokenExecutor, CancelledError)):  # cancelled, if it had not begun yet
        waiting.result()
    with pytest.raises(ProcessLookupError):
        os.kill(new, 0)


@pytest.mark.parametrize(
    ("visible", "count", "names"),
    [
        (None, 2, ["0", "1"]),
        ("2,3", 2, ["2", "3"]),
        ("5, 7,-1,3", 2, ["5", "7"]),  # CUDA stops at what is none
        ("MIG-a,MIG-b,MIG-c", 1, ["MIG-a", "MIG-b", "MIG-c"]),  # of which it counts one
        ("GPU-a,GPU-b", 2, ["GPU-a", "GPU-b"]),
        ("MIG-a", 0, []),  # no driver
        ("", 0, []),
    ],
)
def test_processes_take_the_gpus_that_are_visible(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int, names: list[str]
) -> None:
    monkeypatch.delenv(executors.VISIBLE, raising=False)
    if visible is not None:
        monkeypatch.setenv(executors.VISIBLE, visible)
    assert executors.visible_gpus(count) == names


def test_each_process_sees_one_gpu() -> None:
    with Processes(2, ["MIG-a", "MIG-b"]) as executor:
        assert [executor.submit(gpu).result() for _ in range(3)] == ["MIG-a", "MIG-b", "MIG-a"]


def test_a_cell_of_several_gpus_gets_them_and_its_job_reserves_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert executors.in_groups(["0", "3", "GPU-5"], 2) == ["0,3"]
    assert executors.in_groups(["0", "3"], 1) == ["0", "3"]
    assert executors.in_groups([], 2) == []
    for gpus in (["0"], ["MIG-a", "MIG-b"]):
        with pytest.raises(ValueError, match=r"`cell_devices` to be .*at most 1"):
            executors.in_groups(gpus, 2)
    monkeypatch.setattr(executors, "check_extra", lambda *_: None)
    monkeypatch.setattr(executors, "SlurmJobs", lambda workers, folder, **options: options)
    for given, reserved in (({}, 2), ({"gpus_per_node": 4}, 4), ({"gpus_per_node": 0}, 0)):
        assert make_executor("slurm", 2, [], tmp_path, dict(given), 2) == {"gpus_per_node": reserved}
    assert make_executor("slurm", 2, [], tmp_path, {}) == {}
    with pytest.raises(ValueError, match="gpus_per_node"):
        make_executor("slurm", 2, [], tmp_path, {"gpus_per_node": 1}, 2)


@pytest.mark.slow
def test_a_job_whose_time_is_over_is_stopped_and_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitit = pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    monkeypatch.setattr(submitit.Job, "_results_timeout_s", 0.5)  # for which it waits for a dead job's result
    executor = make_executor("slurm", 2, [], tmp_path, {"cluster": "local", "timeout_min": 5})
    stopped = executor.submit(until_its_time_is_over, str(tmp_path / "stopped"))
    assert isinstance(stopped.exception(), submitit.core.utils.UncompletedJobError)
    assert (tmp_path / "stopped").exists()  # as by SIGTERM: it could save its state
    executor.shutdown()


@pytest.mark.slow
def test_a_job_of_submitit_is_lost_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitit = pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    monkeypatch.setattr(submitit.Job, "_results_timeout_s", 0.5)  # for which it waits for a dead job's result
    executor = make_executor("slurm", 2, [], tmp_path, {"cluster": "local", "timeout_min": 5})
    lost, other = executor.submit(killed), executor.submit(pid)
    assert lost.exception() is not None
    assert other.result() != os.getpid()
    executor.shutdown()


@pytest.mark.slow
def test_a_job_of_submitit_is_cancelled_politely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitit = pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    monkeypatch.setattr(submitit.Job, "_results_timeout_s", 0.5)
    for attempt in range(5):  # submitit kills a job a second after its SIGINT, and a busy machine may be slower once
        pipe = tmp_path / f"pipe-{attempt}"
        os.mkfifo(pipe)
        executor = make_executor("slurm", 1, [], tmp_path, {"cluster": "local", "timeout_min": 5})
        waiting = executor.submit(wait_for, str(pipe))
        with pipe.open("w"):  # it has begun
            executor.shutdown(cancel_futures=True)
            assert waiting.exception() is not None
            last = time.monotonic() + 5  # nobody waits for the end of a job that is cancelled
            while not (interrupted := pipe.with_suffix(".interrupted").exists()) and time.monotonic() < last:
                time.sleep(0.05)
        if interrupted:
            return
    pytest.fail("No job was interrupted before it was killed.")


@pytest.mark.slow
def test_cells_of_a_study_on_ray(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="the extra `cluster` is not installed")
    from ray.cluster_utils import Cluster
    from tests.aligners.cli.small_study import study_file

    from aligners.cli.table import study  # here, as the processes of the other tests import this module
    from aligners.studies.study_folder import StudyFolder

    monkeypatch.chdir(tmp_path)
    fit = {"model": {"aligners": {"linear": "Linear"}}, "data": {"sites": [1]}, "trainer": {"max_epochs": 1}}
    file = study_file(world, tmp_path, fit={"options": fit}, inject=None)
    with ExitStack() as stack:
        own = tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True)  # paths of sockets must be short
        place = stack.enter_context(own)
        monkeypatch.setenv("RAY_TMPDIR", place)  # below it lies the cluster's address, too
        monkeypatch.setenv("RAY_worker_niceness", "0")  # at its 15, workers would stand still while other tests run
        head = {"num_cpus": 1, "include_dashboard": False, "include_log_monitor": False, "temp_dir": f"{place}/ray"}
        nodes = Cluster(initialize_head=True, head_node_args=head)
        stack.callback(nodes.shutdown)
        options = {"address": nodes.address, "num_cpus": 1}
        with make_executor("ray", 1, [], tmp_path, dict(options)) as executor:
            assert executor.submit(killed).exception() is not None
            study(["run", file, "--executor", "ray", "--executor_options", json.dumps(options)])
    folder = StudyFolder(tmp_path / "runs" / "small")
    (cell,) = folder.cells
    ((_, row),) = folder.rows(cell)
    assert (row["method"], row["site_x"]) == ("linear", 1)
    assert 0 < row["fvu"] < 1
    assert "Saved" in (folder.cell(cell) / "log.txt").read_text()  # which another process has written


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("thread", {}, "`executor` to be one of processes, slurm, ray, but got 'thread'"),
        ("processes", {"speed": 3}, "`executor_options` of 'processes'.*speed"),
        ("slurm", {"cluster": "local", "speed": 3}, "`executor_options` of 'slurm'.*speed"),
    ],
)
def test_wrong_options_are_refused(tmp_path: Path, name: str, options: dict[str, object], said: str) -> None:
    if name == "slurm":
        pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    with pytest.raises(ValueError, match=said):
        make_executor(name, 1, [], tmp_path, dict(options))


def test_a_package_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, extra, package in (("ray", "cluster", "ray"), ("slurm", "slurm", "submitit")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(
            UserError, match=rf"{name!r} needs the package {package}.*pip install 'aligners\[{extra}\]'"
        ):
            make_executor(name, 1, [], tmp_path, {})


def test_cores_are_counted_where_the_system_does_not_say_which_of_them_are_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert cpu_cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert cpu_cores() == 12
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cpu_cores() == 1


def test_jobs_find_the_packages_in_the_folder_they_are_given() -> None:
    assert Path(executors.CODE) == ROOT
