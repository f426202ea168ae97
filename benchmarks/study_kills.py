"""Kill the jobs of a rehearsed study again and again: its tables have to be those of an undisturbed run, byte by byte.

    python -m benchmarks.study_kills [--kills 20] [--wall_times 20] [--executor slurm] [--folder FOLDER] [--json FILE]
        [--minutes 60]

`slurm` runs jobs with submitit's executor of this machine, `ray` on a Ray cluster of two nodes, each a process group of
this machine. A kill is SIGKILL to a job. A wall time is SIGUSR2, and SIGKILL some seconds later, as SLURM ends a
job; a task of Ray has no wall time, and gets SIGTERM and SIGKILL. Either comes after a random amount of processor time,
so that it depends little on what else the machine does. The study runs in one folder after another until all are spent;
a cell that was lost twice before it got any further is run again by `study.py retry`. Started again, after `--minutes`
or after it was stopped, it goes on with the counts in the folder.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a bare checkout

from aligners.studies.rehearsal import rehearsed  # noqa: E402
from aligners.studies.spec import read_study  # noqa: E402

MAPS = {
    "linear": "Linear",
    "mlp_paper": {"class_path": "MLP", "init_args": {"skip": False}},
    "inn": "INN",
}
OFTEN = {"checkpoint": {"every_n_minutes": 0.001}}
STUDY: dict[str, Any] = {
    "name": "killed",
    "models": {"names": "google/multiberts-seed_{seed}", "seeds": 2},
    "tasks": {"rte": {"text": {"source": "rte"}}},
    "stages": ["pretrained", "finetuned"],
    "data": {"rows": "mean", "batch_size": 32},
    "store": "own",
    "finetune": {"options": {"data": {"batch_size": 4}, **OFTEN}},
    "fit": {
        "options": {"model": {"aligners": MAPS}, "data": {"sites": "blocks"}, **OFTEN}
    },
    "inject": {"options": {"closed_form": []}},
    "similarity": {
        "across_stages": True,
        "options": {"measures": ["cka", "svcca", "rsa"], "controls": True},
    },
    "report": ["similarity", "errors"],
}
STEPS = {
    "finetune": 60,
    "fit": 120,
}  # rather than a rehearsal's, so that jobs live long enough to be killed
RUN = "import submitit; submitit.Job._results_timeout_s = 0.5; from aligners.cli.table import study; study()"
JOBS = {
    "slurm": b"submitit.core._submit",
    "ray": b"ray::_in_worker",
}  # in the command lines of jobs
NOTICE = {"slurm": signal.SIGUSR2, "ray": signal.SIGTERM}
TIMES = ["seconds"]  # columns of tables that no two runs share
LIFE = (
    3.0,
    12.0,
)  # seconds of processor time that a job has at least and at most; its imports take the first of them
GRACE = 8.0  # seconds between a notice and the kill


def main() -> None:
    """Run the study undisturbed, then disturbed until all kills are spent, and compare."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--kills", type=int, default=20)
    arguments.add_argument("--wall_times", type=int, default=20)
    arguments.add_argument("--executor", choices=JOBS, default="slurm")
    arguments.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        help="after which it begins in no further folder",
    )
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--folder", type=Path, default=Path("runs/killed"))
    arguments.add_argument(
        "--json", type=Path, help="file that gets an entry for the executor"
    )
    given = arguments.parse_args()
    begun, given.folder = time.monotonic(), given.folder.resolve()
    counts = given.folder / f"{given.executor}.json"
    entry: dict[str, Any] = dict.fromkeys(
        ("runs", "retries", "kills", "wall_times"), 0
    ) | {"different": []}
    if counts.is_file():
        entry = json.loads(counts.read_text())
    draw = random.Random(given.seed + entry["runs"])
    left = Counter(
        {
            what: max(0, getattr(given, what) - entry[what])
            for what in ("kills", "wall_times")
        }
    )
    file, base = _prepared(given.folder / "rehearsal")
    of_executors: dict[str, dict[str, Any]] = {
        "slurm": {"cluster": "local", "timeout_min": 30},
        "ray": {"num_cpus": 1},
    }
    where = of_executors[given.executor]
    if given.executor == "ray":
        os.environ.update(base)  # which the nodes inherit
        where["address"] = _two_nodes()
    if not (whole := _tables(given.folder / "whole")):
        _study(
            base,
            [
                "run",
                str(file),
                "--folder",
                str(given.folder / "whole"),
                "--workers",
                "2",
            ],
        ).wait()
        whole = _tables(given.folder / "whole")
    assert whole, "the undisturbed run has made no tables"
    options = [
        "--executor",
        given.executor,
        "--executor_options",
        json.dumps(where),
        "--workers",
        "2",
    ]
    while left.total() and time.monotonic() - begun < 60 * given.minutes:
        folder = given.folder / f"{given.executor}-{entry['runs'] + 1}"
        words = ["run", str(file), "--folder", str(folder), *options]
        while _disturbed(
            _study(base, words), given.executor, left, draw, entry, counts
        ):
            entry["retries"] += 1
            words = ["retry", str(folder), *options]
        tables = _tables(folder)
        different = [
            f"{folder.name}/{name}"
            for name in {*whole, *tables}
            if whole.get(name) != tables.get(name)
        ]
        entry["runs"], entry["different"] = (
            entry["runs"] + 1,
            sorted({*entry["different"], *different}),
        )
        counts.write_text(json.dumps(entry))
        print(entry, flush=True)
    if given.json:
        entries = json.loads(given.json.read_text()) if given.json.is_file() else {}
        entries[given.executor] = {**entry, "tables": len(whole)}
        given.json.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
    sys.exit(bool(entry["different"] or left.total()))


def _prepared(folder: Path) -> tuple[Path, dict[str, str]]:
    """The study's file with its stand-ins, and the environment that finds them."""
    file = folder.parent / "study.yaml"
    if not file.is_file():
        content, _ = rehearsed(asdict(read_study(STUDY)), folder)
        for kind, steps in STEPS.items():
            content[kind]["options"]["trainer"] = {"max_steps": steps, "max_epochs": -1}
        file.write_text(yaml.safe_dump(content, sort_keys=False))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return file, {"WANDB_MODE": "disabled", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _two_nodes() -> str:
    """Begin a Ray cluster of two nodes, and return its address."""
    place = tempfile.mkdtemp(dir="/tmp")  # paths of sockets must be short
    os.environ |= {"RAY_TMPDIR": place, "RAY_worker_niceness": "0"}
    from ray.cluster_utils import Cluster

    head = {
        "num_cpus": 1,
        "include_dashboard": False,
        "include_log_monitor": False,
        "temp_dir": f"{place}/ray",
    }
    cluster = Cluster(initialize_head=True, head_node_args=head)
    cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    return str(cluster.address)


def _study(added: dict[str, str], words: list[str]) -> subprocess.Popen[bytes]:
    """Begin a command of `study.py`."""
    return subprocess.Popen(
        [sys.executable, "-c", RUN, *words], env={**os.environ, **added}, cwd=ROOT
    )


def _disturbed(
    study: subprocess.Popen[bytes],
    executor: str,
    left: Counter[str],
    draw: random.Random,
    entry: dict[str, Any],
    counts: Path,
) -> int:
    """Disturb a study until it ends, and return its exit status; what was done is taken from `left` and counted."""
    lives: dict[int, float] = {}  # job -> the processor time at which it is disturbed
    doomed: dict[int, float] = {}  # job -> when it is killed
    while study.poll() is None:
        time.sleep(0.2)
        jobs = _jobs(executor)
        lives = {
            job: lives[job] if job in lives else used + draw.uniform(*LIFE)
            for job, used in jobs.items()
        }
        doomed = {job: at for job, at in doomed.items() if job in jobs}
        for job, used in jobs.items():
            if job in doomed:
                if doomed[job] < time.monotonic():
                    _send(job, signal.SIGKILL)
                continue
            if used < lives[job] or not left.total():
                continue
            what = draw.choice(list(left.elements()))
            if _send(job, signal.SIGKILL if what == "kills" else NOTICE[executor]):
                left[what] -= 1
                entry[what] += 1
                counts.write_text(json.dumps(entry))
                doomed[job] = time.monotonic() + GRACE
    return study.returncode


def _jobs(executor: str) -> dict[int, float]:
    """The processes of our jobs that are at work, each with the seconds of processor time that it has used."""
    jobs, parents = {}, {}
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            parents[int(place.name)] = int(fields[1])
            if JOBS[executor] in (place / "cmdline").read_bytes():
                jobs[int(place.name)] = sum(map(int, fields[11:13])) / os.sysconf(
                    "SC_CLK_TCK"
                )

    def ours(job: int) -> bool:
        return job == os.getpid() or (job in parents and ours(parents[job]))

    return {job: used for job, used in jobs.items() if ours(job)}


def _send(process: int, number: signal.Signals) -> bool:
    with suppress(ProcessLookupError):
        os.kill(process, number)
        return True
    return False


def _tables(folder: Path) -> dict[str, bytes]:
    """Every file of the collected tables, without the times that they name, and of the report's."""
    tables = {
        str(file.relative_to(folder)): file.read_bytes()
        for file in (folder / "report" / "tables").glob("*")
    }
    for file in (folder / "tables").glob("*"):
        table = (
            pd.read_parquet(file)
            if file.suffix == ".parquet"
            else pd.read_csv(file, dtype=str)
        )
        tables[file.name] = table.drop(columns=TIMES, errors="ignore").to_csv().encode()
    return tables


if __name__ == "__main__":
    main()
