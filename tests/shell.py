"""The project's commands as a user types them, in processes of their own."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.processes import HANGS

__all__ = ["ROOT", "TWO_RANKS", "WARNED", "command", "metrics", "options"]

ROOT = Path(__file__).parent.parent
TWO_RANKS = ["--trainer.devices", "2", "--trainer.strategy", "ddp"]
WARNED = re.compile(r"^.*(?:Warning: |WARNING ).*$", re.MULTILINE)


def options(**values: Any) -> list[str]:
    """Words of a command line: `__` in a name is a dot; what is no string is written as JSON."""
    each = ((name.replace("__", "."), value) for name, value in values.items())
    return [word for name, v in each for word in (f"--{name}", v if isinstance(v, str) else json.dumps(v))]


def command(folder: Path, *arguments: str) -> Path:
    """Run a command in `folder`; the one run folder that it has made."""
    before = set(folder.glob("runs/*"))
    own = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # of this process: it may end
    done = subprocess.run(
        [sys.executable, str(ROOT / arguments[0]), *arguments[1:]],
        cwd=folder,
        env=own,
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "sync_dist" not in done.stderr
    assert WARNED.findall(done.stderr) == []  # of no rank: nobody could act on it here
    (made,) = set(folder.glob("runs/*")) - before
    assert len(list(made.glob("wandb/offline-run-*/run-*.wandb"))) == 1  # whatever the number of ranks
    (made / "screen.txt").write_text(done.stdout)
    return made


def metrics(folder: Path) -> dict[str, float]:
    """The last value of every figure that a run logged."""
    last: dict[str, float] = {}
    with (folder / "metrics.csv").open() as file:
        for line in csv.DictReader(file):
            last |= {name: float(value) for name, value in line.items() if value}
    return last
