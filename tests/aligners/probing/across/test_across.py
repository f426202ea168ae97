"""Probes across a map, on tiny models and a treebank of made-up trees."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.aligners.probing.made import drawn_words, edge_bank, made_words, sentences_of_words, write_treebank
from tests.runs import quiet_trainer

from aligners.callbacks.checkpoint import SaveAligners
from aligners.cli.table import evaluate
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.pairings import pair_states
from aligners.datamodules.text.sources import TextSource
from aligners.fitting.alignment import Alignment
from aligners.fitting.saved_bank import StoredBank, load_bank
from aligners.injection.behaviour import BEHAVIOUR
from aligners.maps.linear import Identity, Linear
from aligners.probing.across.across_evaluation import PairedWords, ProbesAcrossMaps, columns
from aligners.probing.across.twin import (
    RANDOM,
    SwappedPart,
    Twin,
    principal_subspaces,
    random_subspaces,
    read_subspaces,
    swapped,
)
from aligners.probing.probe_bank import Examples, Variant, answers, fresh_bank
from aligners.probing.probes import DistanceProbes, counts, f1
from aligners.probing.probing_tasks import ProbeTraining
from aligners.probing.targets import Labels, targets_of
from aligners.probing.trees import Trees
from aligners.reports.report import where
from aligners.reports.runs.probing.across_report import report

Row = dict[str, Any]
SITES, PAIRS = ["0", "1:2", "2:2"], [(0, 0), (1, 2), (2, 2)]
QUICK = ProbeTraining(max_epochs=3, batch=16, learning_rate=8e-3, least_steps=12)
TASKS = ["pos", "distance", "depth"]


def test_only_what_a_probe_reads_is_in_its_subspace() -> None:
    words, variants = drawn_words(width=10), [Variant("model", 0, rank=3), Variant("model", 1, rank=3)]
    labels, own = Labels.of("kind", words.sentences), words.states[:2]
    edge = edge_bank(variants, words, labels, 0, projection=3, hidden=5)
    structural = fresh_bank(DistanceProbes, variants, words, 0)
    other = torch.randn(own.shape, generator=torch.Generator().manual_seed(1))
    for bank, asked in ((edge, targets_of(labels, words)), (structural, Trees.of(words))):
        subspace = read_subspaces(bank)
        assert subspace.shape == (2, 10, 3)
        torch.testing.assert_close(subspace.mT @ subspace, torch.eye(3).expand(2, -1, -1))
        outside = own + (other - swapped(torch.zeros_like(other), other, subspace))
        examples = [
            Examples(made_words(words.sentences, *x), asked) for x in (own, outside, swapped(own, other, subspace))
        ]
        before, unread, read = (torch.cat([found.flatten(1) for _, found in answers(bank, x)], 1) for x in examples)
        torch.testing.assert_close(unread, before, rtol=1e-3, atol=1e-4)
        assert not torch.allclose(read, before, rtol=1e-3, atol=1e-4)


def test_a_swap_of_all_dimensions_is_that_of_the_state() -> None:
    own, other = torch.randn(2, 2, 7, 5, generator=torch.Generator().manual_seed(0))
    every = random_subspaces(torch.zeros(2, 5, 5), 0)
    torch.testing.assert_close(swapped(own, other, every), other)
    assert swapped(own, other, None) is other
    one = random_subspaces(torch.zeros(2, 5, 2), 0)
    torch.testing.assert_close(swapped(own, other, one) @ one, other @ one)  # inside
    rest = torch.eye(5) - one @ one.mT
    torch.testing.assert_close(swapped(own, other, one) @ rest, own @ rest)  # and outside
    states = torch.randn(1, 400, 6, generator=torch.Generator().manual_seed(0)) * torch.tensor([1, 5, 1, 1, 10, 1])
    assert principal_subspaces(states + 100, 2)[0][[1, 4]].square().sum() > 1.98  # where they vary most


def test_every_draw_of_a_subspace_counts_alike() -> None:
    own, other = torch.randn(2, 1, 7, 5, generator=torch.Generator().manual_seed(0))
    draws = [random_subspaces(torch.zeros(1, 5, 2), seed) for seed in range(3)]
    behaviour: Any = SimpleNamespace(
        route=SimpleNamespace(pairs=[(1, 1)]),
        injected=lambda task, states, answered: dict.fromkeys(BEHAVIOUR, states.square().sum(-1)),
    )
    unused: Any = None
    found = Twin(behaviour, [], [], 7, 0)._mean(unused, own, other, SwappedPart(RANDOM, draws), unused)
    each = torch.stack([swapped(own, other, one).square().sum(-1) for one in draws])
    assert each.std(0).min() > 0
    for name in BEHAVIOUR:
        torch.testing.assert_close(found[name], each.mean(0))


def data_of(models: Sequence[str], text: TextSource, **options: Any) -> PairedActivations:
    usual: dict[str, Any] = {"batch_size": 16, "max_length": 64, "held_out_types": 0.0, "sites": SITES}
    return pair_states(text=text, model_x=models[0], model_y=models[-1], **usual | options)


def fitted(models: Sequence[str], folder: Path, text: TextSource, **options: Any) -> StoredBank:
    trainer = quiet_trainer(max_epochs=-1, limit_val_batches=0, callbacks=[SaveAligners(folder)])
    trainer.fit(Alignment({"linear": Linear, "same": Identity}), datamodule=data_of(models, text, **options))
    return load_bank(folder / "aligners.safetensors")


def across(models: Sequence[str], stored: StoredBank, text: TextSource, **options: Any) -> ProbesAcrossMaps:
    given: Row = {"tasks": TASKS, "dimensions": 2, "draws": 1, "training": QUICK, "projection": 8}
    given |= {name: options.pop(name) for name in given.keys() & options.keys()}
    found = ProbesAcrossMaps([stored], ["procrustes"], **given)
    data = data_of(models, text, **{"rows": "words"} | options)
    quiet_trainer().test(found, datamodule=data, verbose=False)
    found.train_probes()
    return found


@pytest.fixture(scope="module")
def stored(masked: list[str], treebank: TextSource, tmp_path_factory: pytest.TempPathFactory) -> StoredBank:
    return fitted(masked, tmp_path_factory.mktemp("stored"), treebank)


@pytest.fixture(scope="module")
def found(masked: list[str], treebank: TextSource, stored: StoredBank) -> ProbesAcrossMaps:
    return across(masked, stored, replace(treebank, max_held_out=16))


def test_every_map_is_read_at_every_site_pair(found: ProbesAcrossMaps) -> None:
    measures = [("pos", "F1"), ("distance", "Spearman"), ("distance", "UUAS"), ("depth", "Spearman"), ("depth", "root")]
    methods = {"native_x", "native_y", "linear", "same", "procrustes", "mean", "identity", "baseline"}
    seen = {(row["task"], row["measure"], row["method"], (row["site_x"], row["site_y"])) for row in found.rows}
    assert seen == {(*measure, method, pair) for measure in measures for method in methods for pair in PAIRS}
    assert len(seen) == len(found.rows)


def test_the_score_is_that_of_ys_probe_on_mapped_words(found: ProbesAcrossMaps, stored: StoredBank) -> None:
    held: PairedWords = found.held
    _, y = found.fitted[0]
    targets = targets_of(y.labels, held.y, y.seed)
    linear = stored.maps["0_1"]["linear"]
    for s, (i, j) in enumerate(PAIRS):
        source = held.x.read([place for place in held.x.places if place.layer == i], range(len(held.x.sentences)))
        mapped = linear(source.expand(len(PAIRS), -1, -1))[s]
        words = made_words(held.y.sentences, *[mapped] * (j + 1))
        variant = [variant.layer for variant in y.variants].index(j)
        expected = f1(counts(y.banks[0].only([variant]), Examples(words, targets)).sum(1)).item()
        (row,) = where(found.rows, task="pos", method="linear", site_x=i, site_y=j)
        (own,) = where(found.rows, task="pos", method="native_y", site_x=i, site_y=j)
        (least,) = where(found.rows, task="pos", method="mean", site_x=i, site_y=j)
        assert row["score"] == pytest.approx(expected)
        assert row["lost"] == pytest.approx(own["score"] - expected)
        assert row["kept"] == pytest.approx((expected - least["score"]) / (own["score"] - least["score"]))
        assert row["lost_low"] <= row["lost"] <= row["lost_high"]
        assert (own["lost"], own["kept"]) == (0, 1)
        same, bare = (
            where(found.rows, task="pos", method=name, site_x=i, site_y=j)[0] for name in ("same", "identity")
        )
        assert same == {**bare, "method": "same", "role": "method"}


def test_the_twin_swaps_every_part_through_every_map(found: ProbesAcrossMaps) -> None:
    twin = found.report_tables["twin"]
    parts = {*TASKS, "random", "principal", "whole state"}
    assert {(row["method"], row["part"]) for row in twin} == {
        (method, part) for method in ("linear", "same", "procrustes", "mean", "identity") for part in parts
    }
    width = found.route.target.width
    assert all(row["dimensions"] == (width if row["part"] == "whole state" else 2) for row in twin)
    for row in where(twin, part="pos"):
        assert row["probe_score"] is not None


def test_a_model_into_itself_changes_nothing(masked: list[str], treebank: TextSource, tmp_path: Path) -> None:
    bank = fitted(masked[:1], tmp_path, treebank, sites=[1])
    found = across(masked[:1], bank, treebank, tasks=["pos"], sites=[1])
    for row in where(found.rows, method="same"):
        assert row["score"] == where(found.rows, method="native_y")[0]["score"]
    twin = found.report_tables["twin"]
    assert all(abs(row["penalty"]) < 1e-5 and row["agreement"] == 1 for row in where(twin, method="same"))
    whole, part = (where(twin, method="mean", part=part)[0] for part in ("whole state", "pos"))
    assert abs(whole["penalty"]) > 1e-3  # an erased state is another one
    assert whole["penalty"] != part["penalty"]


def test_maps_of_words_are_read_and_not_swapped(masked: list[str], treebank: TextSource, tmp_path: Path) -> None:
    words: dict[str, Any] = {"sites": [1], "rows": "words_mean"}
    found = across(masked, fitted(masked, tmp_path, treebank, **words), treebank, tasks=["pos"], **words)
    assert {row["method"] for row in found.rows} >= {"linear", "native_y"}
    assert found.report_tables["twin"] == []
    assert "tokens" in found.meta["not_swapped"]


def test_sentences_that_a_map_was_fitted_on_are_left_out(
    masked: list[str], treebank: TextSource, stored: StoredBank, tmp_path: Path
) -> None:
    seen, fresh = Path(treebank.source).read_text().split("\n\n"), Path(str(treebank.held_out)).read_text()
    (tmp_path / "mixed.conllu").write_text("\n\n".join([*seen[:10], fresh]))
    fit = write_treebank(tmp_path / "others.conllu", sentences_of_words(60, 2))
    text = TextSource(fit, held_out=str(tmp_path / "mixed.conllu"))
    found = across(masked, stored, text, tasks=["pos"], dimensions=0, max_length=9)
    left_out, sentences = found.meta["text"]["left_out"], found.meta["sentences"]
    assert left_out["texts"] == 10
    assert sentences["test"] + sentences["dropped"] == left_out["of"] - 10
    assert sentences["dropped"] > 0  # which are not read whole
    assert found.rows[0]["n_sentences"] == sentences["test"]


def test_whole_sentences_a_checkpoint_and_options_within_range_are_needed(
    masked: list[str], treebank: TextSource, stored: StoredBank, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"`data\.held_out_types` 0"):
        across(masked, stored, treebank, held_out_types=0.3)
    for wrong in ({"dimensions": -1}, {"tasks": []}, {"draws": 0}):
        with pytest.raises(ValueError, match=f"`{next(iter(wrong))}`"):
            ProbesAcrossMaps([stored], **wrong)
    with pytest.raises(ValueError, match="`checkpoints`"):
        evaluate(["probe", "--checkpoints=[]", f"--run={tmp_path / 'run'}"])


def test_no_share_is_kept_of_what_ys_own_probe_does_not_read() -> None:
    own, found, floor = (torch.full((3,), value).double() for value in (0.3, 0.3, 0.1))
    assert columns(found, own, floor, beaten=True)["kept"] == pytest.approx(1)
    weak = columns(found, own, floor, beaten=False)
    assert (weak["score"], weak["kept"], weak["kept_low"]) == (pytest.approx(0.3), None, None)
    about = {"model_x": "x", "model_y": "y", "task": "distance", "measure": "UUAS", "site_x": 1, "site_y": 2}
    roles = {"native_y": "ceiling", "native_x": "ceiling", "linear": "method", "mean": "floor", "baseline": "floor"}
    rows = [{**about, **weak, "method": name, "role": role} for name, role in roles.items()]
    made = report({"unfinished": {"probes": 2, "of": 8}, "training": {"max_epochs": 60}}, rows)
    read = "Of distance they read UUAS 30.0 in the states of the best map, linear, 30.0 in y's own, 30.0 in x's, by its"
    assert made.lead.endswith(f"{read} own probe, 30.0 is the baseline.")
    assert made.sentences == [
        "distance, UUAS: on its own states the probe of y is no better than the baseline (30.0) or on equal states at "
        "1→2 (30.0), where no share that is kept can be given.",
        "2 of 8 probes were still learning after 60 epochs, the limit of `training.max_epochs`: with a higher one they "
        "may read more.",
    ]


def test_a_baseline_stands_beside_every_probe_and_is_not_beaten_by_itself(found: ProbesAcrossMaps) -> None:
    for _, y in found.fitted:
        for name, each in y.measures(None, found.held.y, 0).items():
            for row in where(found.rows, task=y.name, measure=name, method="baseline"):
                assert row["score"] == pytest.approx(float(each[0, 0]))
                place = {key: row[key] for key in ("task", "measure", "site_x", "site_y")}
                (own,), (floor,) = (where(found.rows, **place, method=method) for method in ("native_y", "mean"))
                assert (own["kept"] is None) == (own["score"] <= max(row["score"], floor["score"] or 0))


def test_the_command_reads_the_words_of_a_checkpoint_of_tokens(
    masked: list[str], stored: StoredBank, treebank: TextSource, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate([
        "probe", f"--checkpoints=[{stored.path}]", "--tasks=[pos]", "--dimensions=2", "--closed_form=[]",
        "--training.least_steps=5", "--training.max_epochs=1", "--projection=4", "--hidden=4", "--trainer.logger=false",
        "--trainer.accelerator=cpu", f"--run={tmp_path / 'run'}",
    ])  # fmt: skip
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {
        "probes_across.json", "probes_across.csv", "probes_across.png", "probes_twin.png", "twin.csv",
    }  # fmt: skip
    assert "rows: words\n" in (tmp_path / "run" / "config.yaml").read_text()
    shown = capsys.readouterr().out
    assert "pos, F1" in shown
    assert "Erasing what the pos probe reads, 2 dimensions, costs" in shown


def test_a_map_that_is_not_trained_is_compared_with_none(found: ProbesAcrossMaps) -> None:
    whole = report(found.meta, found.rows, **found.report_tables)
    best = {said.split("best map, ")[1].split(" ")[0].strip(",") for said in whole.findings if "best map" in said}
    told = [r | {"training": "diverged at step 3" if r["method"] in best else None} for r in found.rows]
    twin = [r | {"training": "diverged at step 3"} for r in found.report_tables["twin"] if r["method"] != "mean"]
    erased = [r for r in found.report_tables["twin"] if r["method"] == "mean"]
    made = report(found.meta, told, [*erased, *twin])
    assert not any(f"best map, {name}" in said for name in best for said in made.findings)
    assert not any("at best" in said for said in made.sentences)
    assert any(said.endswith("diverged at step 3.") for said in made.sentences)
