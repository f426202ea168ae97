from __future__ import annotations

import torch
from torch import Tensor

from datamodules.asking import Targets, classification_targets, masked_targets, next_token_targets

IDS = torch.tensor([[11, 12, 13, 14, 15], [21, 22, 23, 0, 0], [31, 0, 0, 0, 0]])
MASK = (IDS > 0).long()


def listed(targets: Targets) -> list[tuple[int, int, int]]:
    """(text, position, answer) of each unit."""
    places = [divmod(index, IDS.shape[1]) for index in targets.index.tolist()]
    assert [text for text, _ in places] == targets.owner.tolist()
    assert targets.answer.dtype == torch.int64
    assert targets.texts == len(IDS)
    assert len(targets) == len(places)
    return [(*place, answer) for place, answer in zip(places, targets.answer.tolist(), strict=True)]


def test_a_text_is_one_unit_of_its_class() -> None:
    targets = classification_targets(torch.tensor([2, 0, 1]))
    assert (targets.index.tolist(), targets.answer.tolist(), targets.owner.tolist()) == (
        [0, 1, 2],
        [2, 0, 1],
        [0, 1, 2],
    )
    assert (len(targets), targets.texts) == (3, 3)


def test_a_position_is_asked_for_the_next_token_where_there_is_one() -> None:
    expected = [(0, 0, 12), (0, 1, 13), (0, 2, 14), (0, 3, 15), (1, 0, 22), (1, 1, 23)]  # of one token: none
    assert listed(next_token_targets({"input_ids": IDS, "attention_mask": MASK})) == expected


def test_padding_on_the_left_asks_the_same_questions() -> None:
    ids, mask = IDS.flip(1), MASK.flip(1)  # so that the next token is the one before it
    expected = [(0, 0, 14), (0, 1, 13), (0, 2, 12), (0, 3, 11), (1, 2, 22), (1, 3, 21)]
    assert listed(next_token_targets({"input_ids": ids, "attention_mask": mask})) == expected


def test_without_a_mask_every_token_is_real() -> None:
    found = listed(next_token_targets({"input_ids": IDS}))
    assert len(found) == 3 * 4
    assert (2, 3, 0) in found


def test_texts_of_one_token_have_no_unit() -> None:
    targets = next_token_targets({"input_ids": IDS[:, :1]})
    assert (len(targets), targets.texts) == (0, 3)


def test_masked_positions_are_the_units() -> None:
    answers = torch.full_like(IDS, -100)
    answers[0, 3], answers[2, 0], answers[0, 1] = 7, 0, 5
    assert listed(masked_targets(answers)) == [(0, 1, 5), (0, 3, 7), (2, 0, 0)]


def test_targets_move_whole() -> None:
    targets = next_token_targets({"input_ids": IDS, "attention_mask": MASK})
    moved = targets.to("meta", non_blocking=True)
    parts: list[Tensor] = [moved.index, moved.answer, moved.owner]
    assert all(part.device.type == "meta" for part in parts)
    assert (moved.texts, len(moved)) == (3, 6)
    assert targets.index.device.type == "cpu"
