"""Texts for whole models, and what heads are asked about them: classes, next tokens, masked tokens by BERT's recipe."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.runs import quiet_trainer
from tests.stitches import model_texts
from tests.tiny import tiny_folder
from tests.world import TEST_TEXTS, World, sentences, write_texts
from torch import Tensor

from aligners.datamodules.model_texts import ModelTexts, labelled_texts
from aligners.datamodules.task_targets import (
    Targets,
    TaskBatch,
    classification_targets,
    mask_tokens,
    masked_targets,
    next_token_targets,
)
from aligners.datamodules.text.sources import TextSource


def batches(data: ModelTexts, split: Any = "test", epoch: int = 0, **options: Any) -> list[TaskBatch]:
    return [data.prepare(texts, epoch) for texts in data.loader(split, **options)]


def asked(found: list[TaskBatch]) -> dict[int, tuple[list[int], list[int]]]:
    """Text -> where in it something is asked, counted without padding, and what."""
    units: dict[int, tuple[list[int], list[int]]] = {}
    for batch in found:
        mask, targets = batch.inputs["attention_mask"], batch.targets
        within = targets.index - targets.owner * mask.shape[1] - mask.argmax(1)[targets.owner]
        for text, place, answer in zip(batch.texts.text[targets.owner], within, targets.answer, strict=True):
            places, answers = units.setdefault(int(text), ([], []))
            places.append(int(place))
            answers.append(int(answer))
    return units


def tokens(found: list[TaskBatch]) -> dict[int, list[int]]:
    """Text -> what the models see of it."""
    return {
        int(number): ids[mask.bool()].tolist()
        for batch in found
        for number, ids, mask in zip(
            batch.texts.text, batch.inputs["input_ids"], batch.inputs["attention_mask"], strict=True
        )
    }


def test_every_real_token_is_a_row_and_every_text_is_asked_its_class(world: World) -> None:
    data = model_texts(world)
    found = batches(data)
    labels = data.split("test").labels
    assert labels is not None
    for batch in found:
        mask = batch.inputs["attention_mask"].bool()
        assert torch.equal(batch.rows.index, mask.flatten().nonzero()[:, 0])
        assert torch.equal(batch.targets.answer, labels[batch.texts.text])
        assert batch.texts.inputs[-1] is batch.inputs
    assert sorted(torch.cat([batch.texts.text for batch in found]).tolist()) == list(range(TEST_TEXTS))
    assert data.task == "classification"


def test_masks_follow_from_the_text_and_the_options(world: World, masked: list[str], causal: list[str]) -> None:
    data = model_texts(world, models=masked)
    found = batches(data)
    assert asked(found) == asked(batches(data, batch_size=5))
    assert tokens(found) == tokens(batches(data, batch_size=5))
    plain = {int(n): ids for b in data.loader("test") for n, ids in zip(b.text, b.inputs_x["input_ids"], strict=True)}
    for text, (places, answers) in asked(found).items():
        assert answers == [int(plain[text][place]) for place in places]
    assert all(batch.texts.inputs[1] is batch.inputs for batch in found)
    assert asked(batches(model_texts(world, models=masked, seed=1))) != asked(found)
    more = asked(batches(model_texts(world, models=masked, masked_share=0.5)))
    assert sum(len(places) for places, _ in more.values()) > 2 * sum(len(places) for places, _ in asked(found).values())
    following = batches(model_texts(world, models=causal, sites=[1]))
    seen = tokens(following)
    for text, (places, answers) in asked(following).items():
        assert (places, answers) == (list(range(len(seen[text]) - 1)), seen[text][1:])


def test_training_texts_are_masked_anew_in_every_epoch_and_others_never(world: World, masked: list[str]) -> None:
    data = model_texts(world, models=masked)
    texts, plain, first = list(data.loader("fit")), batches(data, "fit"), batches(data, "fit", epoch=1)

    def seen(epoch: int, *, training: bool) -> dict[int, tuple[list[int], list[int]]]:
        data.trainer = SimpleNamespace(training=training, current_epoch=epoch)  # type: ignore[assignment]
        return asked([data.on_before_batch_transfer(batch, 0) for batch in texts])  # type: ignore[misc]

    assert seen(0, training=True) == asked(first) != seen(1, training=True)
    assert seen(0, training=False) == seen(1, training=False) == asked(plain) != asked(first)


def test_models_that_cannot_be_stitched_are_refused(world: World, folders: list[str], tmp_path: Path) -> None:
    x, y, unmasked = world.model_x, world.model_y, str(tiny_folder(tmp_path, task="masked"))
    for models, sites, says in (
        ([x, y], [4], "between 0 and 3, but got 4"),
        ([x, y], ["1:4"], "got 4"),
        ([x, y], [-1], "got -1"),
        ([x, y, x], ["5:1"], "got 5"),
        ([x, folders[0]], [1], r"Stitching puts the state of a token.*tokenizers of .*choose models of one"),
        ([unmasked, unmasked], [1], r"tokenizer with a mask token.*has none. Set its `mask_token`"),
    ):
        with pytest.raises(ValueError, match=says):
            model_texts(world, models=models, sites=sites).check_models()


def test_a_classification_without_labels_is_refused(world: World, tmp_path: Path) -> None:
    plain = tmp_path / "plain.csv"
    plain.write_text("\n".join(["text", *sentences(80)]))
    with pytest.raises(ValueError, match=r"Classification needs labels.*`label_column`"):
        batches(model_texts(world, text=TextSource(str(plain))))
    with pytest.raises(ValueError, match=r"needs labels, but the texts of .* have none\. Name a `label_column`"):
        labelled(world, text=TextSource(str(plain))).setup("fit")


# ---------------------------------------------------------------------- labelled texts


def labelled(world: World, **options: Any) -> ModelTexts:
    given = {"models": world.model_x, "text": world.text, "batch_size": 16, "max_length": 60}
    return labelled_texts(**given | options)


def test_every_text_comes_once_with_its_class(world: World) -> None:
    data = labelled(world, models=[world.model_x, world.model_y])
    batches = list(data.loader("test"))
    assert sorted(torch.cat([batch.text for batch in batches]).tolist()) == list(range(TEST_TEXTS))
    assert all(torch.equal(batch.labels, data.answers("test")[batch.text]) for batch in batches)
    assert data.classes == 2


def test_bases_come_after_the_models_under_heads_of_their_own(world: World) -> None:
    data = labelled(world, bases=[world.model_x], seed=3)
    tuned, base = data.frozen
    batch = next(iter(data.loader("test")))
    assert torch.equal(tuned.front(batch.inputs[0], [3])[0], base.front(batch.inputs[1], [3])[0])
    assert not torch.equal(tuned.logits(batch.inputs[0]), base.logits(batch.inputs[1]))
    assert [model["name"] for model in data.describe()["bases"]] == [world.model_x]
    assert labelled(world, bases=world.model_x, seed=3).frozen[1].fingerprint == base.fingerprint


def test_the_order_of_training_follows_from_its_seed(world: World) -> None:
    data, orders = labelled(world), []
    for order in (0, 1, 0):
        data.order = order
        data.trainer = quiet_trainer()
        orders.append([batch.text.tolist() for batch in data.train_dataloader()])
    assert orders[0] == orders[2]
    assert orders[0] != orders[1]


def test_the_majority_is_that_of_the_fitting_texts(tmp_path: Path, world: World) -> None:
    texts = sentences(80)
    fit = write_texts(tmp_path / "fit.csv", texts[20:], [0, 1, 1] * 20)
    held_out = write_texts(tmp_path / "test.csv", texts[:20], [0] * 15 + [1] * 5)
    data = labelled(world, text=TextSource(fit, held_out=held_out))
    assert data.constant_answers().tolist() == [1] * 20
    assert data.texts.constant_label(regression=False) == 1
    mean = sum(data.texts.fit["label"]) / len(data.texts.fit)
    assert data.texts.constant_label(regression=True) == pytest.approx(mean)


def test_a_base_needs_a_classifier_to_answer_like(tmp_path: Path, world: World) -> None:
    bare = str(tiny_folder(tmp_path / "bare", n_labels=None))
    with pytest.raises(ValueError, match="`models` to be classifiers where `bases` are named"):
        _ = labelled(world, models=bare, bases=world.model_x).frozen


IDS = torch.tensor([[11, 12, 13, 14, 15], [21, 22, 23, 0, 0], [31, 0, 0, 0, 0]])
REAL = (IDS > 0).long()


def listed(targets: Targets) -> list[tuple[int, int, int]]:
    """(text, position, answer) of each unit."""
    places = [divmod(index, IDS.shape[1]) for index in targets.index.tolist()]
    assert [text for text, _ in places] == targets.owner.tolist()
    assert targets.answer.dtype == torch.int64
    assert (len(targets), targets.texts) == (len(places), len(IDS))
    return [(*place, answer) for place, answer in zip(places, targets.answer.tolist(), strict=True)]


def test_a_text_is_one_unit_of_its_class_and_a_masked_position_of_its_token() -> None:
    targets = classification_targets(torch.tensor([2, 0, 1]))
    found = [part.tolist() for part in (targets.index, targets.answer, targets.owner)]
    assert (found, len(targets), targets.texts) == ([[0, 1, 2], [2, 0, 1], [0, 1, 2]], 3, 3)
    answers = torch.full_like(IDS, -100)
    answers[0, 3], answers[2, 0], answers[0, 1] = 7, 0, 5
    assert listed(masked_targets(answers)) == [(0, 1, 5), (0, 3, 7), (2, 0, 0)]


@pytest.mark.parametrize(
    ("ids", "mask", "expected"),
    [
        (IDS, REAL, [(0, 0, 12), (0, 1, 13), (0, 2, 14), (0, 3, 15), (1, 0, 22), (1, 1, 23)]),  # of one token: none
        (IDS.flip(1), REAL.flip(1), [(0, 0, 14), (0, 1, 13), (0, 2, 12), (0, 3, 11), (1, 2, 22), (1, 3, 21)]),
        (IDS, None, [(t, p, int(IDS[t, p + 1])) for t in range(3) for p in range(4)]),  # every token is real
    ],
)
def test_a_position_is_asked_for_the_next_token_where_there_is_one(
    ids: Tensor, mask: Tensor | None, expected: list[tuple[int, int, int]]
) -> None:
    inputs = {"input_ids": ids} if mask is None else {"input_ids": ids, "attention_mask": mask}
    assert listed(next_token_targets(inputs)) == expected
    assert len(next_token_targets({"input_ids": ids[:, :1]})) == 0


# ---------------------------------------------------------------------- masks

MASK, VOCABULARY, FIRST, LAST, PADDING = 4, 1000, 1, 2, 0
LENGTHS = (12, 5, 3, 60, 1, 9)  # without the special tokens


class Tokenizer:
    mask_token_id = MASK

    def __len__(self) -> int:
        return VOCABULARY


OPTIONS: dict[str, Any] = {"tokenizer": Tokenizer(), "share": 0.15, "seed": 0, "epoch": 0}


def batch(texts: list[int], side: str = "right", lengths: tuple[int, ...] = LENGTHS) -> tuple[dict, Tensor, Tensor]:
    """Inputs, special tokens and numbers of these texts; a token's id says which text and place it has."""
    longest = max(lengths[text] for text in texts) + 2
    ids, special = torch.full((len(texts), longest), PADDING), torch.ones(len(texts), longest, dtype=torch.bool)
    for row, text in enumerate(texts):
        start = longest - lengths[text] - 2 if side == "left" else 0
        inner = slice(start + 1, start + 1 + lengths[text])
        ids[row, start], ids[row, inner.stop] = FIRST, LAST
        ids[row, inner] = 100 * (text % 9 + 1) + torch.arange(lengths[text])
        special[row, inner] = False
    return {"input_ids": ids, "attention_mask": (ids != PADDING).long()}, special, torch.tensor(texts)


def masks_of(texts: list[int], side: str = "right", **options: Any) -> dict[int, tuple[list[int], list[int]]]:
    """For each text its tokens after masking, and its answers; what was given stays as it was."""
    inputs, special, numbers = batch(texts, side)
    found, answers = mask_tokens(inputs, special, numbers, **OPTIONS | options)
    assert (answers[special] == -100).all()
    assert torch.equal(inputs["input_ids"], batch(texts, side)[0]["input_ids"])
    assert torch.equal(found["input_ids"][special], inputs["input_ids"][special])
    assert found["attention_mask"] is inputs["attention_mask"]
    return {
        text: (found["input_ids"][row][~special[row]].tolist(), answers[row][~special[row]].tolist())
        for row, text in enumerate(texts)
    }


def test_a_text_draws_the_same_in_any_batch_padded_on_either_side() -> None:
    together = masks_of(list(range(6)))
    assert masks_of([5, 3, 1, 0, 2, 4], "left") == together
    assert all(masks_of([text]) == {text: together[text]} for text in range(6))


@pytest.mark.parametrize("share", [0.15, 1.0])
def test_of_each_text_the_share_is_chosen_and_at_least_one(share: float) -> None:
    for text, (tokens, answers) in masks_of(list(range(6)), share=share).items():
        asked = [place for place, answer in enumerate(answers) if answer != -100]
        assert len(asked) == max(1, round(share * LENGTHS[text]))
        for place, (token, answer) in enumerate(zip(tokens, answers, strict=True)):
            own = 100 * (text % 9 + 1) + place
            assert answer == (own if place in asked else -100)
            assert place in asked or token == own
    _, answers = mask_tokens(*batch([0, 1], lengths=(0, 4)), **OPTIONS)
    assert (answers != -100).sum(1).tolist() == [0, 1]  # where there is none to choose, none is


def test_chosen_tokens_are_masked_replaced_and_left_as_often_as_the_recipe_says() -> None:
    many = 400
    found, answers = mask_tokens(*batch(list(range(many)), lengths=(80,) * many), **OPTIONS)
    asked = answers != -100
    assert int(asked.sum()) == many * 12
    new, own = found["input_ids"][asked], answers[asked]
    shares = torch.stack([new == MASK, (new != MASK) & (new != own), new == own]).double().mean(1)
    torch.testing.assert_close(shares, torch.tensor([0.8, 0.1, 0.1]).double(), rtol=0, atol=0.015)
    other = new[(new != MASK) & (new != own)]  # from the whole vocabulary
    assert other.min() < 0.03 * VOCABULARY < 0.97 * VOCABULARY < other.max() < VOCABULARY
    places = asked[:, 1:-1].double().mean(0)  # and no place is preferred
    assert 0.08 < places.min() <= places.max() < 0.22


def test_seed_epoch_and_text_each_change_the_draw() -> None:
    same, *others = masks_of([3]), masks_of([3], seed=1), masks_of([3], epoch=1)
    assert same not in others
    assert others[0] != others[1]
    _, answers = mask_tokens(*batch([3, 3])[:2], torch.tensor([3, 12]), **OPTIONS)
    assert (answers[0] != answers[1]).any()


def test_a_share_that_cannot_be_is_refused() -> None:
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match=rf"`share`.*above 0 and at most 1.*got {share}"):
            masks_of([0], share=share)
