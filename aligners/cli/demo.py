"""`make demo`: a few commands in one process, with the time that is left, and their findings in plain words."""

import json
import sys
import time
from pathlib import Path

from aligners.cli import table
from aligners.cli.endings import early_endings
from aligners.cli.log import log_to
from aligners.files.yaml_tables import table_beside
from aligners.progress import tell

STEPS = table_beside(__file__, "demo.yaml")
IMPORTS = 7.0  # seconds that the imports take where a step takes its `seconds`


def run_demo(folder: Path, kind: str = "quick") -> None:
    """Run all steps, each in a folder of its own, show their pictures, and say what was found.

    Args:
        folder: new, for all.
        kind: which steps: `quick` or `full`.
    """
    tell(
        "Maps the hidden states of one small language model to those of another, which then runs on them."
    )
    tell(f"Results, and a log of what is printed here: {folder}")
    begun, done, steps, reports = time.monotonic(), IMPORTS, STEPS[kind], []
    table.import_first()
    from aligners.cli.cells.running import end_run
    from aligners.reports.runs.demo_report import demo_words
    from aligners.reports.screen import open_where_there_is_a_desktop

    for number, step in enumerate(steps, 1):
        left = time_left(
            sum(step["seconds"] for step in steps[number - 1 :]),
            done,
            time.monotonic() - begun,
        )
        tell(
            f"\nStep {number} of {len(steps)}: {step['about']}. About {left} left in all."
        )
        run = folder / step["run"]
        script, *words = (
            word.format(folder=folder) for word in step["command"].split()
        )
        try:
            table.run_script(script, [*words, "--run", str(run)])
        finally:
            end_run(run)
        done += step["seconds"]
        if script == "evaluate":
            reports.append(
                json.loads((run / "report.json").read_text(encoding="utf-8"))["rows"]
            )
        if (picture := run / "penalty.png").is_file():
            tell(f"\nThe picture: {picture}")
            open_where_there_is_a_desktop(picture)
    tell(
        "\n".join(
            ["", *(demo_words(*reports) if kind == "full" else demo_words(reports[-1]))]
        )
    )
    tell(f"Full report, with intervals: {folder / 'report' / 'report.html'}")


def time_left(planned: float, done: float, taken: float) -> str:
    """How long the rest takes if it goes on at the pace so far, in minutes and seconds.

    Args:
        planned: seconds of the steps that are left.
        done: planned seconds of those that are done.
        taken: seconds that these took.
    """
    minutes, seconds = divmod(10 * max(1, round(planned * taken / done / 10)), 60)
    return f"{minutes}:{seconds:02} min" if minutes else f"{seconds} seconds"


def main(kind: str, folder: Path) -> None:
    """Run the demo, with a log; where it is stopped, say how to begin again.

    Args:
        kind: see `run_demo`.
        folder: likewise.
    """
    log_to(folder / "demo.log")
    target = "demo" if kind == "quick" else f"demo-{kind}"
    with early_endings(
        again=f"What is finished is in {folder}. To begin again, run\n  make {target}"
    ):
        run_demo(folder, kind)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
