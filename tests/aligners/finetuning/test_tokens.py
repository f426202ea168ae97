"""Models fine-tuned to parse sentences and to answer questions, on texts whose trees and answers follow a rule."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.aligners.finetuning.test_resuming import same
from tests.interrupting import strike
from tests.runs import quiet_trainer
from tests.tiny import WORDS
from tests.world import World
from torch import Tensor, nn

from aligners.callbacks.checkpoint import SaveFinetuning
from aligners.datamodules.batches import TextBatch
from aligners.datamodules.model_texts import ModelTexts, labelled_texts
from aligners.datamodules.text.loading import load_texts
from aligners.datamodules.text.sources import TextSource
from aligners.finetuning.classifier_training import Finetuning, FinetuningRecipe
from aligners.finetuning.jobs import Job, Variant, train
from aligners.finetuning.tokens import NOTHING, RELATION, Biaffine, Spans, Trees, TrueTrees, token_task, tree_losses
from aligners.models import load_frozen


def sentence(seed: int) -> list[str]:
    """Known words, one of them `good`."""
    draw = random.Random(seed)
    words = [word for word in draw.choices(WORDS, k=draw.randint(4, 8)) if word != "good"]
    place = draw.randrange(len(words))
    return [*words[:place], "good", *words[place:]]


def write_trees(path: Path, seeds: range) -> str:
    """All words depend on `good`."""
    lines = []
    for words in map(sentence, seeds):
        for number, word in enumerate(words, start=1):
            head = 0 if word == "good" else words.index("good") + 1
            name = "dep" if head else "root"
            pos = "NOUN" if word[0] < "m" else "VERB"
            lines.append("\t".join([str(number), word, "_", pos, "_", "_", str(head), name, "_", "_"]))
        lines.append("")
    path.write_text("\n".join([*lines, ""]))
    return str(path)


def asked(seed: int) -> dict[str, Any]:
    """A passage with a question whose answer is `good`."""
    text = " ".join(sentence(seed))
    start = text.index("good")
    answer = {"text": "good", "answer_start": start}
    return {"context": text, "qas": [{"question": f"how is {text.split()[-1]}", "answers": [answer] * 2}]}


def write_questions(path: Path, passages: list[dict[str, Any]]) -> str:
    path.write_text(json.dumps({"data": [{"title": "t", "paragraphs": passages}]}))
    return str(path)


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> TextSource:
    folder = tmp_path_factory.mktemp("trees")
    fit = write_trees(folder / "fit.conllu", range(160))
    return TextSource(fit, held_out=write_trees(folder / "test.conllu", range(900, 930)))


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> TextSource:
    folder = tmp_path_factory.mktemp("questions")
    fit = write_questions(folder / "train.json", [asked(seed) for seed in range(160)])
    return TextSource(fit, held_out=write_questions(folder / "dev.json", [asked(seed) for seed in range(900, 930)]))


def data_of(world: World, text: TextSource, **options: Any) -> ModelTexts:
    return labelled_texts(world.model_x, **{"text": text, "batch_size": 16, "max_length": 60} | options)


def tune(data: ModelTexts, folder: Path, rate: float = 1e-2, **trainer: Any) -> dict[str, Any]:
    quiet = quiet_trainer(**{"max_epochs": 12, "callbacks": [SaveFinetuning(10.0).inside(folder)]} | trainer)
    job, task = Job(0, data.models[0], Variant(), 3, Path("none/seed-3")), token_task(data, 0)
    assert task is not None
    return train(job, data, FinetuningRecipe(learning_rate=rate), task.score, quiet, folder)


def outputs_of(batch: TextBatch, count: int) -> Tensor:
    return torch.zeros(*batch.inputs_x["input_ids"].shape, count)


def test_a_parser_is_trained_saved_and_read(world: World, trees: TextSource, tmp_path: Path) -> None:
    row = tune(data_of(world, trees), tmp_path, 3e-3, max_epochs=8)
    assert row["score_name"] == "las"
    assert row["accuracy"] >= row["score"] > 0.9
    assert row["score_low"] <= row["score"] <= row["score_high"]
    read = load_frozen(tmp_path / "none" / "seed-3")
    assert read.task is None  # its encoder alone
    assert read.model.config.relations == ["dep", "root"]
    weights = load_file(tmp_path / "none" / "seed-3" / "model.safetensors")
    assert weights["parser.relation"].shape == (2, RELATION + 1, RELATION + 1)


def test_a_parser_that_is_interrupted_ends_as_it_would_have(world: World, trees: TextSource, tmp_path: Path) -> None:
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    tune(data_of(world, trees), tmp_path / "whole", max_epochs=2)
    with strike(Finetuning, "training_step", 13), pytest.raises(SystemExit):
        tune(data_of(world, trees), tmp_path / "cut", max_epochs=2)
    tune(data_of(world, trees), tmp_path / "cut", max_epochs=2)
    same(*(tmp_path / name / "none" / "seed-3" for name in ("cut", "whole")))


class Known(nn.Module):
    """A parser that takes `good` for every word's head, and each relation for that of a root."""

    def __init__(self, heads: list[int]) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, words: Tensor) -> Tensor:
        scores = torch.zeros(*words.shape[:2], words.shape[1], 3)
        scores[..., 2] = 1.0  # dep, root
        for number, head in enumerate(self.heads):
            scores[number, :, head, 0] = 5.0
        return scores


def test_las_and_uas_are_over_all_words(world: World, trees: TextSource) -> None:
    data = data_of(world, trees)
    batch, texts = data.split("test")[[0, 1, 2]], data.texts.test["text"][:3]
    parser = Known([text.split().index("good") for text in texts])

    def measures(data: ModelTexts, batch: TextBatch) -> dict[str, Tensor]:
        task = Trees(data, 0)
        task.parser = parser
        return task.measures(outputs_of(batch, Trees.outputs), batch, "test")

    found = measures(data, batch)
    words = [len(text.split()) for text in texts]
    assert found["weight"].tolist() == found["other"].tolist() == words
    assert found["correct"].tolist() == [1, 1, 1]  # the roots
    cut = data_of(world, trees, max_length=5)  # three words and two special tokens
    batch, texts = cut.split("test")[[0, 1, 2]], cut.texts.test["text"][:3]
    found = measures(cut, batch)
    assert found["weight"].tolist() == words
    assert found["other"].tolist() == [3 * (text.split().index("good") < 3) for text in texts]
    assert {0, 3} == {int(n) for n in found["other"]}
    assert float(found["loss"].max()) < 10  # nobody is asked for a head that was cut off


def test_the_loss_of_a_parser_is_that_of_heads_and_relations() -> None:
    features = torch.randn(2, 3, Trees.outputs, requires_grad=True)
    scores = Biaffine(4)(features)  # whose weights are zero
    assert scores.shape == (2, 3, 3, 5)
    assert not scores.any()
    heads, relations = torch.tensor([[0, 0, 1], [1, 1, NOTHING]]), torch.tensor([[3, 1, 2], [0, NOTHING, NOTHING]])
    losses = tree_losses(scores, TrueTrees(heads, relations, heads != NOTHING))
    assert losses.tolist() == pytest.approx([math.log(3) + math.log(4), math.log(3) + math.log(4) / 2])


def test_questions_are_answered(world: World, questions: TextSource, tmp_path: Path) -> None:
    row = tune(data_of(world, questions), tmp_path, max_epochs=6)
    assert row["score_name"] == "span_f1"
    assert row["score"] >= row["accuracy"] > 0.9
    assert load_frozen(tmp_path / "none" / "seed-3").task is None


def test_f1_and_exact_match_of_the_best_span_of_the_passage(world: World, questions: TextSource) -> None:
    data = data_of(world, questions)
    task, batch = Spans(data, 0), data.split("test")[[0, 1]]
    texts = data.texts.test[:2]
    outputs = outputs_of(batch, 2)
    for number, (question, passage) in enumerate(zip(texts["text"], texts["text_pair"], strict=True)):
        first = 2 + len(question.split())  # after two special tokens, a token a word
        good = passage.split().index("good")
        outputs[number, 0] = 50.0  # not of the passage
        outputs[number, first + good - number, 0] = 9.0  # in the second text the answer has a word too many
        outputs[number, first + good, 1] = 9.0
    found = task.measures(outputs, batch, "test")
    assert found["other"].tolist() == [1, 0]
    assert found["correct"].tolist() == pytest.approx([1, 2 / 3])
    short = data_of(world, questions, max_length=6)  # nothing of the passage is left, or a word
    batch = short.split("test")[[0, 1]]
    found = Spans(short, 0).measures(outputs_of(batch, 2), batch, "test")
    assert bool(found["loss"].isfinite().all())


def test_files_of_questions_are_read_and_refused(tmp_path: Path, questions: TextSource) -> None:
    texts = load_texts(questions)
    assert texts.test["answers"][0]["text"] == ["good", "good"]
    assert texts.origin["text_columns"] == ["question", "context"]
    (tmp_path / "no.json").write_text('{"data": [{"paragraphs": [{"qas": []}, {"context": "a"}]}]}')
    with pytest.raises(ValueError, match=r"no.json cannot be read as questions in SQuAD's format: there is no 'qas'"):
        load_texts(TextSource(str(tmp_path / "no.json")))
