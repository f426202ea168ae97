from pathlib import Path

import numpy as np
import pytest
from tests.processes import HANGS, PROCESSES
from tests.store_kills import Kills, everything, kill_writers, write
from tests.world import World

from aligners.datamodules.store.stored_states import StoredStates, plan_shards


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory) -> Kills:
    return Kills(tmp_path_factory.mktemp("kills"))


def test_stores_of_killed_writers_are_completed_bit_by_bit(kills: Kills) -> None:
    counts = kill_writers(kills, 2)
    assert counts["killed while writing"] == counts["bit-identical to the undisturbed store"] == 2
    assert 0 < counts["shards that were there, in all"] < 2 * counts["shards of a store"]


def test_pooled_rows_of_killed_writers_are_completed_bit_by_bit(tmp_path: Path) -> None:
    made = Kills(tmp_path, rows="mean", store_rows="texts")
    assert kill_writers(made, 1)["bit-identical to the undisturbed store"] == 1
    assert 0 < made.counts["shards that were there, in all"] < made.shards


def _write_and_count(world: World, store: Path, report: Path) -> None:
    written, real = [], StoredStates.record

    def record(states: StoredStates, shard: int, checksums: dict[int, str]) -> None:
        written.append(shard)
        real(states, shard, checksums)

    StoredStates.record = record  # type: ignore[assignment, method-assign]
    write(world, store)
    report.write_text(str(len(written)))


def test_two_processes_share_the_work(kills: Kills, tmp_path: Path) -> None:
    store, reports = tmp_path / "shared", [tmp_path / f"{number}.txt" for number in range(2)]
    both = [PROCESSES.Process(target=_write_and_count, args=(kills.world, store, report)) for report in reports]
    for process in both:
        process.start()
    for process in both:
        process.join(HANGS)
    assert [process.exitcode for process in both] == [0, 0]
    assert everything(store) == kills.expected
    shards = list(store.glob("*/sites/01/*.safetensors"))  # each is written once, at all sites
    assert sum(int(report.read_text()) for report in reports) == len(shards)


def test_shards_hold_whole_texts() -> None:
    many, few = [3, 3, 3], [5, 1, 1, 9, 2]
    for lengths, most, bounds in ((many, 30, [0, 3]), (many, 1, [0, 1, 2, 3]), (few, 12, [0, 2, 4, 5])):
        assert plan_shards(np.array(lengths), 2, most) == bounds
