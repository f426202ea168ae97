import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from aligners.cli.table import train
from aligners.probing.bank import Examples
from aligners.probing.edges import Labels, counts, f1, targets_of
from aligners.probing.evaluation import ProbeExperiment
from aligners.probing.reading import check_annotated
from aligners.probing.storing import PROBES, load_banks
from aligners.probing.training import ProbeTraining
from datamodules import layers
from datamodules.layers import LayerActivations
from datamodules.text.annotated.sentence import Sentence
from datamodules.text.sources import TextSource
from tests.aligners.probing.made import write_treebank
from tests.runs import quiet_trainer
from tests.tiny import WORDS, tiny_folder
from tests.world import write_texts

LONG = 12  # words of the longest sentences


def chains(count: int) -> list[Sentence]:
    """Sentences of known words, each of which hangs on a neighbour."""
    draw, found = random.Random(0), []
    for _ in range(count):
        words = draw.choices(WORDS, k=draw.randint(5, LONG))
        root = draw.randint(1, len(words))
        heads = [0 if n == root else n + (1 if n < root else -1) for n in range(1, len(words) + 1)]
        found.append(Sentence(tuple(words), tuple(heads)))
    return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("probing")
    models = {f"model_{seed}": str(tiny_folder(folder / f"m{seed}", seed=seed)) for seed in range(2)}
    return {**models, "trees": write_treebank(folder / "trees.conllu", chains(120))}


def data_of(world: dict[str, str], models: tuple[str, ...] = ("model_0",), **options: Any) -> LayerActivations:
    given: dict[str, Any] = {"text": TextSource(world["trees"]), "rows": "words_mean", "max_length": 32} | options
    return LayerActivations([world[model] for model in models], batch_size=16, **given)


def experiment(**options: Any) -> ProbeExperiment:
    training = ProbeTraining(max_epochs=1, least_steps=5)
    return ProbeExperiment(**{"training": training, "seeds": 1, "projection": 4, "hidden": 4} | options)


def run_on(data: LayerActivations, made: ProbeExperiment) -> ProbeExperiment:
    quiet_trainer().test(made, datamodule=data, verbose=False)
    made.train_probes()
    return made


def test_the_command_writes_a_report_and_probes_that_answer_as_it_says(
    world: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    train(
        [
            *("probe", "--run", str(run), "--seeds", "2", "--ranks", "[2,4]", "--training.least_steps", "5"),
            *("--portions", "[0.1,0.5,1.0]"),
            *("--training.max_epochs", "1", "--projection", "4", "--hidden", "4"),
            *("--data.models", f"[{world['model_0']}]"),
            *("--data.text.source", world["trees"], "--data.max_length", "32", "--trainer.logger", "false"),
            *("--trainer.enable_progress_bar", "false"),
        ]
    )
    said = capsys.readouterr().out
    written = json.loads((run / "probing.json").read_text())
    assert {path.name for path in run.iterdir()} >= {
        *("probing.csv", "mixes.csv", "trees.csv", "probing.png", "probing_ranks.png", "probing_trees.png", PROBES)
    }
    assert "selectivity" in said
    assert "distance: no better than the baseline (word order, UUAS 100.0): site 0, rank 2, with" in said
    assert "120 sentences" in said
    banks = load_banks(run / PROBES)
    again = run_on(data_of(world), experiment(tasks=["pos"], controls=False, portions=[]))  # only for its words
    held = again.words[0, "test"]
    found = []
    for seed in range(2):
        bank, about = banks[f"pos, seed {seed}, {world['model_0']}"]
        labels = Labels.from_plain(about["labels"])
        chosen = [a for a, arm in enumerate(bank.arms) if arm.source == "model" and not arm.control]
        found.append(f1(counts(bank.only(chosen), Examples(held, targets_of(labels, held))).sum(1)))
    rows = [row for row in written["rows"] if (row["task"], row["source"]) == ("pos", "model")]
    assert [row["site"] for row in rows] == [0, 1, 2, 3, None]
    assert [row["score"] for row in rows] == pytest.approx(torch.stack(found).mean(0).tolist())
    structural = [row for row in written["rows"] if row["probe"] == "distance"]
    assert Counter((row["source"], row["rank"]) for row in structural) == {
        ("word order", None): 1, **{(source, rank): 4 for source in ("model", "untrained") for rank in (2, 4)}
    }  # fmt: skip


def test_each_model_and_its_twin_read_every_text_once(world: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    reads: Counter[str] = Counter()
    read = layers.read_rows

    def counted(model: Any, inputs: Any, *others: Any) -> Any:
        reads[model.name] += len(inputs["input_ids"])
        return read(model, inputs, *others)

    monkeypatch.setattr(layers, "read_rows", counted)
    data = data_of(world, ("model_0", "model_1"))
    made = run_on(data, experiment(tasks=["pos", "distance", "depth"], portions=[]))
    texts = len(data.texts.fit) + len(data.texts.validation) + len(data.texts.test)
    assert len(reads) == 4
    assert set(reads.values()) == {texts}
    assert {row["model"] for row in made.rows} == {world["model_0"], world["model_1"]}


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
    world: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit, held = (write_spans(tmp_path / f"ner_{split}.json", seed) for seed, split in enumerate(("train", "test")))
    text = TextSource(fit, held_out=held, validation_share=0.1)
    made = run_on(data_of(world, text=text), experiment(tasks=["ner"], controls=False, mix=False, portions=[]))
    assert {row["n_targets"] for row in made.rows} == {6 * 60}
    assert all(row["score"] is not None for row in made.rows)
    assert capsys.readouterr().out.count(f"Texts of {fit}: ") == 1


def test_a_task_without_held_out_targets_is_refused_before_a_model_is_looked_for(
    world: dict[str, str], tmp_path: Path
) -> None:
    named = write_spans(tmp_path / "a.jsonl", 0, task="ner")
    other = write_spans(tmp_path / "b.jsonl", 1, task="roles")
    run = tmp_path / "run"
    for source, task in ((named, "ner"), (world["trees"], "pos"), (world["trees"], "depth")):
        says = f"held-out sentences to have what '{task}' of `tasks` asks for, but none of 60 has; they have: roles"
        with pytest.raises(ValueError, match=says):
            run_on(data_of(world, text=TextSource(source, held_out=other)), experiment(tasks=[task]))
        options = {"run": run, "tasks": f"[{task}]", "data.models": "[no/such]", "data.text.source": source}
        with pytest.raises(ValueError, match=says):
            train(["probe", *(f"--{name}={value}" for name, value in options.items()), f"--data.text.held_out={other}"])
    assert not run.exists()


def test_sentences_that_a_model_does_not_read_whole_are_dropped_and_counted(world: dict[str, str]) -> None:
    data = data_of(world, max_length=10)
    made = run_on(data, experiment(tasks=["pos"], controls=False, mix=False, portions=[]))
    for split in ("fit", "validation", "test"):
        texts = [text.split() for text in getattr(data.texts, split)["text"]]
        kept = sum(len(words) <= 8 for words in texts)  # and two special tokens
        assert made.meta["sentences"][split] == kept
        assert made.meta["sentences_dropped"][split] == len(texts) - kept
        assert len(texts) > kept or split == "validation"  # of few texts
        assert sum(len(own.words) for own in made.words[0, split].sentences) == made.words[0, split].states.shape[1]
    with pytest.raises(ValueError, match=r"reads whole, but \d+ are not, such as .*`long_sentences` drop"):
        run_on(data_of(world, max_length=10), experiment(tasks=["pos"], long_sentences="error"))


def test_what_cannot_be_probed_is_refused_before_reading(
    world: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = Sentence(("a", "b"), (0, 1))
    plain = write_texts(tmp_path / "plain.csv", [f"{word} film {n}" for n, word in enumerate(WORDS)])
    with pytest.raises(ValueError, match="Expected annotated sentences"):
        run_on(data_of(world, text=TextSource(plain)), experiment())
    with pytest.raises(ValueError, match=r"Expected `data\.rows` to be of words"):
        run_on(data_of(world, rows="tokens"), experiment())
    monkeypatch.setattr(layers, "read_rows", None)  # nothing is read before the tasks are checked
    with pytest.raises(ValueError, match="got 'ner'; there are: pos, morphology, dependencies"):
        run_on(data_of(world), experiment(tasks=["pos", "ner"]))
    for split, said in (("validation", "validation"), ("test", "held-out")):
        own = {"fit": [tree], "validation": [tree], "test": [tree], split: [Sentence(("a", "b"))]}
        monkeypatch.setattr("aligners.probing.reading.sentences_of", lambda _, split, own=own: own[split])
        with pytest.raises(ValueError, match=f"Expected {said} sentences to have what 'depth' of `tasks` asks for"):
            check_annotated(data_of(world), ["depth"])
    for wrong in ({"seeds": 0}, {"tasks": []}, {"ranks": []}, {"hidden": 0}):
        with pytest.raises(ValueError, match=f"Expected `{next(iter(wrong))}` to be at least"):
            ProbeExperiment(**wrong)  # type: ignore[arg-type]
    other = tmp_path / "other.safetensors"
    other.write_bytes(b"nothing of the kind")
    for path in (other, tmp_path / "absent"):
        with pytest.raises(ValueError, match=r"Expected `probes` to be a probes\.safetensors"):
            load_banks(path)
