"""Universes whose models are read at sites of their own: maps, files, injection, who joins and who leaves; types."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.aligners.fitting.universe.test_universe import QUICK, Found, held_out, joining, measured, states
from tests.tiny import tiny_folder
from tests.world import World

from aligners.cli.table import evaluate, train
from aligners.cli.train import fit_universe
from aligners.datamodules.rows.row_types import RowTypes
from aligners.errors import UserError
from aligners.fitting.map_errors import LEAST_ROWS, TypeErrors
from aligners.fitting.saved_bank import FORWARD, load_bank
from aligners.fitting.universe.universe import load_universe, sites_of, universes_of
from aligners.reports.finished_runs import make_report

SITES, TOGETHER = "1:2:2,3:1:1", [(1, 2, 2), (3, 1, 1)]
PAIR = Path("pairs", "x--shallow", "aligners.safetensors")


@pytest.fixture(scope="module")
def models(world: World, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of 3, 2 and 3 blocks, and of widths 16, 8 and 16."""
    folder = tmp_path_factory.mktemp("depths")
    return [world.model_x, str(tiny_folder(folder / "shallow", seed=8, layers=2, width=8)), world.model_y]


@pytest.fixture(scope="module")
def found(world: World, models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Found:
    return measured(world, models, tmp_path_factory.mktemp("universe"), PAIR, sites=SITES)


@pytest.mark.slow
def test_every_map_is_between_the_sites_of_its_models(found: Found) -> None:
    module, evaluation, folder = found
    reader = module.stream.reader
    x, names, widths = held_out(module.stream), [model.name for model in reader.models], [16, 8, 16]
    space = universes_of(load_universe(folder / "universe.safetensors"))["universe"]
    mean = module.means(module.fits()[0])[0].unflatten(0, (3, 2))
    rows = [row for row in evaluation.rows if row["method"] == "universe"]
    assert len(rows) == 3 * 2 * 2
    for row in rows:
        i, j, s = names.index(row["model_x"]), names.index(row["model_y"]), ["1:2:2", "3:1:1"].index(row["site"])
        assert (row["site_x"], row["site_y"]) == (TOGETHER[s][i], TOGETHER[s][j])
        y = x[j, s, :, : widths[j]]
        left = (space.map(i, j)(x[i, ..., : widths[i]])[s] - y).detach().square().sum()
        assert row["fvu"] == pytest.approx(float(left / (y - mean[j, s, : widths[j]]).square().sum()), rel=1e-4)
    batch = next(iter(module.stream.batches("test")))
    own = reader.models[1].front(batch.texts.inputs[1], [2])[0].flatten(0, 1)
    torch.testing.assert_close(batch.x[2, :, :8], own[batch.rows.index])  # the second model's first place is its site 2


@pytest.mark.slow
def test_files_of_pairs_have_their_models_sites_and_can_be_injected(found: Found, world: World, tmp_path: Path) -> None:
    _, evaluation, folder = found
    bank = load_bank(folder / PAIR)
    assert bank.pairs[FORWARD] == [(1, 2), (3, 1)]
    assert (bank.data["sites"], bank.data_config["sites"]) == ([[1, 2], [3, 1]], "1:2,3:1")
    pairwise, whole = (
        {(r["model_x"], r["model_y"], r["site_x"]): r["fvu"] for r in evaluation.rows if r["method"] == method}
        for method in ("pairwise_universe", "universe")
    )
    assert len(pairwise) == 4
    assert pairwise == pytest.approx({place: whole[place] for place in pairwise}, rel=1e-4)
    run = tmp_path / "run"
    evaluate(["inject", f"--checkpoints={folder / PAIR}", "--both_directions=true", f"--run={run}", *QUICK[2:]])
    rows = json.loads((run / "report.json").read_text())["rows"]
    injected = [row for row in rows if row["method"] == "universe"]
    assert {(row["site_x"], row["site_y"]) for row in injected} == {(1, 2), (3, 1), (2, 1), (1, 3)}
    by_place = {(row["model_x"], row["model_y"], row["site_x"]): row["fvu"] for row in injected}
    assert by_place == pytest.approx({place: whole[place] for place in by_place}, rel=1e-3)
    assert all(0 <= row["accuracy"] <= 1 for row in injected)


@pytest.mark.parametrize(
    ("stored", "members", "wanted", "found"),
    [
        ("norm", [(4, 3, 4)], None, "norm:norm:norm:norm"),
        ("norm:norm:norm", [(4, 3, 4)], None, "norm:norm:norm:norm"),  # two had been joined by a third
        ("2,norm", [(2, 2, 2), (4, 3, 4)], None, "2:2:2:2,norm:norm:norm:norm"),
        ("2,norm", [(2, 2, 2), (4, 3, 4)], "5,norm", "2:2:2:5,norm:norm:norm:norm"),
        ("2:norm:3", [(2, 3, 3)], "1", "2:norm:3:1"),
        (["norm", 1], [(4, 3, 4), (1, 1, 1)], None, "norm:norm:norm:norm,1:1:1:1"),
        ("blocks", [(1, 1, 1), (2, 2, 2)], None, "1:1:1:1,2:2:2:2"),
        ("blocks", [(1, 1, 1), (2, 2, 2)], ["norm", 1], "1:1:1:norm,2:2:2:1"),
        ("1:2:2", [(1, 2, 2)], None, None),
        ("1:2:norm", [(1, 2, 4)], None, None),
        ("blocks", [(1, 1, 1), (2, 2, 2)], "all", None),
    ],
)
def test_sites_of_the_members_with_those_of_a_newcomer(
    monkeypatch: pytest.MonkeyPatch, stored: str, members: list[tuple[int, ...]], wanted: Any, found: str | None
) -> None:
    monkeypatch.setattr(fit_universe, "sites_of", lambda bank: members)
    bank: Any = SimpleNamespace(data_config={"sites": stored, "models": ["a", "b", "c"]})
    if found is not None:
        assert fit_universe._sites_of_all(wanted or stored, bank) == found
        return
    with pytest.raises(UserError, match="the newcomer's site for each of the members'"):
        fit_universe._sites_of_all(wanted or stored, bank)


def test_what_to_write_for_a_newcomer_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_universe, "sites_of", lambda bank: [(1, 2, 1), (3, 6, 3), (4, 9, 4)])
    bank: Any = SimpleNamespace(data_config={"sites": "1:2:1,3:6:3,norm:9:norm", "models": ["a", "b", "c"]})
    said = (
        r"but got blocks\. Write `--data\.sites 1,3,norm` for those of a and c; `--data\.sites 2,6,9` for those of b;"
    )
    with pytest.raises(UserError, match=said):
        fit_universe._sites_of_all("blocks", bank)
    for own, expected in (("1,3,norm", "1:2:1:1,3:6:3:3,norm:9:norm:norm"), ("2,6,9", "1:2:1:2,3:6:3:6,norm:9:norm:9")):
        assert fit_universe._sites_of_all(own, bank) == expected


@pytest.mark.slow
def test_a_newcomer_joins_after_its_final_norm(tmp_path: Path, world: World) -> None:
    depths = [3, 2, 3, 5, 4]
    names = [str(tiny_folder(tmp_path / f"m{k}", "gpt2", seed=k, layers=depth, task="causal"))
             for k, depth in enumerate(depths)]  # fmt: skip
    text = ["--data.text.source", str(world.fit), "--data.text.held_out", str(world.test), "--data.max_length", "64"]
    train(["universe", "--data.models", json.dumps(names[:3]), "--data.sites", "norm", *text,
           "--run", str(tmp_path / "three"), *QUICK])  # fmt: skip
    three = tmp_path / "three" / "universe.safetensors"
    assert sites_of(load_universe(three)) == [(4, 3, 4)]
    train([*joining(three, names[3]), "--run", str(tmp_path / "four"), *QUICK])
    four = tmp_path / "four" / "universe.safetensors"
    assert sites_of(load_universe(four)) == [(4, 3, 4, 6)]
    train([*joining(four, names[4]), "--run", str(tmp_path / "five"), *QUICK])  # the default is right again
    assert sites_of(load_universe(tmp_path / "five" / "universe.safetensors")) == [(4, 3, 4, 6, 5)]


@pytest.mark.slow
def test_a_newcomer_has_sites_of_its_own(found: Found, models: list[str], tmp_path: Path) -> None:
    three, fourth = found[2] / "universe.safetensors", str(tiny_folder(tmp_path / "new", seed=3, layers=5))
    none = r"the newcomer's site for each of the members' \[\(1, 2, 2\), \(3, 1, 1\)\], but got "
    for sites, said in (
        (SITES, none + SITES),
        ("4", none + "4"),
        ("blocks", none),
        ("4,9", "between 0 and 5, but got 9"),
    ):
        with pytest.raises(ValueError, match=said):
            train([*joining(three, fourth), "--data.sites", sites, "--run", str(tmp_path / "refused"), *QUICK])
    with pytest.raises(ValueError, match="the newcomer's site"):
        train([*joining(three, fourth), "--run", str(tmp_path / "refused"), *QUICK])
    train([*joining(three, fourth), "--data.sites", "4,2", "--run", str(tmp_path / "four"), *QUICK])
    whole = load_universe(tmp_path / "four" / "universe.safetensors")
    assert sites_of(whole) == [(1, 2, 2, 4), (3, 1, 1, 2)]
    assert load_bank(tmp_path / "four" / "pairs" / "x--new" / "aligners.safetensors").pairs[FORWARD] == [(1, 4), (3, 2)]


@pytest.mark.parametrize(
    ("sites", "said"),
    [
        ("1:2", "one layer for each of the 3 models (3:4:5), but got '1:2'"),
        ("grid", "but got 'grid'"),
        (
            "blocks",
            "the last ones are 3 and 2 and 3 (counted from 0). Name one of each, for example `sites` '1:2:3, 2:3:4'",
        ),
        ("1:2:2,2:2:3", "no site of a model twice, but `sites` has (2, 2)"),
        ("1:3:1", "3"),
    ],
)
def test_sites_that_a_universe_cannot_have(world: World, models: list[str], sites: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.translate({ord(c): f"\\{c}" for c in "()"})):
        _ = states(world, models, sites=sites).reader


def test_types_are_ranked_by_what_the_others_do_not_say(found: Found) -> None:
    module, evaluation, folder = found
    data, space = module.stream, universes_of(load_universe(folder / "universe.safetensors"))["universe"]
    table = evaluation.report_tables["types"]
    tokenizer = data.frozen_models.tokenizers[0]
    errors, names = [], []
    for batch in data.batches("test"):
        embedded = space.embed(batch.x).unflatten(0, (3, 2))
        others = (embedded.sum(0) - embedded) / 2
        left = (space.maps.inverse(others.flatten(0, 1)) - batch.x).detach().square().mean(-1)
        errors.append((left / evaluation.joint.variance.flatten()[:, None]).unflatten(0, (3, 2)).mean(0))
        names += tokenizer.convert_ids_to_tokens(batch.texts.inputs[0]["input_ids"].flatten()[batch.rows.index])
    every, lines = torch.cat(errors, 1), [row for row in table if row["site"] == "3:1:1"]
    assert [row["fvu"] for row in lines] == sorted((row["fvu"] for row in lines), reverse=True)
    for row in lines:
        own = every[1, [name == row["type"] for name in names]]
        assert (row["rows"], row["fvu"]) == (len(own), pytest.approx(float(own.mean()), rel=1e-4))
        assert row["times"] == pytest.approx(float(own.mean() / every[1].mean()), rel=1e-4)
    assert {row["type"] for row in lines} == {name for name in names if names.count(name) >= LEAST_ROWS}
    report = make_report("universe", evaluation.meta, evaluation.rows, **evaluation.report_tables)
    said = report.sentences
    assert "3 models were mapped into one space at 2 sites, each by" in report.lead
    assert any(f'"{lines[0]["type"]}", "{lines[1]["type"]}"' in s and "are shared least" in s for s in said)


def test_types_are_those_of_the_texts_by_their_ids() -> None:
    types = RowTypes("words", ["a", "b"], torch.tensor([0, 0, 1, 1, 1, 0]), torch.tensor([2, 4]))
    found: Any = TypeErrors(1, types, torch.tensor([7, 3]), torch.device("cpu"))
    found.update(torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([3, 7, 3]), torch.tensor([0, 1, 3]))
    assert found.compute().tolist() == [[2.0, 1.0], [5.0, 1.0]]  # text 3 has b, b, b, a, text 7 has a, a
