import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.aligners.probing.made import FORMS, PLACES, drawn_words, edge_bank
from torch import Tensor, nn

from aligners.datamodules.text.annotated.sentence import Sentence, Target
from aligners.probing.probe_bank import Bank, Examples, ModelLayer, Variant, Words, answers
from aligners.probing.probes import EdgeProbes, EdgeTask, accuracy, codelengths, counts, f1, majority
from aligners.probing.probing_tasks import ProbeTraining, train_bank
from aligners.probing.targets import Labels, Targets, targets_of

VARIANTS = [Variant(*PLACES[1]), Variant("untrained", 0), Variant("model", None), Variant("model", None, control=True)]
SIZES = {"projection": 5, "hidden": 4}
HOW = ProbeTraining(max_epochs=3, batch=2, learning_rate=1e-2, least_steps=4)


def bank_of(task: str, words: Words, variants: list[Variant] = VARIANTS, seed: int = 0) -> tuple[Bank, Targets]:
    """A bank with weights that differ between its variants."""
    labels = Labels.of(task, words.sentences)
    bank = edge_bank(variants, words, labels, seed, **SIZES)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in bank.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=draw)
    return bank, targets_of(labels, words)


def plain_logits(bank: Bank, variant: int, states: Tensor, spans: Tensor) -> Tensor:
    """One probe on one target, written with the layers of PyTorch."""
    probes = bank.probes
    assert isinstance(probes, EdgeProbes)

    def layer(part: nn.Module, x: Tensor) -> Tensor:
        return nn.functional.linear(x, part.get_parameter("weight")[variant].T, part.get_parameter("bias")[variant, 0])

    pooled = []
    for place, (first, end) in enumerate(spans.tolist()):
        projected = layer(probes.projections[place], states[first:end])
        weights = layer(probes.attention[place], projected).flatten().softmax(0)
        pooled.append(weights @ projected)
    hidden = layer(probes.first, torch.cat(pooled)).tanh()
    return layer(probes.last, nn.LayerNorm(len(hidden), elementwise_affine=False)(hidden))


@pytest.mark.parametrize("task", ["kind", "flags", "arc"])
def test_answers_are_those_of_plain_layers(task: str) -> None:
    words = drawn_words()
    bank, targets = bank_of(task, words)
    found = torch.cat([logits for _, logits in answers(bank, Examples(words, targets))], 1)
    scaled = [(own - own.mean(0)) / (own - own.mean(0)).square().mean().sqrt() for own in words.states]
    for a, variant in enumerate(VARIANTS):
        if variant.layer is None:
            own = bank.readings.mix[a, [bank.places.index(ModelLayer("model", layer)) for layer in (0, 1)]]
            shares = (10 * own).softmax(0) * bank.readings.gamma[a]
            read = shares[0] * scaled[0] + shares[1] * scaled[1]
        else:
            read = scaled[PLACES.index(ModelLayer(variant.source, variant.layer))]
        for t in range(len(targets)):
            expected = plain_logits(bank, a, read, targets.spans[t] + words.first[targets.sentence[t]])
            torch.testing.assert_close(found[a, t], expected, rtol=1e-4, atol=1e-5)


def test_scores_and_codes_are_those_of_plain_counting() -> None:
    words = drawn_words()
    bank, targets = bank_of("flags", words)
    logits = torch.cat([each for _, each in answers(bank, Examples(words, targets))], 1)
    found, bits = counts(bank, Examples(words, targets)).sum(1), codelengths(bank, Examples(words, targets))
    for a, variant in enumerate(VARIANTS):
        right = given = true = exact = 0
        for t in range(len(targets)):
            mine = {k for k in range(3) if logits[a, t, k].sigmoid() > 0.5}
            theirs = {k for k in range(3) if targets.labels[int(variant.control), t, k]}
            right, given, true = right + len(mine & theirs), given + len(mine), true + len(theirs)
            exact += mine == theirs
            chances = logits[a, t].double().sigmoid()
            own = sum(math.log2(chances[k] if k in theirs else 1 - chances[k]) for k in range(3))
            assert bits[a, t].item() == pytest.approx(-own, rel=1e-6)
        assert found[a].tolist() == [right, given, true, exact]
        precision, recall = right / given, right / true
        assert f1(found)[a].item() == pytest.approx(2 * precision * recall / (precision + recall))
        assert accuracy(found, len(targets))[a].item() == pytest.approx(exact / len(targets))


def test_f1_of_single_labels_is_accuracy_and_a_probe_of_nothing_needs_log_k_bits() -> None:
    words = drawn_words()
    bank, targets = bank_of("kind", words)
    found = counts(bank, Examples(words, targets)).sum(1)
    assert torch.equal(f1(found), accuracy(found, len(targets)))
    for weight in (bank.probes.last.weight, bank.probes.last.bias):
        nn.init.zeros_(weight.requires_grad_(False))
    bits = codelengths(bank, Examples(words, targets))
    torch.testing.assert_close(bits, torch.full_like(bits, math.log2(targets.labels.shape[-1])))


def test_some_targets_alone_are_asked() -> None:
    words = drawn_words()
    bank, targets = bank_of("arc", words)
    chosen = torch.tensor([0, 3, 7])
    some = targets.only(torch.isin(torch.arange(len(targets)), chosen))
    every = codelengths(bank, Examples(words, targets))
    # sums of float32 products, of other shapes: another CPU adds them up in another order
    torch.testing.assert_close(codelengths(bank, Examples(words, some)), every[:, [0, 3, 7]], rtol=1e-5, atol=1e-5)
    assert some.sentences == sorted(set(targets.sentence[chosen].tolist()))
    hidden = targets.only(torch.arange(len(targets)) < 0)
    for kind, asked in (("fitting", (hidden, targets)), ("validation", (targets, hidden))):
        with pytest.raises(ValueError, match=f"Expected {kind} sentences with targets to train probes on"):
            train_bank(bank, *(Examples(words, each) for each in asked), HOW, 0)


def test_the_control_task_goes_by_the_word_alone() -> None:
    words, other = drawn_words(), drawn_words(seed=50)
    labels = Labels.of("kind", words.sentences)
    given: dict[str, set[tuple[bool, ...]]] = {}
    for own in (words, other):
        forms = [word for each in own.sentences for word in each.words]
        for form, hot in zip(forms, targets_of(labels, own, seed=3).labels[1].tolist(), strict=True):
            given.setdefault(form, set()).add(tuple(hot))
    assert set(given) == set(FORMS)
    assert {len(found) for found in given.values()} == {1}
    shares = [labels.drawn(f"word {n}", 3) for n in range(4000)]
    for names, count in labels.sets:
        assert shares.count(names) / 4000 == pytest.approx(count / sum(c for _, c in labels.sets), abs=0.03)
    assert [labels.drawn(form, 4) for form in FORMS] != [labels.drawn(form, 3) for form in FORMS]


def test_a_label_that_fitting_has_not_seen_is_counted_and_never_right() -> None:
    words = drawn_words()
    bank, _ = bank_of("kind", words)
    labels = Labels.of("kind", words.sentences)
    new = [replace(s, targets=(Target("kind", (0, 1), labels=("new",)), *s.targets)) for s in words.sentences]
    targets = targets_of(labels, replace(words, sentences=new))
    assert int(targets.unknown.sum()) == len(words.sentences)
    unknown = targets.unknown > 0
    bits = codelengths(bank, Examples(words, targets))
    assert torch.equal(bits.isinf(), unknown & torch.tensor([[not variant.control] for variant in VARIANTS]))
    whole, known = (counts(bank, Examples(words, own)).sum(1) for own in (targets, targets.only(~unknown)))
    for a, variant in enumerate(VARIANTS):
        if not variant.control:
            assert whole[a].tolist() == [known[a, 0], known[a, 1] + len(new), known[a, 2] + len(new), known[a, 3]]
    least = majority(labels, targets).sum(1)[0]
    assert least[0] == labels.sets[0][1] == max(count for _, count in labels.sets)
    assert least[1] == least[2] == len(targets)


def test_spans_tasks_and_arms_that_there_are_not_are_refused() -> None:
    words = drawn_words()
    kinds, first = Labels.of("kind", words.sentences), words.sentences[0]
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"span1": (0, 99)}, r"within the \d words .* got \(0, 99\)"),
        ({"span1": (1, 1)}, r"got \(1, 1\)"),
        ({"span2": (0, 1)}, "1 spans of every target of 'kind', but got 2"),
    ]
    for changes, said in wrong:
        other = replace(first, targets=tuple(replace(target, **changes) for target in first.targets))
        with pytest.raises(ValueError, match=said):
            targets_of(kinds, replace(words, sentences=[other, *words.sentences[1:]]))
    with pytest.raises(ValueError, match="got 'ner'; they have: kind, flags, arc"):
        Labels.of("ner", words.sentences)
    both = [Sentence(("a",), targets=(Target("t", (0, 1), span2, ("x",)),)) for span2 in ((), (0, 1))]
    with pytest.raises(ValueError, match="to have `span2`, or none"):
        Labels.of("t", both)
    with pytest.raises(ValueError, match=r"to differ, but all have the labels \('x',\)"):
        Labels.of("t", both[:1])
    with pytest.raises(ValueError, match=r"Expected a place that .*layer=7"):
        edge_bank([Variant("model", 7)], words, kinds, 0)
    with pytest.raises(ValueError, match="states of layer 1 of the model"):
        replace(words, states=words.states[:1], places=PLACES[:1]).read(PLACES[1:2], [0])


def test_rows_have_intervals_selectivity_and_the_centre_of_gravity() -> None:
    words = drawn_words((6,) * 30)
    variants = [
        Variant("model", 0),
        Variant("model", None),
        Variant("model", 0, control=True),
        Variant("model", None, control=True),
    ]
    task = EdgeTask("kind", words, drawn_words((6,) * 10, seed=70), variants, 0, SIZES)
    for seed in range(2):
        task.train(HOW, seed)
    banks, held = task.banks, drawn_words((6,) * 40, seed=100)
    least, single, mixed = task.rows(held)
    by_seed = [f1(counts(bank, Examples(held, targets_of(task.labels, held))).sum(1)) for bank in banks]
    low, high = sorted(float(own[0]) for own in by_seed)
    assert low < high
    assert least["source"] == "majority"
    assert single["score"] == pytest.approx((low + high) / 2)
    assert (single["score_seeds_low"], single["score_seeds_high"]) == pytest.approx((low, high))
    assert single["control"] == pytest.approx(float(by_seed[0][2] + by_seed[1][2]) / 2)
    for row in (single, mixed):
        assert row["selectivity"] == pytest.approx(row["score"] - row["control"])
        assert row["score_low"] < row["score"] < row["score_high"]
        assert row["selectivity_low"] < row["selectivity"] < row["selectivity_high"]
    weights = torch.stack([bank.readings.weights()[1] for bank in banks]).mean(0)
    assert mixed["centre_of_gravity"] == pytest.approx(float(weights[1]))
    assert single["centre_of_gravity"] is None


def test_labels_are_ordered_by_how_often_fitting_has_them() -> None:
    words = drawn_words()
    given = ["b", "a", "c", "a", "c", "c"]
    labelled = []
    for own, label in zip(words.sentences, given, strict=True):
        labelled.append(replace(own, targets=(Target("frequent", (0, 1), labels=(label,)),)))
    labels = Labels.of("frequent", labelled)
    assert labels.names == ("c", "a", "b")
    assert labels.sets == ((("c",), 3), (("a",), 2), (("b",), 1))
