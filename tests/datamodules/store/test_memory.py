"""Rows that are read ahead are those of the store, whoever still holds earlier ones, and page-locked for a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs import activations
from tests.world import World

from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.store import read_ahead


@pytest.fixture
def data(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PairedActivations:
    """States in a store, read a few batches at a time."""
    monkeypatch.setattr(read_ahead, "ROWS", 250)
    return activations(world, sites=[1, 2], store=tmp_path, batch_size=4)


def values(batch: Any) -> list[torch.Tensor]:
    return [states.clone() for stored in batch.stored.values() for states in stored.states]


def test_batches_that_are_kept_stay_as_they_are(data: PairedActivations) -> None:
    kept = list(data.loader("fit", shuffle=True))
    alone = [values(batch) for batch in kept]
    for batch, other, expected in zip(*(data.loader("fit", shuffle=True) for _ in range(2)), alone, strict=True):
        assert expected
        assert all(map(torch.equal, values(batch), expected))
        assert all(map(torch.equal, values(other), expected))
    assert all(all(map(torch.equal, values(batch), own)) for batch, own in zip(kept, alone, strict=True))


@pytest.mark.filterwarnings("ignore:.*pin_memory.*")  # torch itself pins nothing without a GPU
def test_for_a_gpu_rows_are_read_into_page_locked_memory(
    data: PairedActivations, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [values(batch) for batch in data.loader("test")]
    pinned, empty = [], torch.empty

    def fake(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        pinned.append((pin_memory, shape))
        return empty(*shape, **options)

    rows = data.loader("test")
    rows.pin_memory = True
    monkeypatch.setattr(read_ahead.torch, "empty", fake)
    found = [values(batch) for batch in rows]
    sites = 2
    assert [pin for pin, shape in pinned if shape].count(True) == len(data.frozen) * sites * len(found)
    for one, other in zip(found, expected, strict=True):
        assert all(map(torch.equal, one, other))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_that_are_copied_to_a_gpu_while_others_are_read_are_those_of_the_store(data: PairedActivations) -> None:
    expected = [values(batch) for batch in data.loader("fit", shuffle=True)]
    rows = data.loader("fit", shuffle=True)
    rows.pin_memory = True
    found = []
    for batch in rows:
        assert all(states.is_pinned() for stored in batch.stored.values() for states in stored.states)
        found.append(batch.to("cuda", non_blocking=True))
    for batch, other in zip(found, expected, strict=True):
        assert all(torch.equal(a.cpu(), b) for a, b in zip(values(batch), other, strict=True))
