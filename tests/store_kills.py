"""Kills writers of a store of states at random moments: what is then completed has to be what a quiet one leaves.

`python -m tests.store_kills --kills 50 --json FILE` kills as many writers, each of a store of its own, and writes what
it found; a test kills a few.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.processes import HANGS, PROCESSES
from tests.world import World, make_world

SHARD = 25_000  # bytes: a few shards at each site


def everything(store: Path) -> dict[str, str]:
    """Hash of every file of a store but locks and dates of use."""
    return {
        str(path.relative_to(store)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(store.rglob("*"))
        if path.is_file() and path.suffix != ".lock" and path.name != "used"
    }


def write(world: World, store: Path, **options: Any) -> None:
    """Write the states of two models on the fitting texts, at all sites."""
    from tests.runs import activations

    from aligners.datamodules.store import stored_states

    stored_states.SHARD = SHARD
    activations(world, sites="all", store=store, **options).loader("fit")


def _write_quietly(world: World, store: Path, options: dict[str, Any]) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    write(world, store, **options)


class Kills:
    """Kills writers in a folder, at moments that a seed decides, and counts what comes of it.

    Args:
        folder: of the stores.
        seed: of the moments.
        options: of the data module.
    """

    def __init__(self, folder: Path, seed: int = 0, **options: Any) -> None:
        self.folder, self.draw, self.counts, self.options = folder, random.Random(seed), Counter[str](), options
        self.world = make_world(folder)
        write(self.world, folder / "warm", **options)  # the texts are tokenised now
        began = time.monotonic()
        write(self.world, folder / "whole", **options)
        self.seconds, self.expected = time.monotonic() - began, everything(folder / "whole")
        self.shards = sum(path.endswith(".safetensors") for path in self.expected)

    def kill(self, number: int) -> None:
        """Kill a writer at a random moment after a random shard, complete its store, and compare.

        One that had ended by then counts for nothing.
        """
        first = self.draw.randrange(self.shards)
        store = self.folder / f"killed-{number}"
        writer = PROCESSES.Process(target=_write_quietly, args=(self.world, store, self.options))
        writer.start()
        while len(list(store.rglob("*.safetensors"))) < first and writer.is_alive():
            time.sleep(0.001)
        time.sleep(self.draw.uniform(0, 1) * self.seconds / self.shards)
        writer.kill()
        writer.join(HANGS)
        if writer.exitcode != -signal.SIGKILL:
            self.counts["ended before they were killed"] += 1
            return
        self.counts["killed while writing"] += 1
        unfinished, there = list(store.rglob("*.unfinished")), set(everything(store))
        self.counts["left unfinished files"] += bool(unfinished)
        self.counts["shards that were there, in all"] += sum(path.endswith(".safetensors") for path in there)
        write(self.world, store, **self.options)
        same = everything(store) == self.expected
        self.counts["bit-identical to the undisturbed store" if same else "DIFFERENT"] += 1


def kill_writers(made: Kills, kills: int) -> Counter[str]:
    """Kill so many writers, each of a store of its own; what came of it."""
    number = 0
    while made.counts["killed while writing"] < kills:
        made.kill(number)
        number += 1
    made.counts["shards of a store"] = made.shards
    return made.counts


def main() -> None:
    """Kill, and say what came of it."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--kills", type=int, default=50)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--json", type=Path, metavar="FILE", help="write the counts there too")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(prefix="aligners-store-") as folder:
        counts = json.dumps(kill_writers(Kills(Path(folder), options.seed), options.kills), indent=2)
    print(counts)
    if options.json is not None:
        options.json.write_text(f"{counts}\n")


if __name__ == "__main__":
    main()
