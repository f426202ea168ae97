"""Runs the commands of commands.yaml on the real models, and writes down what they took and what they found.

    python -m benchmarks.real.models FOLDER       # once: makes the models and data sets
    python -m benchmarks.real.run FOLDER [NAME ...]
    python -m benchmarks.real.run FOLDER --json real.json

Each command runs as a process of its own in FOLDER and leaves its run in FOLDER/runs/NAME. One that has finished is not
run again; one that was interrupted is run anew, and a study goes on. The last form collects what is there: for each
command its words, its seconds by the clock and of the processors, the peak of its memory, what it said of time and
memory, and the rows of its report, with the columns that commands.yaml names.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # runs from a bare checkout

from aligners.files.atomic import remove, write_text
from aligners.files.yaml_tables import table_beside
from aligners.reports.finished_runs import file_name, kinds_in
from benchmarks.harness import machine

ROOT = Path(__file__).resolve().parents[2]
TABLE = table_beside(__file__, "commands.yaml")
ESTIMATE = re.compile(r"([\w ]+): step [\d,]+ of ([\d,]*\d).*about ([\d.]+) min left")
MEMORY = re.compile(r"\b\d+(\.\d+)? (GiB|MiB|GB|MB)\b")
TOOK = "took.json"


def words_of(name: str) -> list[str]:
    """The command of this name as words, the folder of its run or study at the end."""
    about = TABLE["commands"][name]
    common = "".join(f" {TABLE['common'][part]}" for part in about.get("common", []))
    script, *words = shlex.split(f"{about['command']}{common}")
    words = [
        str(ROOT / word) if word.startswith("benchmarks/") else word for word in words
    ]
    return [
        script,
        *words,
        "--folder" if script == "study.py" else "--run",
        f"runs/{name}",
    ]


def run(name: str, folder: Path, threads: int) -> bool:
    """Run one command, unless it has finished, and write down what it took; whether it succeeded."""
    place = folder / "runs" / name
    if (place / TOOK).is_file():
        return True
    script, *words = words_of(name)
    if script != "study.py":  # which goes on
        remove(place)
    print(f"{name}: {script} {shlex.join(words)}", flush=True)
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "WANDB_MODE": "disabled",
        "OMP_NUM_THREADS": str(threads),
    }
    began = time.monotonic()
    log = folder / "runs" / f"{name}.log"
    log.parent.mkdir(exist_ok=True)
    command = [sys.executable, str(ROOT / script), *words]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = said_while_it_ran(process, log)
    _, status, used = os.wait4(process.pid, 0)
    took = {
        "seconds": round(time.monotonic() - began, 1),
        "CPU seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak memory, GiB": round(used.ru_maxrss / 2**20, 2),
        "threads": threads,
        **said,
    }
    print(f"{name}: status {status}, {json.dumps(took)}", flush=True)
    if status == 0:
        write_text(place / TOOK, json.dumps(took))
    return status == 0


def said_while_it_ran(process: subprocess.Popen[str], log: Path) -> dict[str, Any]:
    """Write a command's output into its log; what it said of memory, and of each phase the first estimate of its rest.

    An estimate is `[phase, seconds that it said were left, seconds that were left]`.
    """
    assert process.stdout is not None
    memory: list[str] = []
    phases: dict[str, dict[str, float]] = {}
    last = None
    with log.open("w", encoding="utf-8", buffering=1) as output:
        for line in process.stdout:
            output.write(line)
            now = time.monotonic()
            if last:
                phases[last]["end"] = now
            last = None
            if MEMORY.search(line):
                memory.append(line.strip())
            if estimate := ESTIMATE.match(line):
                last = f"{estimate[1]}, {estimate[2]} steps"
                phases.setdefault(
                    last, {"begin": now, "end": now, "said": 60 * float(estimate[3])}
                )
    estimates = [
        [phase, round(about["said"]), round(about["end"] - about["begin"])]
        for phase, about in phases.items()
    ]
    return {"estimates": estimates, "said of memory": memory[:4]}


def found(name: str, folder: Path) -> dict[str, Any] | None:
    """What a command took and found; None if it has not finished."""
    place = folder / "runs" / name
    if not (place / TOOK).is_file():
        return None
    kinds = kinds_in(place)  # adapters leave no report
    about = _read(place / f"{file_name(kinds[0])}.json") if kinds else {}
    report = {"rows": [], "findings": [], "cells": cells_of(place)} | about
    columns, where = (
        TABLE["commands"][name]["columns"],
        TABLE["commands"][name].get("where", {}),
    )
    chosen = [
        row
        for row in report["rows"]
        if all(row.get(column) in wanted for column, wanted in where.items())
    ]
    tables = {
        "rows": [{column: row.get(column) for column in columns} for row in chosen]
    }
    tables |= {
        table: report[table] for table in TABLE["commands"][name].get("tables", [])
    }
    for table, rows in tables.items():
        tables[table] = [
            {key: rounded(value) for key, value in row.items() if value is not None}
            for row in rows
        ]
    return {
        "command": shlex.join(words_of(name)),
        **_read(place / TOOK),
        "findings": report["findings"],
        **tables,
    }


def cells_of(study: Path) -> list[dict[str, Any]]:
    """What the cells of a study were planned to take, in seconds, what they took, and what they found."""
    planned = _read(study / "plan.json") if (study / "plan.json").is_file() else {}
    cells = sorted(
        map(_read, study.glob("cells/*/result.json")), key=lambda cell: cell["finished"]
    )
    return [
        {
            **{key: cell.get(key) for key in ("kind", "seconds", "findings")},
            "planned": planned.get(cell["cell"]),
        }
        for cell in cells
    ]


def _read(file: Path) -> Any:
    return json.loads(file.read_text(encoding="utf-8"))


def rounded(value: Any) -> Any:
    """A number with five digits that matter: more would be rounding of another machine."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main() -> None:
    """Run what is asked for, or collect."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="made by benchmarks.real.models")
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"of a command: {', '.join(TABLE['commands'])}",
    )
    parser.add_argument(
        "--threads", type=int, default=os.cpu_count(), help="CPU threads of a command"
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write what is finished there, and run nothing",
    )
    options = parser.parse_args()
    unknown = set(options.names) - set(TABLE["commands"])
    if unknown:
        parser.error(
            f"expected names of commands, but got {', '.join(sorted(unknown))}"
        )
    if options.json:
        finished = {name: found(name, options.folder) for name in TABLE["commands"]}
        lines = [
            f"{json.dumps(name)}: {json.dumps(about)}"
            for name, about in finished.items()
            if about
        ]
        commands = ",\n".join(lines)
        write_text(
            options.json,
            f'{{"machine": {json.dumps(machine("cpu"))}, "commands": {{\n{commands}\n}}}}\n',
        )
    elif not all(
        [
            run(name, options.folder, options.threads)
            for name in options.names or TABLE["commands"]
        ]
    ):
        raise SystemExit("Some commands failed: their logs are in the folder `runs`.")


if __name__ == "__main__":
    main()
