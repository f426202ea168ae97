"""`make demo`: a few commands in one process, with the remaining time, and their findings in plain words."""

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from aligners.cli import table
from aligners.cli.endings import early_endings
from aligners.cli.log import log_to
from aligners.files.yaml_tables import table_beside
from aligners.progress import tell
from aligners.reports.report import Row

STEPS = table_beside(__file__, "demo.yaml")
IMPORTS = (
    7.0  # seconds that the imports take on a machine where a step takes its `seconds`
)


def run_demo(folder: Path, kind: str = "quick") -> None:
    """Run all steps, each in a folder of its own, show their pictures, and report what was found.

    Args:
        folder: new folder for all steps.
        kind: which steps: `quick` or `full`.
    """
    tell(
        "Maps the hidden states of one small language model to those of another, which then runs on them."
    )
    tell(f"Results, and a log of what is printed here: {folder}")
    begun = time.monotonic()
    steps, reports = STEPS[kind], []
    done, left = IMPORTS, 0.0
    for step in steps:
        left += step["seconds"]
    table.import_first()
    from aligners.reports.runs.demo_report import demo_words

    for number, step in enumerate(steps, 1):
        wait = time_left(left, done, time.monotonic() - begun)
        about = step["about"]
        tell(f"\nStep {number} of {len(steps)}: {about}. About {wait} left in all.")
        rows = _run_step(step, folder)
        done += step["seconds"]
        left -= step["seconds"]
        if rows is not None:
            reports.append(rows)

    if kind != "full":
        reports = reports[-1:]
    tell("\n".join(["", *demo_words(*reports)]))
    tell(f"Full report, with intervals: {folder / 'report' / 'report.html'}")


def _run_step(step: Mapping[str, Any], folder: Path) -> list[Row] | None:
    """Run the command of a step, and show its picture; return the rows of its report, if it evaluates."""
    from aligners.cli.cells.running import end_run
    from aligners.reports.screen import open_where_there_is_a_desktop

    run = folder / step["run"]
    script, *words = step["command"].format(folder=folder).split()
    try:
        table.run_script(script, [*words, "--run", str(run)])
    finally:
        end_run(run)
    picture = run / "penalty.png"
    if picture.is_file():
        tell(f"\nThe picture: {picture}")
        open_where_there_is_a_desktop(picture)
    if script != "evaluate":
        return None
    return json.loads((run / "report.json").read_text(encoding="utf-8"))["rows"]


def time_left(planned: float, done: float, taken: float) -> str:
    """Return how long the rest takes at the pace so far, in minutes and seconds.

    Args:
        planned: seconds of the steps that are left.
        done: planned seconds of those that are done.
        taken: seconds that these took.
    """
    minutes, seconds = divmod(10 * max(1, round(planned * taken / done / 10)), 60)
    return f"{minutes}:{seconds:02} min" if minutes else f"{seconds} seconds"


def main(kind: str, folder: Path) -> None:
    """Run the demo, with a log; if it is stopped, say how to begin again.

    Args:
        kind: see `run_demo`.
        folder: see `run_demo`.
    """
    log_to(folder / "demo.log")
    target = "demo" if kind == "quick" else f"demo-{kind}"
    with early_endings(
        again=f"What is finished is in {folder}. To begin again, run\n  make {target}"
    ):
        run_demo(folder, kind)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
