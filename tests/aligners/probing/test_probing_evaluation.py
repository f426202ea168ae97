import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs import quiet_trainer
from tests.tiny import WORDS
from tests.world import World, write_texts

from aligners.cli.table import train
from aligners.datamodules import layers
from aligners.datamodules.layers import LayerActivations
from aligners.datamodules.text.annotated.sentence import Sentence
from aligners.datamodules.text.sources import TextSource
from aligners.probing.probe_bank import Examples
from aligners.probing.probes import counts, f1
from aligners.probing.probing_evaluation import ProbeExperiment
from aligners.probing.probing_tasks import ProbeTraining
from aligners.probing.storing import PROBES, load_banks
from aligners.probing.targets import Labels, targets_of
from aligners.probing.word_states import check_annotated, usual_tasks
from aligners.reports.finished_runs import make_report
from aligners.reports.publishing import write
from aligners.reports.report import where

SITES = [0, 1, 2, 3, None]


def data_of(text: TextSource, *models: str, **options: Any) -> LayerActivations:
    return LayerActivations(
        list(models), text=text, batch_size=16, **{"rows": "words_mean", "max_length": 32} | options
    )


def experiment(**options: Any) -> ProbeExperiment:
    training = ProbeTraining(max_epochs=1, least_steps=5)
    return ProbeExperiment(**{"training": training, "seeds": 1, "projection": 4, "hidden": 4} | options)


def run_on(data: LayerActivations, made: ProbeExperiment) -> ProbeExperiment:
    quiet_trainer().test(made, datamodule=data, verbose=False)
    made.train_probes()
    return made


@pytest.fixture(scope="module")
def probed(treebank: TextSource, world: World) -> ProbeExperiment:
    """With two seeds, two ranks and codes of three portions."""
    made = experiment(tasks=["pos", "distance"], seeds=2, ranks=[2, 4], portions=[0.1, 0.4, 1.0])
    return run_on(data_of(treebank, world.model_x), made)


def test_the_report_has_every_table_and_figure(probed: ProbeExperiment, tmp_path: Path) -> None:
    rows = [row | {"uuas": 1.0} if row["source"] == "word order" else row for row in probed.rows]
    made = make_report("probing", probed.meta, rows, **probed.report_tables)
    figures = write(made, tmp_path)
    assert [path.stem for path in figures] == ["probing", "probing_trees", "probing_codes"]
    assert {path.stem for path in tmp_path.glob("*.csv")} == {"probing", "mixes", "trees", "codelengths", "portions"}
    said = "\n".join(made.sentences)
    assert "distance: no better than the baseline (word order, UUAS 100.0): site 0, rank 2, with" in said
    assert "pos: labels are compressed most at site" in said
    structural = where(probed.rows, probe="distance")
    best = max(where(structural, source="model"), key=lambda row: row["score"])
    assert {row["layer"] for row in probed.report_tables["trees"]} == {best["site"]}
    assert made.figures["probing_trees"]().axes[0].get_title().startswith(f"x, site {best['site']}: ")
    assert Counter((row["source"], row["rank"]) for row in structural) == {
        ("word order", None): 1, **{(source, rank): 4 for source in ("model", "untrained") for rank in (2, 4)}
    }  # fmt: skip


def test_saved_probes_answer_as_the_report_says(probed: ProbeExperiment, world: World, tmp_path: Path) -> None:
    probed.save(tmp_path / PROBES)
    banks, held, found = load_banks(tmp_path / PROBES), probed.words[0, "test"], []
    for seed in range(2):
        bank, about = banks[f"pos, seed {seed}, {world.model_x}"]
        sets = tuple((tuple(names), count) for names, count in about["labels"]["sets"])
        labels = Labels(**{**about["labels"], "names": tuple(about["labels"]["names"]), "sets": sets})
        targets = targets_of(labels, held)
        chosen = [a for a, variant in enumerate(bank.variants) if variant.source == "model" and not variant.control]
        found.append(f1(counts(bank.only(chosen), Examples(held, targets)).sum(1)))
    rows = where(probed.rows, task="pos", source="model")
    assert [row["site"] for row in rows] == SITES
    assert [row["score"] for row in rows] == pytest.approx(torch.stack(found).mean(0).tolist())


def test_labels_are_sent_by_every_edge_probe_and_control(probed: ProbeExperiment) -> None:
    rows = probed.report_tables["codelengths"]
    assert {(row["task"], row["source"], row["site"], row["control"]) for row in rows} == {
        *(("pos", "model", site, control) for site in SITES for control in (False, True)),
        *(("pos", "untrained", site, False) for site in SITES[:-1]),
    }
    assert {row["n_targets"] for row in rows} == {sum(len(own.words) for own in probed.words[0, "fit"].sentences)}
    for row in rows:
        assert row["compression"] == pytest.approx(row["uniform_bits"] / row["bits"], rel=0.02)  # a mean over seeds
        assert row["compression_low"] <= row["compression"] <= row["compression_high"]
        assert row["compression_seeds_low"] <= row["compression"] <= row["compression_seeds_high"]


def test_the_portions_add_up_to_the_code(probed: ProbeExperiment) -> None:
    portions = probed.report_tables["portions"]
    assert Counter(row["seed"] for row in portions) == dict.fromkeys(range(2), len(portions) // 2)
    shares = sorted({row["share"] for row in portions})
    assert shares == pytest.approx([0.1, 0.4, 1.0], abs=0.01)
    first = [row["bits_a_target"] for row in portions if row["share"] == shares[0]]
    torch.testing.assert_close(torch.tensor(first), torch.full((len(first),), torch.tensor(3.0).log2().item()))


def test_each_model_and_its_twin_read_every_text_once(
    treebank: TextSource, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: Counter[str] = Counter()
    read = layers.read_rows

    def counted(model: Any, inputs: Any, *others: Any) -> Any:
        reads[model.name] += len(inputs["input_ids"])
        return read(model, inputs, *others)

    monkeypatch.setattr(layers, "read_rows", counted)
    data = data_of(treebank, world.model_x, world.model_y)
    quiet_trainer().test(experiment(), datamodule=data, verbose=False)
    assert len(reads) == 4
    assert set(reads.values()) == {sum(len(getattr(data.texts, split)) for split in ("fit", "validation", "test"))}


def write_spans(path: Path, seed: int, count: int = 60, **more: Any) -> str:
    """Sentences of known words, each of which is a target."""
    draw, rows = random.Random(seed), list[str]()
    for _ in range(count):
        words = draw.choices(WORDS, k=6)
        targets = [{"span1": [n, n + 1], "label": word[0]} for n, word in enumerate(words)]
        rows.append(json.dumps({"text": " ".join(words), "targets": targets, **more}))
    path.write_text("\n".join(rows))
    return str(path)


def test_spans_of_a_held_out_file_are_scored_and_the_texts_are_said_once(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit, held = (write_spans(tmp_path / f"ner_{split}.json", seed) for seed, split in enumerate(("train", "test")))
    text = TextSource(fit, held_out=held, validation_share=0.1)
    options: dict[str, Any] = {"controls": False, "mix": False, "portions": []}
    made = run_on(data_of(text, world.model_x), experiment(**options))  # of all tasks that the file has
    assert {(row["task"], row["n_targets"]) for row in made.rows} == {("ner", 6 * 60)}
    assert all(row["score"] is not None for row in made.rows)
    assert capsys.readouterr().out.count(f"Texts of {fit}: ") == 1


def test_a_task_without_held_out_targets_is_refused_before_a_model_is_looked_for(
    treebank: TextSource, tmp_path: Path
) -> None:
    named = write_spans(tmp_path / "a.jsonl", 0, task="ner")
    other = write_spans(tmp_path / "b.jsonl", 1, task="roles")
    for source, task in ((named, "ner"), (treebank.source, "depth")):
        options = {"tasks": f"[{task}]", "data.models": "[no/such]", "data.text.source": source}
        options |= {"data.text.held_out": other, "run": str(tmp_path / "run")}
        says = f"held-out sentences with annotations for '{task}' of `tasks`, but none of 60 has"
        with pytest.raises(ValueError, match=says):
            train(["probe", *(f"--{name}={value}" for name, value in options.items())])
    assert not (tmp_path / "run").exists()


def test_the_untrained_twin_may_have_a_mix_of_its_own(treebank: TextSource, world: World) -> None:
    made = run_on(data_of(treebank, world.model_x), experiment(tasks=["pos"], portions=[], twin_mix=True))
    assert [row["site"] for row in made.rows if row["source"] == "untrained"] == SITES
    (bank,) = made.probed[0][1].banks
    twin = [variant.source == "untrained" and variant.layer is None for variant in bank.variants].index(True)
    read = {
        place.source for place, weight in zip(bank.places, bank.readings.weights()[twin], strict=True) if weight > 0
    }
    assert read == {"untrained"}
    assert len(made.report_tables["mixes"]) == 4  # of the model alone
    with pytest.raises(ValueError, match="`mix` and `controls` where `twin_mix`"):
        experiment(controls=False, twin_mix=True)


def test_sentences_that_a_model_does_not_read_whole_are_dropped_and_counted(treebank: TextSource, world: World) -> None:
    data = data_of(treebank, world.model_x, max_length=8)
    made = run_on(data, experiment(tasks=["pos"], controls=False, mix=False, portions=[]))
    for split in ("fit", "validation", "test"):
        texts = [tuple(text.split()) for text in getattr(data.texts, split)["text"]]
        kept = [words for words in texts if len(words) <= 6]  # and two special tokens
        assert [own.words for own in made.words[0, split].sentences] == kept  # in the order of the texts
        assert made.words[0, split].states.shape[1] == sum(map(len, kept))
        assert made.meta["sentences"][split] == len(kept)
        assert made.meta["sentences_dropped"][split] == len(texts) - len(kept)
        assert len(texts) > len(kept) or split == "validation"  # of few texts
    with pytest.raises(ValueError, match=r"reads whole, but \d+ are not, such as .*`long_sentences` drop"):
        run_on(data, experiment(tasks=["pos"], long_sentences="error"))


def test_what_cannot_be_probed_is_refused_before_reading(
    treebank: TextSource, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "read_rows", None)  # nothing is read before the tasks are checked
    plain = write_texts(tmp_path / "plain.csv", [f"{word} film {n}" for n, word in enumerate(WORDS)])
    known, tree = data_of(treebank, world.model_x), Sentence(("a", "b"), (0, 1))
    for data, tasks, said in (
        (data_of(TextSource(plain), world.model_x), ["pos"], "Expected annotated sentences"),
        (data_of(treebank, world.model_x, rows="tokens"), ["pos"], r"Expected `data\.rows` to be words"),
        (known, ["pos", "ner"], "got 'ner'; they have: pos, morphology, dependencies"),
    ):
        with pytest.raises(ValueError, match=said):
            run_on(data, experiment(tasks=tasks))
    own = iter(([tree], [Sentence(("a", "b"))], [tree]))  # fit, validation, test
    monkeypatch.setattr("aligners.probing.word_states.sentences_in", lambda _: next(own))
    with pytest.raises(ValueError, match="Expected validation sentences with annotations for 'depth' of `tasks`"):
        check_annotated(known, ["depth"])
    assert usual_tasks([tree]) == ["distance", "depth"]
    assert usual_tasks([Sentence(("a",))]) == ["pos", "dependencies", "distance", "depth"]  # all of which are refused
    for wrong in ({"seeds": 0}, {"tasks": []}, {"ranks": []}, {"hidden": 0}):
        with pytest.raises(ValueError, match=f"Expected `{next(iter(wrong))}` to be at least"):
            ProbeExperiment(**wrong)  # type: ignore[arg-type]
    (tmp_path / "other.safetensors").write_bytes(b"nothing of the kind")
    for path in (tmp_path / "other.safetensors", tmp_path / "absent"):
        with pytest.raises(ValueError, match=r"Expected `probes` to be a probes\.safetensors"):
            load_banks(path)
