"""Multiple choice: one logit an answer, compared with those of the other answers to its question."""

import random
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import pytest
import torch
from tests.aligners.finetuning.test_resuming import same
from tests.interrupting import strike
from tests.runs import quiet_trainer, rank_of
from tests.tiny import WORDS, tiny_model
from tests.world import World
from torch.nn.functional import cross_entropy
from transformers import BertForMultipleChoice

from aligners.callbacks.checkpoint import SaveFinetuning
from aligners.datamodules.model_texts import ModelTexts, labelled_texts
from aligners.datamodules.task_targets import classification_targets
from aligners.datamodules.text.loading import load_texts
from aligners.datamodules.text.sources import TextSource
from aligners.datamodules.text.texts import FittedTexts
from aligners.finetuning.classifier_training import Finetuning, FinetuningRecipe
from aligners.finetuning.jobs import Job, Variant, train
from aligners.finetuning.truncating import SurgeryEvaluation
from aligners.models import load_frozen

PLAIN = [word for word in WORDS if word != "good"]


def question(seed: int) -> dict[str, Any]:
    """Two to four answers, of which the right one has the word `good`."""
    draw = random.Random(seed)
    ends = [" ".join(draw.choices(PLAIN, k=draw.randint(2, 5))) for _ in range(draw.randint(2, 4))]
    right = draw.randrange(len(ends))
    ends[right] = f"good {ends[right]}"
    return {"ctx": " ".join(draw.choices(PLAIN, k=4)), "endings": ends, "label": str(right)}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, Any]]]:
    """What the Hub has of HellaSwag."""
    rows = {"train": [question(seed) for seed in range(160)], "validation": [question(900 + n) for n in range(31)]}
    tables = Mock(side_effect=lambda *_, **__: {name: datasets.Dataset.from_list(of) for name, of in rows.items()})
    monkeypatch.setattr(datasets, "load_dataset", tables)
    return rows


def data_of(models: str | list[str], **options: Any) -> ModelTexts:
    return labelled_texts(models, **{"text": TextSource("hellaswag"), "batch_size": 8, "max_length": 60} | options)


def tune(data: ModelTexts, folder: Path, **trainer: Any) -> dict[str, Any]:
    quiet = quiet_trainer(**{"max_epochs": 2, "callbacks": [SaveFinetuning(10.0).inside(folder)]} | trainer)
    job = Job(0, data.models[0], Variant(), 3, Path("none/seed-3"))
    return train(job, data, FinetuningRecipe(learning_rate=1e-2), "accuracy", quiet, folder)


def test_logits_loss_and_gradients_are_those_of_transformers(world: World, hub: dict[str, Any]) -> None:
    model = tiny_model("bert", n_labels=1)
    theirs = BertForMultipleChoice(model.config).eval()
    theirs.load_state_dict(model.state_dict())
    data, module = data_of(world.model_x), Finetuning(model.requires_grad_(True))
    questions = [row for row, of in enumerate(hub["validation"]) if len(of["endings"]) == 3]
    batch = data.split("test")[questions]
    inputs = {name: part.unflatten(0, (-1, 3)) for name, part in batch.inputs_x.items()}
    right = torch.tensor([int(hub["validation"][row]["label"]) for row in questions])
    expected = theirs(**inputs, labels=right)
    torch.testing.assert_close(module.logits(batch), expected.logits)
    loss = module._losses(batch).mean()
    torch.testing.assert_close(loss, expected.loss)
    loss.backward()
    expected.loss.backward()
    for name, weight in theirs.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, weight.grad, msg=name)


def test_questions_with_more_and_fewer_answers_do_not_change_each_other(world: World, hub: dict[str, Any]) -> None:
    data, module = data_of(world.model_x), Finetuning(tiny_model("bert", n_labels=1).requires_grad_(False))
    texts, rows = data.split("test"), range(len(hub["validation"]))
    assert {len(of["endings"]) for of in hub["validation"]} == {2, 3, 4}
    together = module._measured(texts[rows], "test")
    for row in rows:
        alone = texts[[row]]
        logits = module.logits(alone)
        assert logits.shape == (1, len(hub["validation"][row]["endings"]))
        answer = int(hub["validation"][row]["label"])
        assert together["loss"][row] == pytest.approx(float(cross_entropy(logits[0], torch.tensor(answer))), rel=1e-5)
        assert together["correct"][row] == float(logits[0].argmax() == answer)
        assert alone.labels is not None
        assert classification_targets(alone.labels).answer.tolist() == [answer]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_has_whole_questions(world: World, hub: dict[str, Any], world_size: int) -> None:
    seen = []
    for rank in range(world_size):
        data = data_of(world.model_x)
        data.trainer = rank_of(rank, world_size)
        for batch in data.loader("fit", shuffle=True):
            assert batch.answers is not None
            assert len(batch.inputs_x["input_ids"]) == int((batch.answers >= 0).sum())
            assert int(batch.labels.min()) >= 0
            seen += [(int(number), int(label)) for number, label in zip(batch.text, batch.labels, strict=True)]
    assert sorted(seen) == list(enumerate(data.answers("fit").tolist()))


@pytest.mark.slow
def test_a_model_learns_to_choose_and_is_truncated(world: World, hub: dict[str, Any], tmp_path: Path) -> None:
    data = data_of(world.model_x)
    row = tune(data, tmp_path, max_epochs=6)
    assert row["score_name"] == "accuracy"
    assert row["score"] == row["accuracy"] > 0.9
    assert row["validation_accuracy"] > 0.9
    assert row["n_texts"] == 31
    assert row["n_fit"] + row["n_validation"] == 160
    tuned = str(tmp_path / "none" / "seed-3")
    assert load_frozen(tuned).n_labels == 1
    rows = []
    for batch_size in (8, 3):
        evaluation = SurgeryEvaluation(FinetuningRecipe(learning_rate=1e-2))
        trainer, read = quiet_trainer(max_epochs=2), data_of([tuned], bases=world.model_x, batch_size=batch_size)
        trainer.fit(evaluation, datamodule=read)
        assert f"tuned/0/{3}/validation_accuracy" in trainer.callback_metrics
        trainer.test(evaluation, datamodule=read, verbose=False)
        rows.append({(r["kind"], r["site"], r["first"], r["last"]): r for r in evaluation.rows})
    native = rows[0]["native", 3, None, None]
    assert native["accuracy"] == row["accuracy"]
    assert native["loss"] == pytest.approx(row["loss"], rel=1e-5)
    assert {r["n_texts"] for r in evaluation.rows} == {31}
    for key, value in rows[0].items():
        if key[0] in ("native", "untuned", "skip"):
            assert rows[1][key]["loss"] == pytest.approx(value["loss"], rel=1e-5), key
    places = [int(of["label"]) for of in hub["validation"]]
    constant = int(data.constant_answers()[0])
    assert constant == data.answers("fit").bincount().argmax()
    assert evaluation.meta["majority_score"] == pytest.approx(places.count(constant) / len(places))


def test_a_choice_that_is_interrupted_ends_as_it_would_have(world: World, hub: Any, tmp_path: Path) -> None:
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    tune(data_of(world.model_x), tmp_path / "whole")
    with strike(Finetuning, "training_step", 13), pytest.raises(SystemExit):
        tune(data_of(world.model_x), tmp_path / "cut")
    tune(data_of(world.model_x), tmp_path / "cut")
    same(*(tmp_path / name / "none" / "seed-3" for name in ("cut", "whole")))


def test_answers_to_a_question_stay_together(hub: dict[str, Any]) -> None:
    hub["train"] += [hub["train"][0], hub["validation"][0]]  # a copy, and one that is held out
    other = {**hub["train"][1], "endings": ["good fine", *hub["train"][1]["endings"][1:]], "label": "0"}
    hub["train"].append(other)  # another question, though most of its answers are the same
    held = {**hub["validation"][1], "endings": [hub["validation"][1]["endings"][0], "good warm"], "label": "1"}
    hub["validation"].append(held)
    texts = load_texts(TextSource("hellaswag", max_texts=41, max_held_out=21))
    for split, most in ((texts.fit, 41), (texts.validation, 21), (texts.test, 21)):
        asked, right = split["answers_to"][:], split["label"][:]
        assert most - 4 < len(asked) <= most
        for of in set(asked):
            name, number = of.split()
            whole = hub[name][int(number)]["endings"]
            assert [split["text_pair"][row] for row in range(len(asked)) if asked[row] == of] == whole
            assert sum(right[row] for row in range(len(asked)) if asked[row] == of) == 1
    whole = load_texts(TextSource("hellaswag"))
    numbers = {of for split in (whole.fit, whole.validation) for of in split["answers_to"]}
    assert numbers == {f"train {n}" for n in range(163) if n not in (160, 161)}
    assert whole.origin["copies"] == [len(hub["train"][0]["endings"]), 0]
    seen = FittedTexts.of({}, whole.test.select([0]))  # one answer
    left = whole.without({"model": seen}).test
    assert set(whole.test["answers_to"]) - set(left["answers_to"]) == {"validation 0"}
    assert len(whole.test) - len(left) == len(hub["validation"][0]["endings"])
