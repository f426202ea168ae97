from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from datamodules.asking import mask_tokens

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
    inputs = {"input_ids": ids, "attention_mask": (ids != PADDING).long()}
    return inputs, special, torch.tensor(texts)


def masked(texts: list[int], side: str = "right", **options: Any) -> dict[int, tuple[list[int], list[int]]]:
    """For each text its tokens after masking, and its answers."""
    inputs, special, numbers = batch(texts, side)
    found, answers = mask_tokens(inputs, special, numbers, **OPTIONS | options)
    assert found["input_ids"].dtype == answers.dtype == torch.int64
    assert (answers[special] == -100).all()
    assert torch.equal(found["input_ids"][special], inputs["input_ids"][special])
    return {
        text: (found["input_ids"][row][~special[row]].tolist(), answers[row][~special[row]].tolist())
        for row, text in enumerate(texts)
    }


def test_a_text_draws_the_same_in_any_batch_padded_on_either_side() -> None:
    together = masked(list(range(6)))
    assert masked([5, 3, 1, 0, 2, 4], "left") == together
    for text in range(6):
        assert masked([text]) == {text: together[text]}


@pytest.mark.parametrize("share", [0.15, 0.5, 1.0])
def test_of_each_text_the_share_is_chosen_and_at_least_one(share: float) -> None:
    for text, (tokens, answers) in masked(list(range(6)), share=share).items():
        asked = [place for place, answer in enumerate(answers) if answer != -100]
        assert len(asked) == max(1, round(share * LENGTHS[text]))
        for place, (token, answer) in enumerate(zip(tokens, answers, strict=True)):
            own = 100 * (text % 9 + 1) + place
            assert answer == (own if place in asked else -100)
            assert place in asked or token == own


def test_a_text_without_a_token_of_its_own_is_asked_nothing() -> None:
    inputs, special, numbers = batch([0, 1], lengths=(0, 4))
    _, answers = mask_tokens(inputs, special, numbers, **OPTIONS)
    assert (answers != -100).sum(1).tolist() == [0, 1]


def test_chosen_tokens_are_masked_replaced_and_left_as_often_as_the_recipe_says() -> None:
    many = 400
    inputs, special, numbers = batch(list(range(many)), lengths=(80,) * many)
    found, answers = mask_tokens(inputs, special, numbers, **OPTIONS)
    asked = answers != -100
    assert int(asked.sum()) == many * 12
    new, own = found["input_ids"][asked], answers[asked]
    shares = torch.stack([new == MASK, (new != MASK) & (new != own), new == own]).double().mean(1)
    torch.testing.assert_close(shares, torch.tensor([0.8, 0.1, 0.1]).double(), rtol=0, atol=0.015)
    other = new[(new != MASK) & (new != own)]
    assert other.min() < 0.03 * VOCABULARY  # from the whole vocabulary
    assert other.max() > 0.97 * VOCABULARY
    assert other.max() < VOCABULARY
    places = asked[:, 1:-1].double().mean(0)  # and no place is preferred
    assert places.min() > 0.08
    assert places.max() < 0.22


def test_seed_epoch_and_text_each_change_the_draw() -> None:
    first = masked([3])
    assert masked([3]) == first
    for other in (masked([3], seed=1), masked([3], epoch=1)):
        assert other != first
    assert masked([3], seed=1) != masked([3], epoch=1)
    inputs, special, _ = batch([3, 3])
    _, answers = mask_tokens(inputs, special, torch.tensor([3, 12]), **OPTIONS)
    assert (answers[0] != answers[1]).any()


def test_what_it_was_given_stays_as_it_was_and_other_inputs_are_handed_on() -> None:
    inputs, special, numbers = batch([0, 3])
    before = {name: value.clone() for name, value in inputs.items()}
    found, _ = mask_tokens(inputs, special, numbers, **OPTIONS)
    assert all(torch.equal(inputs[name], before[name]) for name in inputs)
    assert found["attention_mask"] is inputs["attention_mask"]
    assert not torch.equal(found["input_ids"], inputs["input_ids"])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"share": 0.0}, r"`share`.*above 0 and at most 1.*got 0\."),
        ({"share": 1.5}, r"`share`.*got 1\.5"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        masked([0], **options)
