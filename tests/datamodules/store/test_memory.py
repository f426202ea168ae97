"""Memory that is used again is never memory that somebody holds."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs import activations
from tests.world import World

from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.store import read_ahead
from aligners.datamodules.store.read_ahead import Ring


def test_what_is_held_is_never_given_out_again() -> None:
    draw, ring = random.Random(0), Ring(1_000)
    held: list[tuple[int, torch.Tensor]] = []
    for number in range(2_000):
        size = draw.randint(1, 300)
        array = ring.take(size)
        assert array.shape == (size,)
        array[:] = number % 251
        held.append((number % 251, torch.from_numpy(array).view(-1, 1)))  # what shares the memory keeps it
        while len(held) > draw.randint(0, 4):
            held.pop(draw.choice([0, 0, 0, -1]))
        for mark, tensor in held:
            assert (tensor == mark).all()
    assert 0 < ring.fresh < 2_000 * 150 / 4


@pytest.fixture
def data(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PairedActivations:
    """States in a store, read a few batches at a time."""
    monkeypatch.setattr(read_ahead, "ROWS", 250)
    return activations(world, sites=[1, 2], store=tmp_path, batch_size=4)


def test_epochs_after_the_first_take_no_fresh_memory_and_batches_that_are_kept_stay_as_they_are(
    data: PairedActivations,
) -> None:
    for _ in range(3):
        for batch in data.loader("fit", shuffle=True):
            assert batch.stored
    rings = data._stores.rings  # type: ignore[union-attr]
    (ring,) = rings
    assert ring.fresh == 0
    kept = list(data.loader("fit", shuffle=True))  # more than the ring holds
    alone = [_values(batch) for batch in kept]
    for batch, expected in zip(data.loader("fit", shuffle=True), alone, strict=True):
        assert all(map(torch.equal, _values(batch), expected))
    assert ring.fresh > 0
    for batch, expected in zip(kept, alone, strict=True):
        assert all(map(torch.equal, _values(batch), expected))
    for batch, other in zip(*(data.loader("fit", shuffle=True) for _ in range(2)), strict=True):  # each with its own
        assert all(map(torch.equal, _values(batch), _values(other)))
    assert rings[0] is not rings[1]


def test_memory_is_free_once_read_though_a_thread_has_not_let_go_of_its_task(
    data: PairedActivations, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []

    class Slow(ThreadPoolExecutor):
        def submit(self, function: Any, *arguments: Any) -> Any:  # type: ignore[override]
            kept.append(arguments)
            return super().submit(function, *arguments)

    monkeypatch.setattr(read_ahead, "ThreadPoolExecutor", Slow)
    rows = data.loader("fit")
    for _ in range(2):
        for batch in rows:
            assert batch.stored
    (ring,) = rows._rings
    assert kept
    assert ring.fresh == 0


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")  # torch itself pins nothing without a GPU
def test_for_a_gpu_rows_are_read_into_page_locked_memory(
    data: PairedActivations, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [_values(batch) for batch in data.loader("test")]
    pinned, empty = [], torch.empty

    def fake(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        pinned.append((pin_memory, shape))
        return empty(*shape, **options)

    rows = data.loader("test")
    rows.pin_memory = True
    monkeypatch.setattr(read_ahead.torch, "empty", fake)
    found = [_values(batch) for batch in rows]
    assert [pin for pin, shape in pinned if shape].count(True) == len(data.frozen) * len(found)
    for one, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, one, other))


def _values(batch: Any) -> list[torch.Tensor]:
    return [stored.states.clone() for stored in batch.stored.values()]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_that_are_copied_to_a_gpu_while_others_are_read_are_those_of_the_store(data: PairedActivations) -> None:
    expected = [_values(batch) for batch in data.loader("fit", shuffle=True)]
    rows = data.loader("fit", shuffle=True)
    rows.pin_memory = True
    found = []
    for batch in rows:
        assert all(stored.states.is_pinned() for stored in batch.stored.values())
        found.append(batch.to("cuda", non_blocking=True))
    for batch, other in zip(found, expected, strict=True):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(_values(batch), other, strict=True))
