from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from aligners.similarity.functional.attention import fold, real_pairs, word_pairs
from tests.references import attention as reference

# [CLS] the un+like+ly [SEP] / [CLS] good film [SEP] [PAD] [PAD]
WORD = torch.tensor([[-1, 0, 1, 1, 1, -1], [-1, 0, 1, -1, -1, -1]])
WORDS = torch.tensor([2, 2])


def random_weights(*shape: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.softmax(2 * torch.randn(shape, generator=draw, dtype=torch.float64), -1)


def test_hand_written_example() -> None:
    rows = [
        [1.0, 0.0, 0.0, 0.0, 0.0, 0.0],  # [CLS], dropped
        [0.2, 0.1, 0.1, 0.1, 0.2, 0.3],  # the: .1 to itself, .4 to the other
        [0.0, 0.5, 0.1, 0.2, 0.2, 0.0],
        [0.1, 0.0, 0.3, 0.3, 0.2, 0.1],
        [0.9, 0.1, 0.0, 0.0, 0.0, 0.0],  # the three pieces: (.5 + 0 + .1)/3 = .2 and (.5 + .8 + 0)/3
        [0.0, 0.0, 0.0, 0.0, 0.0, 1.0],
    ]
    found = fold([torch.tensor(rows)[None, None]], WORD[:1], WORDS[:1])
    mass = torch.tensor([0.5, 0.2 + 1.3 / 3], dtype=torch.float64)
    kept = torch.tensor([[0.1, 0.4], [0.2, 1.3 / 3]], dtype=torch.float64)
    torch.testing.assert_close(found[0, 0, 0], kept / mass[:, None], rtol=1e-6, atol=0)


def test_blocks_heads_and_texts_are_what_the_definition_gives_one_by_one() -> None:
    weights = random_weights(3, 2, 4, 6, 6)  # (L, B, H, T, T)
    word = torch.tensor([[-1, 0, 0, 1, 2, -1], [0, -1, 0, 1, -1, -1]])  # the second not even in one piece
    words = torch.tensor([3, 2])
    tokens = [[[1, 2], [3], [4]], [[0, 2], [3]]]
    found = fold(weights, word, words)
    assert found.shape == (3, 4, 2, 3, 3)
    for text, n in enumerate(words.tolist()):
        for block in range(3):
            for head in range(4):
                expected, _ = reference.fold(weights[block, text, head].numpy(), tokens[text])
                np.testing.assert_allclose(found[block, head, text, :n, :n], expected, rtol=1e-12)
    padded = found[:, :, 1]
    assert padded[..., 2, :].eq(0).all()
    assert padded[..., 2].eq(0).all()


def test_half_precision_weights_are_folded_in_float64() -> None:
    weights = random_weights(1, 2, 4, 6, 6).bfloat16()
    found = fold(weights, WORD, WORDS)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.sum(-1), torch.ones(1, 4, 2, 2, dtype=torch.float64), rtol=1e-14, atol=0)
    assert torch.equal(found, fold(weights.double(), WORD, WORDS))


def test_numbers_shared_by_two_tokenizers_pair_the_words() -> None:
    # The same words in one piece and in two: attention that is spread evenly over pieces folds to the same.
    whole = random_weights(1, 1, 2, 3, 3)
    pieces = (whole / 2).repeat_interleave(2, -1).repeat_interleave(2, -2)
    words = torch.tensor([3])
    a = fold(whole, torch.tensor([[0, 1, 2]]), words)
    b = fold(pieces, torch.tensor([[0, 0, 1, 1, 2, 2]]), words)
    torch.testing.assert_close(a, b, rtol=1e-13, atol=0)


def test_word_pairs_are_rows_and_heads_are_features() -> None:
    words = torch.tensor([2, 1, 3])
    weights = random_weights(2, 4, 3, 3, 3)
    rows = word_pairs(weights, words)
    assert rows.shape == (2, 4 + 9, 4)
    expected = [weights[1, 2, text, i, j] for text, n in ((0, 2), (2, 3)) for i in range(n) for j in range(n)]
    assert torch.equal(rows[1, :, 2], torch.stack(expected))
    assert real_pairs(words, 3).sum((1, 2)).tolist() == [4, 0, 9]


@pytest.mark.parametrize(
    ("word", "words"),
    [([0, 0, 1], 3), ([0, 2, -1], 2), ([-1, 1, 1], 2), ([0, 1, 2], 2), ([-1, -1, -1], 1)],
)
def test_numbers_that_leave_a_word_out_or_go_beyond_are_refused(word: list[int], words: int) -> None:
    for texts in ([word], [word, [0, 1, 2]]):
        counts = torch.tensor([words, 3][: len(texts)])
        with pytest.raises(ValueError, match="`word` to number the words of each text from 0"):
            fold(random_weights(1, len(texts), 1, 3, 3), torch.tensor(texts), counts)


def test_no_attention_left_on_words_is_refused() -> None:
    weights = random_weights(2, 2, 3, 6, 6)
    weights[1, 0, 2, 1] = torch.tensor([1.0, 0, 0, 0, 0, 0])
    with pytest.raises(ValueError, match="head 3 of block 2 puts all that word 0 of text 0"):
        fold(weights, WORD, WORDS)
    weights[1, 0, 2, 1] = torch.nan
    with pytest.raises(ValueError, match="head 3 of block 2"):
        fold(weights, WORD, WORDS)
