"""`make demo`: three commands one after another, with the time that is left, and their findings in plain words."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from aligners.cli.endings import early_endings
from aligners.reports.runs.demo import demo_words
from aligners.reports.screen import open_where_there_is_a_desktop

BEGINNING = (
    "Maps two small language models to each other, then two classifiers: about 5 minutes with two free cores, and 5 "
    "more the first time, when the models are made."
)
REPORT = "report.json"


class Step(NamedTuple):
    """One command of the demo.

    Attributes:
        said: what it does.
        minutes: that it takes, about, with two cores to itself.
        words: the command.
    """

    said: str
    minutes: float
    words: list[str]


def run_demo(folder: Path) -> None:
    """Run all steps, each in a folder of its own, then say what was found, and open a picture.

    Args:
        folder: new, for all.
    """
    print(BEGINNING, flush=True)
    steps, begun, done = steps_in(folder), time.monotonic(), 0.0
    for number, step in enumerate(steps, 1):
        left = minutes_left(sum(step.minutes for step in steps[number - 1 :]), done, (time.monotonic() - begun) / 60)
        print(f"\nStep {number} of {len(steps)}: {step.said}. About {left} left.", flush=True)
        ended = subprocess.run([sys.executable, *step.words]).returncode
        if ended:  # it has said why
            sys.exit(ended)
        done += step.minutes
    picture = folder / "report" / "penalty.png"
    reports = [json.loads((folder / name / REPORT).read_text(encoding="utf-8")) for name in ("report", "classifiers")]
    words = demo_words(*(report["rows"] for report in reports))
    print("\n".join(["", *words, f"The picture: {picture}. Everything else is in {folder}."]))
    open_where_there_is_a_desktop(picture)


def steps_in(folder: Path) -> list[Step]:
    """The commands of the demo, whose runs are in a folder."""
    fit, report, classifiers = (str(folder / name) for name in ("fit", "report", "classifiers"))
    stored = ["--checkpoints+", f"{fit}/aligners.safetensors", "--closed_form", "[]"]
    closed = ["--data.sites", "blocks", "--closed_form", "[permutation,procrustes,linear]"]
    return [
        Step(
            "eight maps from one language model to the other, at every block", 3,
            ["train.py", "fit", "--config", "demo", "--run", fit],
        ),
        Step("mapped states into the second language model", 1, ["evaluate.py", "inject", *stored, "--run", report]),
        Step("the same with two classifiers", 1, ["evaluate.py", "inject", *closed, "--run", classifiers]),
    ]  # fmt: skip


def minutes_left(planned: float, done: float, taken: float) -> str:
    """How long the rest takes, in words, if it goes on at the pace so far.

    Args:
        planned: minutes of the steps that are left.
        done: planned minutes of those that are done.
        taken: minutes that these took.
    """
    left = max(1, round(planned * (taken / done if done else 1)))
    return f"{left} minute{'s' if left > 1 else ''}"


if __name__ == "__main__":
    with early_endings():
        run_demo(Path(sys.argv[1]))
