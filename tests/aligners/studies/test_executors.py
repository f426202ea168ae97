"""Where cells run, with the real libraries; a worker that is killed takes no other with it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, CancelledError
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aligners.studies import executors
from aligners.studies.executors import Processes, make_executor
from tests.processes import ROOT

if TYPE_CHECKING:
    from tests.world import World


def pid() -> int:
    return os.getpid()


def threads() -> str:
    return os.environ["OMP_NUM_THREADS"]


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(path: str) -> str:
    """Until another process makes a file."""
    with open(path) as pipe:  # a named pipe: opening waits for the writer
        return pipe.read()


@pytest.fixture
def processes() -> Iterator[Processes]:
    with Processes(2) as executor:
        yield executor


def test_a_killed_process_costs_its_own_cell(processes: Processes, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    other = processes.submit(wait_for, str(pipe))
    lost = processes.submit(killed)
    assert isinstance(lost.exception(), BrokenExecutor)
    assert processes.submit(pid).result() != os.getpid()  # a new one has taken its place: the other is still waiting
    pipe.write_text("still here")
    assert other.result() == "still here"
    assert processes.submit(threads).result() == str(max(1, len(os.sched_getaffinity(0)) // 2))


def test_processes_end_at_once_where_they_are_told_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    executor = Processes(1)
    future = executor.submit(wait_for, str(tmp_path / "pipe"))
    (process,) = executor._processes.values()
    executor.shutdown(cancel_futures=True)
    with pytest.raises((BrokenExecutor, CancelledError)):  # cancelled, if it had not begun yet
        future.result()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_a_worker_that_is_lost_while_all_are_ended_disturbs_nobody() -> None:
    """Its pool is dropped by the thread that looks after it, whenever that comes to it."""
    executor, ended = Processes(2), []

    class Pool:
        def shutdown(self, wait: bool, cancel_futures: bool) -> None:
            ended.append(self)
            executor._pools.pop(len(ended) - 1)

    executor._pools |= {0: Pool(), 1: Pool()}  # type: ignore[dict-item]
    executor.shutdown(cancel_futures=True)
    assert len(ended) == 2


def test_jobs_of_submitit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submitit = pytest.importorskip("submitit", reason="the extra `slurm` is not installed")
    monkeypatch.setattr(submitit.Job, "_results_timeout_s", 0.5)  # for which it waits for a dead job's result
    os.mkfifo(tmp_path / "pipe")
    executor = make_executor("slurm", 3, 0, tmp_path, {"cluster": "local", "timeout_min": 5})
    lost, fine = executor.submit(killed), executor.submit(pid)
    waiting = executor.submit(wait_for, str(tmp_path / "pipe"))
    assert fine.result() != os.getpid()
    assert lost.exception() is not None
    assert not waiting.done()
    executor.shutdown(cancel_futures=True)
    assert waiting.exception() is not None


def node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a Ray of two nodes on this machine, in a folder of its own: paths of sockets must be short."""
    pytest.importorskip("ray", reason="the extra `cluster` is not installed")
    from ray.cluster_utils import Cluster

    own = tempfile.mkdtemp(dir="/tmp")
    place = {"temp_dir": f"{own}/ray"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", own)  # below it lies the cluster's address, too
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, **place})
        nodes.add_node(num_cpus=1)
        yield nodes.address
        nodes.shutdown()
    shutil.rmtree(own, ignore_errors=True)


def test_tasks_of_a_ray_of_two_nodes(cluster: str, tmp_path: Path) -> None:
    import ray

    with make_executor("ray", 2, 0, tmp_path, {"address": cluster, "num_cpus": 1}) as executor:
        os.mkfifo(tmp_path / "pipe")
        waiting = executor.submit(wait_for, str(tmp_path / "pipe"))  # takes one of the nodes
        assert executor.submit(killed).exception() is not None
        other = executor.submit(node).result()
        (tmp_path / "pipe").write_text("still here")
        assert waiting.result() == "still here"
        assert other in {each["NodeID"] for each in ray.nodes()}
        assert len(ray.nodes()) == 2


def test_a_cell_of_a_study_on_ray(cluster: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aligners.cli.table import study  # here, as the processes of the other tests import this module
    from aligners.studies.folder import StudyFolder
    from tests.aligners.cli.small_study import study_file

    monkeypatch.chdir(tmp_path)
    fit = {"model": {"aligners": {"linear": "Linear"}}, "data": {"sites": [1]}, "trainer": {"max_epochs": 1}}
    file = study_file(world, tmp_path, fit={"options": fit}, inject=None)
    options = json.dumps({"address": cluster, "num_cpus": 1})
    study(["run", file, "--executor", "ray", "--executor_options", options, "--rate", "1e12"])
    folder = StudyFolder(tmp_path / "runs" / "small")
    (cell,) = folder.cells
    (row,) = folder.result(cell)["rows"]
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
        make_executor(name, 1, 0, tmp_path, dict(options))


def test_a_package_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(ValueError, match=r"'ray' needs the package ray, which is not installed. Run: pip install ray"):
        make_executor("ray", 1, 0, tmp_path, {})


def test_jobs_find_the_packages_in_the_folder_they_are_given() -> None:
    assert Path(executors.CODE) == ROOT
    assert (Path(executors.CODE) / "aligners" / "studies").is_dir()
