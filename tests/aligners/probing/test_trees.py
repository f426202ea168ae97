import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import rankdata, spearmanr
from tests.aligners.probing.made import drawn_words, made_words

from aligners.datamodules.text.annotated.grammar import sentences
from aligners.datamodules.text.annotated.sentence import Sentence, Target
from aligners.probing.probe_bank import Bank, Examples, Variant, Words, fresh_bank
from aligners.probing.probes import DepthProbes, DistanceProbes, StructuralProbes, TreeTask
from aligners.probing.probing_tasks import ProbeTraining
from aligners.probing.trees import (
    Trees,
    by_length,
    chain,
    drawn_trees,
    predictions,
    punctuation,
    spanning_edges,
    tree_edges,
    tree_scores,
)
from aligners.reports.runs.probing.probing_report import trees_figure

WIDTH, RANK = 32, 14  # of planted trees
VARIANTS = [Variant("model", 0, rank=2), Variant("model", 1), Variant("untrained", 1, rank=4)]


def bank_of(kind: type[StructuralProbes]) -> Bank:
    bank = fresh_bank(kind, VARIANTS, drawn_words(), 0)
    assert bool(bank.readings.mean.any()) is kind.centred is (kind is DistanceProbes)
    with torch.no_grad():
        bank.probes.weight += torch.randn(bank.probes.weight.shape, generator=torch.Generator().manual_seed(1))
    return bank


def above(heads: Sequence[int], word: int) -> set[int]:
    """A word, its head, and so on up to the root."""
    return {word} | (above(heads, heads[word] - 1) if heads[word] else set())


def test_distances_and_depths_are_numbers_of_edges() -> None:
    words = drawn_words((9, 12, 2))
    trees = Trees.of(words)
    for b, own in enumerate(words.sentences):
        paths = [above(own.heads, word) for word in range(len(own.words))]
        assert trees.distances[b].tolist() == [[len(one ^ other) for other in paths] for one in paths]
        assert trees.depths[b].tolist() == [len(path) - 1 for path in paths]


@pytest.mark.parametrize("kind", [DistanceProbes, DepthProbes])
def test_predictions_and_losses_are_those_of_the_paper(kind: type[StructuralProbes]) -> None:
    words, bank = drawn_words(), bank_of(kind)
    trees = Trees.of(words)
    found = dict(predictions(bank, Examples(words, trees)))
    losses = torch.zeros(len(VARIANTS))
    assert sorted(found) == trees.sentences == [b for b, own in enumerate(words.sentences) if len(own.words) > 1]
    for a, variant in enumerate(VARIANTS):
        states = words.states[words.places.index((variant.source, variant.layer))]
        centre = states.mean(0)
        scaled = (states - centre if kind is DistanceProbes else states) / (states - centre).square().mean().sqrt()
        matrix = bank.probes.weight[a, :, : variant.rank]
        for b in trees.sentences:
            own = (scaled[words.rows([b])] @ matrix).detach()
            if kind is DistanceProbes:
                plain = torch.stack([(own - each).square().sum(1) for each in own])
                true = trees.distances[b]
            else:
                plain, true = own.square().sum(1), trees.depths[b]
            np.testing.assert_allclose(found[b][a], plain.numpy(), rtol=1e-4, atol=1e-4)
            losses[a] += (plain - true).abs().mean() / len(trees.sentences)
    part = trees.part(words, trees.sentences)
    torch.testing.assert_close(bank.losses(words.read(bank.places, trees.sentences), part).mean(1).detach(), losses)


def test_rank_correlations_are_scipys_averaged_by_word_sentence_and_length() -> None:
    words, bank = drawn_words((3, 5, 5, 6, 7, 7, 7)), bank_of(DistanceProbes)
    trees = Trees.of(words)
    found = tree_scores("distance", predictions(bank, Examples(words, trees)), words.sentences, trees)
    by_sentence = []
    for (b, predicted), length in zip(predictions(bank, Examples(words, trees)), found.lengths, strict=True):
        each = [spearmanr(predicted[0][w], trees.distances[b][w]).statistic for w in range(int(length))]
        by_sentence.append((int(length), np.nanmean(each)))
    np.testing.assert_allclose(found.spearman[0], [value for _, value in by_sentence], rtol=1e-6)
    of_length = {n: [value for length, value in by_sentence if length == n] for n in (5, 6, 7)}  # 3 is too short
    expected = np.mean([np.mean(values) for values in of_length.values()])
    assert by_length(found.spearman, found.lengths)[0].item() == pytest.approx(expected)
    twice = torch.tensor([[1.0, 2, 0, 1, 0, 1, 1]])
    drawn = torch.tensor([1, 1, 3, 5, 6])
    assert by_length(found.spearman, found.lengths, twice)[0, 0].item() == pytest.approx(
        by_length(found.spearman[:, drawn], found.lengths[drawn])[0].item()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        constant = tree_scores("distance", iter([(0, np.zeros((1, 3, 3)))]), words.sentences, trees)
    assert constant.spearman.isnan().all()
    depth = tree_scores("depth", predictions(bank_of(DepthProbes), Examples(words, trees)), words.sentences, trees)
    _, first = next(predictions(bank_of(DepthProbes), Examples(words, trees)))
    assert depth.spearman[1, 0].item() == pytest.approx(spearmanr(first[1], trees.depths[0]).statistic)
    assert depth.hits[1, 0] == (first[1].argmin() == words.sentences[0].heads.index(0))


def test_true_distances_give_the_tree_and_punctuation_does_not_count() -> None:
    words = drawn_words((8, 11))
    trees = Trees.of(words)
    for b, own in enumerate(words.sentences):
        true = trees.distances[b].double().numpy()
        assert spanning_edges(true, np.ones(len(true), dtype=bool)) == tree_edges(own.heads)
    leaf = next(w for w in range(8) if w + 1 not in words.sentences[0].heads)
    marked = replace(words.sentences[0], targets=(Target("pos", (leaf, leaf + 1), labels=("PUNCT",)),))
    assert punctuation(marked).nonzero()[0].tolist() == [leaf]
    perfect = ((b, own.double().numpy()[None]) for b, own in trees.distances.items())
    found = tree_scores("distance", perfect, [marked, words.sentences[1]], trees)
    assert found.totals.tolist() == [6, 10]
    assert found.hits.tolist() == [[6, 10]]
    assert found.spearman.min() > 1 - 1e-12
    flat = ((b, own.double().numpy()[None]) for b, own in trees.depths.items())
    assert tree_scores("depth", flat, words.sentences, trees).hits.tolist() == [[1, 1]]
    lowest = trees.depths[0].double().numpy()[None].copy()
    lowest[0, leaf] = -1  # punctuation is never taken for the root
    assert tree_scores("depth", [(0, lowest)], [marked], trees).hits.tolist() == [[1]]
    # the caption of a drawn tree counts the edges that UUAS counts
    words = replace(words, sentences=[marked, words.sentences[1]])
    (row,) = drawn_trees(fresh_bank(DistanceProbes, VARIANTS[:1], words, 0), words, 1, "m")
    edges, counted, drawn = (set(row[name].split()) for name in ("edges", "counted", "found"))
    assert (len(edges), len(counted)) == (7, 6)
    (axis,) = trees_figure([row]).axes
    assert axis.get_title() == f"m, site 0: {len(counted & drawn)} of 6 edges"


def test_rows_of_a_structural_probe_stand_beside_those_of_a_chain_in_the_order_of_the_words() -> None:
    trees = Trees.of(drawn_words((4,)))
    assert next(chain(trees, "depth"))[1].tolist() == [[0, 1, 2, 3]]
    assert next(chain(trees, "distance"))[1][0, 1].tolist() == [1, 0, 1, 2]
    words = drawn_words((6,) * 20)
    task = TreeTask("distance", words, drawn_words((6,) * 5, seed=60), VARIANTS, seed=0)
    for seed in range(2):
        task.train(ProbeTraining(max_epochs=3, batch=2, learning_rate=1e-2, least_steps=4), seed)
    held = drawn_words((7, 8) * 15, seed=30)
    least, *found = task.rows(held)
    by_seed = torch.stack([task.measures(bank, held, 0)["UUAS"][:, 0] for bank in task.banks])
    assert [row["uuas"] for row in found] == pytest.approx(by_seed.mean(0).tolist())
    assert not torch.equal(by_seed[0], by_seed[1])
    assert least["source"] == "word order"
    assert [(row["site"], row["rank"], row["parameters"]) for row in found] == [(0, 2, 12), (1, None, 36), (1, 4, 24)]
    for row in found:
        assert row["score_low"] <= row["score"] <= row["score_high"]
        assert row["uuas_low"] <= row["uuas"] <= row["uuas_high"]
        assert row["root_accuracy"] is None


def test_sentences_without_trees_cycles_and_ranks_that_there_are_not_are_refused() -> None:
    words = drawn_words()
    bare = [replace(own, heads=()) for own in words.sentences]
    with pytest.raises(ValueError, match="all heads are missing"):
        Trees.of(replace(words, sentences=bare))
    assert Trees.of(replace(words, sentences=[*bare[:2], *words.sentences[2:]])).sentences == [2, 3, 4, 5]
    with pytest.raises(ValueError, match=r"words \[1, 2\] are in a cycle"):
        Trees.of(replace(words, sentences=[replace(bare[0], heads=(2, 1, 0)), *bare[1:]]))
    for rank in (0, 7):
        with pytest.raises(ValueError, match=f"`ranks` between 1 and 6, the width of the states, but got {rank}"):
            fresh_bank(DistanceProbes, [Variant("model", 0, rank=rank)], words, 0)


def planted(own: list[Sentence], seed: int) -> Words:
    """Words whose layer 0 lays out their tree: squared distances are those in the tree, in `RANK` dimensions.

    Each edge has a direction of its own, with a sign that is drawn, and a word is the sum of those on its way to the
    root, so that its squared length is its depth. The other dimensions are noise of unit variance, and everything is
    rotated. Layer 1 is noise alone.
    """
    draw = torch.Generator().manual_seed(seed)
    turn = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(99))).Q
    paths = torch.zeros(sum(len(sentence.words) for sentence in own), RANK)
    rows = iter(paths)
    for sentence in own:
        signs = 2.0 * torch.randint(2, (RANK,), generator=draw) - 1
        for word in range(len(sentence.words)):
            edges = sorted(above(sentence.heads, word) - {sentence.heads.index(0)})  # by the word each leads up from
            next(rows)[edges] = signs[edges]
    noise = torch.randn(2, len(paths), WIDTH, generator=draw)
    told = torch.cat((paths, noise[0, :, RANK:]), 1) @ turn
    return made_words(own, told, noise[1])


def most_spearman(true: np.ndarray) -> np.ndarray:
    """The greatest rank correlation along the last axis that a prediction without ties can have.

    Distances and depths are whole numbers and many of them are equal. A prediction that is exact but for the last
    digit puts an order on those, too, and every such order has the same correlation: √(V / V'), where V is the
    variance of the true ranks, and V' that of ranks without ties, (n² − 1) / 12.
    """
    ranks, n = rankdata(true, axis=-1), true.shape[-1]
    return np.sqrt(12 * ranks.var(-1) / (n**2 - 1))


@pytest.mark.parametrize("probe", ["distance", "depth"])
def test_planted_trees_are_found_and_noise_has_none(probe: str) -> None:
    short = [sentence for sentence in sentences(700) if 5 <= len(sentence.words) <= RANK]
    cuts = ((0, 240), (240, 300), (300, 340))
    words, held, watched = (planted(short[first:end], seed) for seed, (first, end) in enumerate(cuts))
    task = TreeTask(probe, words, watched, [Variant("model", 0, rank=RANK), Variant("model", 1, rank=RANK)], seed=0)
    task.train(ProbeTraining(batch=40, learning_rate=2e-2, least_steps=12, patience=3), 0)
    trees = Trees.of(held)
    exact = dict(predictions(task.banks[0], Examples(held, trees)))
    rounded = {number: values.round() for number, values in exact.items()}
    found, of_integers = (tree_scores(probe, each.items(), held.sentences, trees) for each in (exact, rounded))
    assert found.hits[0].sum() >= 0.99 * found.totals.sum()  # edges, or roots; rounding may cost one of them
    assert found.hits[1].sum() < 0.6 * found.totals.sum()
    own = trees.distances if probe == "distance" else trees.depths
    most = torch.tensor([[most_spearman(true.double().numpy()).mean() for true in own.values()]])
    spearman = by_length(found.spearman, found.lengths)
    assert spearman[0].item() == pytest.approx(by_length(most, found.lengths)[0].item(), abs=2e-3)
    assert spearman[0] < 0.97 < 0.99 < by_length(of_integers.spearman, found.lengths)[0]
    assert spearman[1] < 0.5
