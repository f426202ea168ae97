"""The project's commands as a user types them, in processes of their own."""

import csv
import json
import re
from pathlib import Path
from typing import Any

from tests.processes import Started, all_ended, rank_addresses

TWO_RANKS = ["--trainer.devices", "2", "--trainer.strategy", "ddp"]
WARNED = re.compile(r"^.*(?:Warning: |WARNING ).*$", re.MULTILINE)


def options(**values: Any) -> list[str]:
    """Words of a command line: `__` in a name is a dot; what is no string is written as JSON."""
    each = ((name.replace("__", "."), value) for name, value in values.items())
    return [word for name, v in each for word in (f"--{name}", v if isinstance(v, str) else json.dumps(v))]


def printed(folder: Path, script: str, *words: str, ranks: int = 1) -> str:
    """What a command prints that ends well, in `folder`, on one rank or on two."""
    addresses = [{}] if ranks == 1 else rank_addresses(ranks)
    given = [*words, *(TWO_RANKS if ranks == 2 else ())]
    each = [Started(folder, script, *given, environment=address) for address in addresses]
    ends = all_ended([started.process for started in each])
    out, err = ("".join(said) for said in zip(*(started.printed() for started in each), strict=True))
    assert not any(ends), out[-3000:] + err[-3000:]
    assert "sync_dist" not in err
    assert WARNED.findall(err) == []  # of no rank: nobody could act on it here
    return out


def command(folder: Path, script: str, *words: str, ranks: int = 1) -> Path:
    """Run a command in `folder`, on one rank or on two; the one run folder that it has made."""
    before = set(folder.glob("runs/*"))
    out = printed(folder, script, *words, ranks=ranks)
    (made,) = set(folder.glob("runs/*")) - before
    assert len(list(made.glob("wandb/offline-run-*/run-*.wandb"))) == 1  # whatever the number of ranks
    (made / "screen.txt").write_text(out)
    return made


def metrics(folder: Path) -> dict[str, float]:
    """The last value of every figure that a run logged."""
    last: dict[str, float] = {}
    with (folder / "metrics.csv").open() as file:
        for line in csv.DictReader(file):
            last |= {name: float(value) for name, value in line.items() if value}
    return last
