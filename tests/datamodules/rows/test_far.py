"""Rows that are far from all others: found by their distance, left out of fits and errors, counted and said."""

from pathlib import Path

import pytest
import torch
from tests.sinks import sink_folder
from tests.world import World, read_texts

from aligners.api.model_injection import inject
from aligners.api.model_states import states
from aligners.datamodules.layers import LayerActivations
from aligners.datamodules.model_texts import stitched_texts
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.pairings import pair_states
from aligners.datamodules.rows.far import Reach, far_rows


@pytest.fixture(scope="module")
def sinks(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two models whose first token's states are some hundred times as large as the others."""
    folder = tmp_path_factory.mktemp("sinks")
    return [str(sink_folder(folder / str(seed), seed=seed)) for seed in range(2)]


def states_of(sinks: list[str], world: World, **options: object) -> PairedActivations:
    """Their tokens, paired at the last block."""
    return pair_states(*sinks, sites=[3], text=world.text, max_length=32, **options)


def test_far_rows_are_those_that_hold_the_variance() -> None:
    draw = torch.Generator().manual_seed(0)
    states = torch.randn(2, 200, 32, generator=draw) + 7
    assert not far_rows(states).any()
    states[1, [3, 50]] += 20  # at one layer: about 113 off, where half of the rows are within 5.6
    assert far_rows(states).nonzero()[:, 0].tolist() == [3, 50]
    assert far_rows(states[0]).sum() == 0


def test_equal_rows_and_wide_distributions_have_no_far_rows() -> None:
    draw = torch.Generator().manual_seed(0)
    equal = torch.randn(1, 1, 16, generator=draw).repeat(1, 50, 1)
    assert not far_rows(equal + 1e-7 * torch.randn(1, 50, 16, generator=draw)).any()
    for off in (12, 100):  # some seven median distances, and many more
        halves = torch.randn(1, 60, 16, generator=draw)
        halves[:, :25] += off  # two fifths of all: no exceptions
        assert not far_rows(halves).any()
        halves[:, 1:25] -= off
        assert far_rows(halves).nonzero().flatten().tolist() == [0]


def test_sublayers_may_vary_more() -> None:
    states = torch.randn(1, 300, 64, generator=torch.Generator().manual_seed(0))
    states[:, 0] *= 7
    assert far_rows(states).tolist() == [True] + 299 * [False]
    assert not far_rows(states, "mlp").any()
    assert Reach.of(states, "mlp").radius == pytest.approx(2 * Reach.of(states).radius)


def test_far_rows_are_left_out_of_fitting_and_come_beside_elsewhere(sinks: list[str], world: World) -> None:
    data = states_of(sinks, world, held_out_types=0.0)
    fitted = list(data.paired("fit"))
    assert all(batch.whole is None and batch.x.norm(dim=-1).max() < 100 for batch in fitted)
    kept, whole = 0, 0
    for batch in data.paired("test"):
        assert batch.whole is not None
        assert batch.whole.rows.far is not None
        assert batch.whole.rows.place[batch.whole.rows.far].eq(0).all()
        assert torch.equal(batch.whole.x[:, ~batch.whole.rows.far], batch.x)
        assert batch.rows.place.min() == 1  # places stay what they were
        assert sum(batch.rows.counts) == len(batch.rows)
        kept, whole = kept + len(batch.rows), whole + len(batch.whole.rows)
    assert whole - kept == len(data.split("test"))
    (caution,) = data.cautions
    assert "170 of" in caution
    assert "each the first of its text" in caution


def test_far_rows_can_be_kept(sinks: list[str], world: World) -> None:
    data = states_of(sinks, world, far_rows="keep", held_out_types=0.0)
    assert max(float(batch.x.norm(dim=-1).max()) for batch in data.paired("fit")) > 100
    batch = next(iter(data.paired("test")))
    assert batch.whole is None
    assert batch.rows.far is not None
    assert batch.counterpart is not None
    assert torch.equal(batch.counterpart.x, batch.x[:, ~batch.rows.far])
    assert "They are kept" in data.cautions[0]


def test_models_without_far_rows_are_read_as_before(world: World) -> None:
    data = pair_states(world.model_x, world.model_y, text=world.text, max_length=32)
    batch = next(iter(data.paired("test")))
    assert batch.whole is batch.counterpart is batch.rows.far is None
    assert not data.cautions


def test_layers_leave_the_same_rows_out_of_all_models(sinks: list[str], world: World) -> None:
    data = LayerActivations(
        [world.model_x, sinks[0]], rows="tokens", special_tokens=True, text=world.text, max_length=32
    )
    batch = next(iter(data.batches("test")))
    assert batch.whole is not None
    assert len(batch.whole.rows[0]) - len(batch.rows[0]) == len(batch.texts.text)
    for near, every in zip(batch.states, batch.whole.states, strict=True):
        assert torch.equal(near, every[:, ~batch.whole.rows[0].far])


def test_a_store_gives_the_same_rows(sinks: list[str], world: World, tmp_path: Path) -> None:
    plain, stored = (states_of(sinks, world, store=store) for store in (None, tmp_path))
    for a, b in zip(plain.paired("fit"), stored.paired("fit"), strict=True):
        assert torch.allclose(a.x, b.x, atol=1e-4)


def test_stitching_says_so_and_keeps_them(sinks: list[str], world: World) -> None:
    data = stitched_texts(sinks, sites=[2], text=world.text, max_length=32)
    data.setup("test")
    data.test_dataloader()
    (far,) = [caution for caution in data.cautions if "far from all others" in caution]
    assert "held-out rows that were checked" in far
    assert "They count like any other" in far


def test_means_have_their_far_tokens_in_them_which_is_said(sinks: list[str], world: World) -> None:
    data = states_of(sinks, world, rows="mean")
    batch = next(iter(data.paired("test")))
    assert len(batch.rows) == len(batch.texts.text)
    (caution,) = data.cautions
    assert "tokens that were checked" in caution
    assert "They enter the means of their texts" in caution


def test_states_and_injection_of_the_python_interface_say_so_too(
    sinks: list[str], world: World, caplog: pytest.LogCaptureFixture
) -> None:
    texts = read_texts(world.test)[0]
    every = states(sinks, texts, 3)
    assert "25 of" in caplog.text
    kept = states(sinks, texts, 3, far_rows="leave_out")
    assert [len(a) - len(b) for a, b in zip(every, kept, strict=True)] == [25, 25]
    assert max(float(rows.norm(dim=-1).max()) for rows in kept) < 100
    own = inject(sinks[1], sinks[1], lambda rows: rows, texts, site=2, far_rows="leave_out")
    assert own.penalty == pytest.approx(0, abs=1e-6)
    nothing = [inject(*sinks, lambda rows: rows * 0, texts, site=2, far_rows=how).loss for how in ("keep", "leave_out")]
    assert nothing[0] != nothing[1]  # the first token keeps its own states
