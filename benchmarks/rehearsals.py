"""Rehearse the studies of the package and of the papers: their cells, their tables and figures, and the time.

    python -m benchmarks.rehearsals [NAME ...] [--folder FOLDER] [--json FILE] [-- OPTION ...]

Each study, NAME in its file, runs as `study.py run FILE --rehearse`. What is counted: cells by state, tables and
figures that were made, those that website/coverage.yaml names for the study and that were not, and seconds, of the
clock and of all processes. The exit status is 1 if a cell has failed or one of those is missing.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # runs from a bare checkout

from aligners.reports.study.registry import PRINTED, TABLES  # noqa: E402
from aligners.studies.rehearsals.notes import NOTES, REHEARSAL  # noqa: E402
from aligners.studies.study_folder import StudyFolder  # noqa: E402

FILES = {
    yaml.safe_load(file.read_text(encoding="utf-8"))["name"]: file
    for file in sorted([*ROOT.glob("aligners/configs/study/*.yaml"), *ROOT.glob("papers/*/*.yaml")])
    if file.name not in (TABLES, PRINTED)
}  # of studies, by their names


def main(words: list[str]) -> int:
    """Rehearse studies, and write what came of each as soon as it is done."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("names", nargs="*", help="studies; default: all")
    arguments.add_argument(
        "--folder", type=Path, default=Path("runs"), help="in which the rehearsals are written"
    )
    arguments.add_argument("--json", type=Path, help="file that gets an entry for each study")
    own, options = (
        (words[: words.index("--")], words[words.index("--") + 1 :])
        if "--" in words
        else (words, [])
    )
    given = arguments.parse_args(own)
    entries = json.loads(given.json.read_text()) if given.json and given.json.is_file() else {}
    failed = False
    for name in given.names or sorted(FILES):
        entries[name] = entry = rehearsed(name, given.folder, options)
        print(name, json.dumps(entry), flush=True)
        failed = failed or bool(entry["status"] or entry["missing"])
        if given.json:
            given.json.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")
    return int(failed)


def rehearsed(name: str, folder: Path, options: list[str]) -> dict[str, Any]:
    """Rehearse a study.

    Args:
        name: of the study.
        folder: in which its folder is made.
        options: further ones of `study.py run`.

    Returns:
        What came of it, as plain values.
    """
    before, began = _processor_seconds(), time.monotonic()
    command = [
        sys.executable,
        str(ROOT / "study.py"),
        "run",
        str(FILES[name]),
        "--rehearse",
        "--folder",
        str(folder / name),
    ]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    study = folder / name / REHEARSAL
    (folder / f"{name}.txt").write_text(done.stdout + done.stderr)
    entry: dict[str, Any] = {
        "status": done.returncode,
        "seconds": round(time.monotonic() - began),
        "processor_seconds": round(_processor_seconds() - before),
    }
    report = study / "report"
    if (study / "plan.json").is_file():
        cells = StudyFolder(study)
        states = Counter(
            (cells.described(number)["kind"], cells.state(number)) for number in cells.cells
        )
        entry["cells"] = {
            f"{kind} {state}": count for (kind, state), count in sorted(states.items())
        }
    made = sorted(
        file.stem
        for kind, end in (("tables", "md"), ("figures", "png"))
        for file in (report / kind).glob(f"*.{end}")
    )
    notes = (
        json.loads((study / NOTES).read_text()) if (study / NOTES).is_file() else {"stood_in": []}
    )
    stood_in = Counter(line["what"].removeprefix("the ") for line in notes["stood_in"])
    return {
        **entry,
        "made": made,
        "missing": sorted(wanted(name) - {*made}),
        "stood_in": dict(stood_in),
    }


def wanted(name: str) -> set[str]:
    """The tables and figures that the coverage of the papers names for a study."""
    rows = [
        row
        for rows in yaml.safe_load((ROOT / "website" / "coverage.yaml").read_text()).values()
        for row in rows
    ]
    return {
        item
        for row in rows
        if str(row.get("run", "")).split()[:4]
        == ["python", "study.py", "run", str(FILES[name].relative_to(ROOT))]
        for item in row.get("report", [])
    }


def _processor_seconds() -> float:
    """Of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main(sys.argv[1:]))
