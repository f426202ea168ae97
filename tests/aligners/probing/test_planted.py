"""Trees that are planted into states, and found there by structural probes."""

import numpy as np
import pytest
import torch
from scipy.stats import rankdata, spearmanr

from aligners.probing.bank import Arm, Bank, Examples, Words, fresh_bank
from aligners.probing.training import ProbeTraining, train_bank
from aligners.probing.trees import (
    DepthProbes,
    DistanceProbes,
    Trees,
    TreeScores,
    by_length,
    predictions,
    tree_scores,
)
from datamodules.text.annotated.grammar import sentences
from datamodules.text.annotated.sentence import Sentence
from tests.aligners.probing.made import made_words

WIDTH, RANK = 32, 14
ARMS = [Arm("model", 0, rank=RANK), Arm("model", 1, rank=RANK)]
HOW = ProbeTraining(batch=40, learning_rate=2e-2, least_steps=12, patience=3)


def planted(own: list[Sentence], seed: int) -> Words:
    """Words whose layer 0 lays out their tree: squared distances are those in the tree, in 14 of 32 dimensions.

    Each edge has a direction of its own, with a sign that is drawn, and a word is the sum of those on its way to the
    root, so that its squared length is its depth. The other dimensions are noise of unit variance, and everything is
    rotated. Layer 1 is noise alone.
    """
    draw = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(99))).Q
    rows = []
    for sentence in own:
        signs = 2.0 * torch.randint(2, (RANK,), generator=draw) - 1
        for word in range(len(sentence.words)):
            path = torch.zeros(RANK)
            while sentence.heads[word]:
                path[word] = signs[word]  # of the edge that leads up from this word
                word = sentence.heads[word] - 1
            rows.append(path)
    paths = torch.stack(rows)
    noise = torch.randn(2, len(paths), WIDTH, generator=draw)
    told = torch.cat((paths, noise[0, :, RANK:]), 1) @ turn
    return made_words(own, told, noise[1])


@pytest.fixture(scope="module")
def worlds() -> tuple[Words, ...]:
    short = [sentence for sentence in sentences(700) if 5 <= len(sentence.words) <= RANK]
    return planted(short[:240], 0), planted(short[240:300], 1), planted(short[300:340], 2)


def trained(kind: type[DistanceProbes | DepthProbes], words: Words, watched: Words) -> Bank:
    bank = fresh_bank(kind, ARMS, words, 0)
    train_bank(bank, *(Examples(own, Trees.of(own)) for own in (words, watched)), HOW, 0)
    return bank


def scores(bank: Bank, held: Words, *, rounded: bool) -> TreeScores:
    trees = Trees.of(held)
    found = predictions(bank, Examples(held, trees))
    if rounded:
        found = ((number, values.round()) for number, values in found)
    probe = "distance" if isinstance(bank.probes, DistanceProbes) else "depth"
    return tree_scores(probe, found, held.sentences, trees)


@pytest.mark.parametrize("kind", [DistanceProbes, DepthProbes])
def test_planted_trees_are_found_and_noise_has_none(
    kind: type[DistanceProbes | DepthProbes], worlds: tuple[Words, ...]
) -> None:
    bank = trained(kind, worlds[0], worlds[2])
    found, rounded = (scores(bank, worlds[1], rounded=each) for each in (False, True))
    assert found.hits[0].sum() >= 0.99 * found.asked.sum()  # edges, or roots; rounding may cost one of them
    assert found.hits[1].sum() < 0.6 * found.asked.sum()
    spearman, of_integers = (by_length(each.spearman, each.lengths) for each in (found, rounded))
    assert of_integers[0] > 0.99
    assert spearman[0] < 0.97  # as any prediction without ties would have: see below
    most = by_length(torch.from_numpy(greatest(kind, worlds[1]))[None], found.lengths)
    assert spearman[0].item() == pytest.approx(most[0].item(), abs=2e-3)
    assert spearman[1] < 0.5


def most_spearman(true: np.ndarray) -> np.ndarray:
    """The greatest rank correlation along the last axis that a prediction without ties can have.

    Distances and depths are whole numbers and many of them are equal. A prediction that is exact but for the last
    digit puts an order on those, too, and every such order has the same correlation: √(V / V'), where V is the
    variance of the true ranks, and V' that of ranks without ties, (n² − 1) / 12.

    Args:
        true: (..., n).
    """
    ranks, n = rankdata(true, axis=-1), true.shape[-1]
    return np.sqrt(12 * ranks.var(-1) / (n**2 - 1))


def greatest(kind: type[DistanceProbes | DepthProbes], held: Words) -> np.ndarray:
    """The greatest correlation that a prediction without ties can have, of each sentence."""
    trees = Trees.of(held)
    own = trees.distances if kind is DistanceProbes else trees.depths
    return np.array([most_spearman(true.double().numpy()).mean() for true in own.values()])


def test_no_prediction_without_ties_ranks_equal_distances() -> None:
    draw = np.random.default_rng(0)
    true = draw.integers(0, 4, (30, 9)).astype(float)
    most = most_spearman(true)
    for row, greatest_of_row in zip(true, most, strict=True):
        exact = [spearmanr(row, row + 1e-6 * draw.standard_normal(9)).statistic for _ in range(3)]
        assert exact == pytest.approx([greatest_of_row] * 3)
        assert spearmanr(row, draw.standard_normal(9)).statistic <= greatest_of_row
    assert most_spearman(np.arange(9.0)) == pytest.approx(1)
    assert most_spearman(np.ones(9)) == 0
