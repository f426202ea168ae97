"""What heads are asked: classes, next tokens, and masked tokens by BERT's recipe."""

from typing import Any

import pytest
import torch
from torch import Tensor

from datamodules.asking import Targets, classification_targets, mask_tokens, masked_targets, next_token_targets

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


def masked(texts: list[int], side: str = "right", **options: Any) -> dict[int, tuple[list[int], list[int]]]:
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
    together = masked(list(range(6)))
    assert masked([5, 3, 1, 0, 2, 4], "left") == together
    assert all(masked([text]) == {text: together[text]} for text in range(6))


@pytest.mark.parametrize("share", [0.15, 1.0])
def test_of_each_text_the_share_is_chosen_and_at_least_one(share: float) -> None:
    for text, (tokens, answers) in masked(list(range(6)), share=share).items():
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
    draws = [masked([3]), masked([3], seed=1), masked([3], epoch=1)]
    assert all(a != b for a, b in zip(draws, draws[1:] + draws[:1], strict=True))
    _, answers = mask_tokens(*batch([3, 3])[:2], torch.tensor([3, 12]), **OPTIONS)
    assert (answers[0] != answers[1]).any()


def test_a_share_that_cannot_be_is_refused() -> None:
    for share in (0.0, 1.5):
        with pytest.raises(ValueError, match=rf"`share`.*above 0 and at most 1.*got {share}"):
            masked([0], share=share)
