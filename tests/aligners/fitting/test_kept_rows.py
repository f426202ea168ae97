"""The commands fit maps that keep rows as Python does on the rows of the draw, whatever the batches, store or stops."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.interrupting import strike
from tests.ranks import two_ranks
from tests.runs import activations, quiet_trainer, related_rows, state
from tests.world import World

from aligners.callbacks.checkpoint import SaveAligners
from aligners.cli.table import evaluate
from aligners.datamodules.rows.read_rows import PairedBatch, PairReader
from aligners.datamodules.rows.token_pairs import row_keys
from aligners.fitting.alignment import Alignment
from aligners.fitting.parts import bytes_a_site
from aligners.fitting.saved_bank import ALIGNMENT, load_bank
from aligners.injection.injecting import InjectionEvaluation
from aligners.injection.methods import BY_ROWS
from aligners.maps.by_rows import drawn_rows
from aligners.maps.by_rows.drawn_rows import KeptRows
from aligners.maps.by_rows.kept_rows import ByRows, PairedRows
from aligners.maps.by_rows.kernel_ridge import KernelRidge
from aligners.maps.by_rows.nearest_neighbours import NearestNeighbours
from aligners.maps.by_rows.relative import Relative
from aligners.maps.linear import Linear
from aligners.similarity.algebra.moments import moments_of

ROWS, SITES = 90, [1, 3]
MAPS: dict[str, Any] = {
    "nearest_neighbours": partial(NearestNeighbours, k=3, rows=ROWS, seed=5),
    "kernel_ridge": partial(KernelRidge, landmarks=24, rows=ROWS),
    "relative": partial(Relative, anchors=20, rows=60),  # of the draw of 90
    "linear": Linear,
}


def fit(world: World, callbacks: Any = None, resume: Path | None = None, both: bool = False, **options: Any) -> Any:
    module = Alignment(MAPS, both_directions=both)
    data = activations(world, **{"sites": SITES} | options)
    quiet_trainer(callbacks=callbacks).fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
    return module


def draw(world: World, split: Any, budget: int, seed: int) -> tuple[PairedRows, PairedRows]:
    """The rows of a split with the smallest keys, found among all of them at once, and all of them."""
    batches: list[PairedBatch] = list(activations(world, sites=SITES, batch_size=8).paired(split))
    x, y = (torch.cat([getattr(batch, side) for batch in batches], 1) for side in "xy")
    text = torch.cat([batch.text for batch in batches])
    place = torch.cat([batch.rows.place for batch in batches])
    keys = row_keys(seed, text, place).tolist()
    chosen = sorted(range(len(keys)), key=keys.__getitem__)[:budget]
    return PairedRows(x[:, chosen], y[:, chosen]), PairedRows(x, y)


@pytest.fixture(scope="module")
def module(world: World) -> Alignment:
    found: Alignment = fit(world, both=True)
    return found


def test_maps_are_those_that_python_fits_to_the_rows_of_the_draw(world: World, module: Alignment) -> None:
    x = draw(world, "test", 50, 0)[1].x
    y = draw(world, "test", 50, 0)[1].y
    for one in module.fits():
        if not isinstance(one.aligner, ByRows):
            continue
        seed, rows = one.aligner.seed, one.aligner.rows
        kept, every = draw(world, "fit", rows, seed)
        others, _ = draw(world, "validation", rows, seed)
        assert kept.x.shape[1] == rows < every.x.shape[1]
        if one.route == "1_0":
            kept, every, others = kept.swap(), every.swap(), others.swap()
        expected = MAPS[one.name](2, 16, 16).double()
        expected.fit(moments_of(*every), kept, others)
        source, _ = one.orient(x, y)
        torch.testing.assert_close(one.aligner(source), expected(source.double()).float(), rtol=1e-3, atol=1e-3)
        assert one.aligner.options() == expected.options()


def test_batches_and_a_store_change_nothing(world: World, module: Alignment, tmp_path: Path) -> None:
    rows, _ = draw(world, "test", 50, 0)
    store = {"store": tmp_path}
    options: list[dict[str, Any]] = [{"batch_size": 8}, {"batch_size": 64}, store, store]  # which is read, once written
    for one in options:
        other = fit(world, both=True, **one)
        for mine, again in zip(module.fits(), other.fits(), strict=True):
            source, _ = mine.orient(*rows)
            expected = mine.aligner(source)
            torch.testing.assert_close(again.aligner(source), expected, rtol=1e-3, atol=1e-3, msg=f"{one} {mine.key}")
    assert list(tmp_path.rglob("*.safetensors"))


def kept_and_mapped(rank: int, world: World) -> dict[str, torch.Tensor]:
    """Rows that the maps keep, and what they make of others, of a fit on one rank (-1) or on two."""
    two: dict[str, Any] = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": False} if rank >= 0 else {}
    module = Alignment(MAPS, both_directions=True)
    quiet_trainer(**two).fit(module, datamodule=activations(world, sites=SITES, batch_size=8))
    rows, _ = draw(world, "test", 50, 0)
    found = {}
    for one in module.fits():
        source, _ = one.orient(*rows)
        found[f"{one.key}"] = one.aligner(source).detach()
        for name, kept in one.aligner.named_buffers():
            if isinstance(one.aligner, NearestNeighbours) and name.startswith("kept"):
                found[f"{one.key} {name}"] = kept
    return found


@pytest.mark.slow
def test_two_ranks_draw_the_rows_and_fit_the_maps_of_one(world: World, tmp_path: Path) -> None:
    alone = kept_and_mapped(-1, world)
    drawn = [rows for name, rows in alone.items() if name.endswith("kept_x")]
    assert [rows.shape for rows in drawn] == [(2, ROWS, 16)] * 2
    for found in two_ranks(partial(kept_and_mapped, world=world), tmp_path, meet=False):
        assert set(found) == set(alone)
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-3, msg=name)


def test_an_interrupted_draw_goes_on_to_the_same_bits(world: World, tmp_path: Path) -> None:
    fit(world, [SaveAligners(tmp_path / "whole")])
    with strike(PairReader, "read", 3), pytest.raises(SystemExit):
        fit(world, [SaveAligners(tmp_path / "cut")])
    last = tmp_path / "cut" / "last.ckpt"
    reading = state(last)[ALIGNMENT]["reading"]
    assert reading["batches"] == 3
    assert {seed: len(part["key"]) for seed, part in reading["kept"].items()} == {0: ROWS, 5: ROWS}
    fit(world, [SaveAligners(tmp_path / "cut")], last)
    ends = [tmp_path / folder / "aligners.safetensors" for folder in ("whole", "cut")]
    assert ends[0].read_bytes() == ends[1].read_bytes()


def test_a_fitted_map_is_resumed_and_loaded_with_the_rows_it_has(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(MAPS, "nearest_neighbours", NearestNeighbours)  # of up to 10,000 rows, which are not there
    with strike(Alignment, "validation_step", 1), pytest.raises(SystemExit):
        fit(world, [SaveAligners(tmp_path)])
    fit(world, [SaveAligners(tmp_path)], tmp_path / "last.ckpt")
    bank = load_bank(tmp_path / "aligners.safetensors")
    held = bank.maps["0_1"]["nearest_neighbours"]
    assert isinstance(held, NearestNeighbours)
    assert held.rows == 10_000
    assert held.kept_x.shape[1] == int(bank.moments.n)  # type: ignore[union-attr]


def errors(module: InjectionEvaluation) -> dict[tuple[str, str, int], float]:
    rows = [row for row in module.rows if row["rows"] == "tokens" and row["method"] in {*BY_ROWS, "linear"}]
    return {(row["method"], row["direction"], row["site_x"]): row["fvu"] for row in rows}


def test_injection_fits_what_no_checkpoint_holds_as_a_fit_does(world: World) -> None:
    maps = {**BY_ROWS, "linear": Linear}
    found = []
    for aligners in (maps, {"linear": Linear}):
        fitted = Alignment(aligners, both_directions=True)
        quiet_trainer().fit(fitted, datamodule=activations(world, sites=SITES))
        module = InjectionEvaluation([fitted.stored()], [*BY_ROWS], both_directions=True)
        quiet_trainer().test(module, datamodule=activations(world, sites=SITES), verbose=False)
        assert module.meta["refusals"] == {}
        found.append(errors(module))
    assert len(found[0]) == 4 * 2 * 2
    assert found[1] == pytest.approx(found[0], rel=1e-3)
    assert found[0]["nearest_neighbours", "forward", 1] != pytest.approx(found[0]["linear", "forward", 1], rel=1e-2)


def test_the_command_reports_them_beside_linear(world: World, tmp_path: Path) -> None:
    options = [f"--data.model_x={world.model_x}", f"--data.model_y={world.model_y}", f"--data.text.source={world.fit}"]
    options += [
        f"--data.text.held_out={world.test}",
        "--data.sites=1",
        "--data.held_out_types=0",
        "--data.max_length=64",
    ]
    options += ["--trainer.logger=false", "--trainer.accelerator=cpu", f"--run={tmp_path / 'run'}"]
    evaluate(["inject", *options, f"--closed_form={json.dumps([*BY_ROWS, 'linear'])}"])
    (report,) = (tmp_path / "run").glob("*.json")
    rows = json.loads(report.read_text())["rows"]
    shown = {row["method"] for row in rows if row["fvu"] is not None}
    assert shown >= {*BY_ROWS, "linear"}


def test_rows_that_no_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn_rows, "free_memory", lambda device: 10**6)
    maps = [NearestNeighbours(2, 16, 24), KernelRidge(2, 16, 24, rows=700)]
    with pytest.raises(ValueError, match=r"10,000 at each of 2 sites, but these take 9\.6 MB and 1 MB are free"):
        KeptRows.of(maps, 2, (16, 24), torch.device("cpu"))
    small = KeptRows.of([KernelRidge(2, 16, 24, rows=700)], 2, (16, 24), torch.device("cpu"))
    assert small.fitting is not None


def test_the_memory_of_rows_counts_for_sites_at_once() -> None:
    few, more = (
        bytes_a_site(Alignment({"near": partial(NearestNeighbours, rows=rows)}), 16, 24, 512) for rows in (100, 300)
    )
    of_map = 2 * 4 * 40 * 200  # buffers, and their copies
    assert more - few == 12 * 40 * 200 + of_map


def test_a_map_that_keeps_rows_without_any_says_who_fits_it() -> None:
    x, y = related_rows(1, 40, 5, 4)
    with pytest.raises(ValueError, match=r"needs rows of the fit.*`train\.py fit`"):
        NearestNeighbours(1, 5, 4).fit(moments_of(x, y))
