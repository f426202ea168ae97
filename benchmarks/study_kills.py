"""Kill the jobs of a rehearsed study again and again: its tables have to be those of an undisturbed run, byte by byte.

    python -m benchmarks.study_kills [--kills 20] [--wall_times 20] [--executor slurm] [--folder FOLDER] [--json FILE]

`slurm` runs jobs with submitit's executor of this machine, `ray` on a Ray cluster of two nodes, each a process group of
this machine. A kill is SIGKILL to a random job. A wall time is SIGUSR2, and SIGKILL some seconds later, as SLURM ends a
job; a task of Ray has no wall time, and gets SIGTERM and SIGKILL. The study runs in one folder after another until all
are spent; a cell that was lost twice before it got any further is run again by `study.py retry`.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a bare checkout

from aligners.studies.rehearsals.rehearsal import environment, prepare  # noqa: E402
from aligners.studies.spec import read_study  # noqa: E402

MAPS = {"linear": "Linear", "mlp_paper": {"class_path": "MLP", "init_args": {"skip": False}}, "inn": "INN"}
OFTEN = {"checkpoint": {"every_n_minutes": 0.001}}
STUDY: dict[str, Any] = {
    "name": "killed",
    "models": {"names": "google/multiberts-seed_{seed}", "seeds": 2},
    "tasks": {"rte": {"text": {"source": "rte"}}},
    "stages": ["pretrained", "finetuned"],
    "data": {"rows": "mean", "batch_size": 32},
    "store": "own",
    "finetune": {"options": {"data": {"batch_size": 4}, **OFTEN}},
    "fit": {"options": {"model": {"aligners": MAPS}, "data": {"sites": "blocks"}, **OFTEN}},
    "inject": {"options": {"closed_form": []}},
    "similarity": {"across_stages": True, "options": {"measures": ["cka", "svcca", "rsa"], "controls": True}},
    "report": ["ren_table_2", "ren_table_4"],
}
STEPS = {"finetune": 60, "fit": 120}  # rather than a rehearsal's, so that jobs live long enough to be killed
RUN = "import submitit; submitit.Job._results_timeout_s = 0.5; from aligners.cli.table import study; study()"
JOBS = {"slurm": b"submitit.core._submit", "ray": b"ray::_in_worker"}  # in the command lines of jobs
NOTICE = {"slurm": signal.SIGUSR2, "ray": signal.SIGTERM}
GRACE = 8.0  # seconds between a notice and the kill


def main() -> None:
    """Run the study undisturbed, then disturbed until all kills are spent, and compare."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--kills", type=int, default=20)
    arguments.add_argument("--wall_times", type=int, default=20)
    arguments.add_argument("--executor", choices=JOBS, default="slurm")
    arguments.add_argument("--most_runs", type=int, default=8, help="folders in which the study is run disturbed")
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--folder", type=Path, default=Path("runs/killed"))
    arguments.add_argument("--json", type=Path, help="file that gets an entry for the executor")
    given = arguments.parse_args()
    draw, left = random.Random(given.seed), Counter({"kills": given.kills, "wall_times": given.wall_times})
    given.folder = given.folder.resolve()
    file, base = _prepared(given.folder / "rehearsal")
    of_executors: dict[str, dict[str, Any]] = {"slurm": {"cluster": "local", "timeout_min": 30}, "ray": {"num_cpus": 1}}
    where = of_executors[given.executor]
    if given.executor == "ray":
        os.environ.update(base)  # which the nodes inherit
        where["address"] = _two_nodes()
    _study(base, ["run", str(file), "--folder", str(given.folder / "whole"), "--workers", "2"]).wait()
    whole, entry = _tables(given.folder / "whole"), {"runs": 0, "retries": 0, "kills": 0, "wall_times": 0}
    assert whole, "the undisturbed run has made no tables"
    different: list[str] = []
    options = ["--executor", given.executor, "--executor_options", json.dumps(where), "--workers", "2"]
    while left.total() and entry["runs"] < given.most_runs:
        entry["runs"] += 1
        folder = given.folder / f"{given.executor}-{entry['runs']}"
        words = ["run", str(file), "--folder", str(folder), *options]
        while _disturbed(_study(base, words), given.executor, folder, left, draw, entry):
            entry["retries"] += 1
            words = ["retry", str(folder), *options]
        found = _tables(folder)
        different += [f"{folder.name}/{name}" for name in {*whole, *found} if whole.get(name) != found.get(name)]
        print(entry, "different:", different, flush=True)
    result = {**entry, "tables": len(whole), "different": sorted(different)}
    if given.json:
        entries = json.loads(given.json.read_text()) if given.json.is_file() else {}
        given.json.write_text(json.dumps({**entries, given.executor: result}, indent=1, sort_keys=True) + "\n")
    sys.exit(bool(different or left.total()))


def _prepared(folder: Path) -> tuple[Path, dict[str, str]]:
    """The study's file with its stand-ins, and the environment that finds them."""
    from dataclasses import asdict

    file = prepare({"rate": 1e12}, asdict(read_study(STUDY)), folder)
    content = yaml.safe_load(file.read_text())
    for kind, steps in STEPS.items():
        content[kind]["options"]["trainer"] = {"max_steps": steps, "max_epochs": -1}
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return file, {**environment(folder), "PYTHONPATH": path}


def _two_nodes() -> str:
    """Begin a Ray cluster of two nodes, and return its address."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    return str(cluster.address)


def _study(added: dict[str, str], words: list[str]) -> subprocess.Popen[bytes]:
    """Begin a command of `study.py`."""
    return subprocess.Popen([sys.executable, "-c", RUN, *words], env={**os.environ, **added}, cwd=ROOT)


def _disturbed(
    study: subprocess.Popen[bytes],
    executor: str,
    folder: Path,
    left: Counter[str],
    draw: random.Random,
    entry: dict[str, int],
) -> int:
    """Disturb a study until it ends, and return its exit status; what was done is taken from `left`."""
    doomed: dict[int, float] = {}  # process -> when it is killed
    next_at = time.monotonic() + draw.uniform(8, 12)
    while study.poll() is None:
        time.sleep(0.2)
        now, jobs = time.monotonic(), _jobs(executor, folder)
        for process in [process for process, at in doomed.items() if at < now]:
            doomed.pop(process)
            if process in jobs:
                _send(process, signal.SIGKILL)
        free = [process for process in jobs if process not in doomed]
        if now < next_at or not free or not left.total():
            continue
        what = draw.choice(list(left.elements()))
        process = draw.choice(free)
        if _send(process, signal.SIGKILL if what == "kills" else NOTICE[executor]):
            left[what] -= 1
            entry[what] += 1
            if what == "wall_times":
                doomed[process] = now + GRACE
        next_at = now + draw.uniform(3, 9)
    return study.returncode


def _jobs(executor: str, folder: Path) -> list[int]:
    """The processes of jobs that are at work."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (place / "cmdline").read_bytes()
            if JOBS[executor] in words and (executor == "ray" or bytes(folder.resolve()) in words):
                found.append(int(place.name))
    return sorted(found)


def _send(process: int, number: signal.Signals) -> bool:
    with suppress(ProcessLookupError):
        os.kill(process, number)
        return True
    return False


def _tables(folder: Path) -> dict[str, bytes]:
    """Every file of the collected tables and of the report's."""
    places = (folder / "tables", folder / "report" / "tables")
    return {str(file.relative_to(folder)): file.read_bytes() for place in places for file in sorted(place.glob("*"))}


if __name__ == "__main__":
    main()
