"""What a comparison says of models that are the same, differ in coordinates alone, or of which one part differs."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from benchmarks.updates.updated import permute_residual, permute_units, plant, rank_one, rotate, turn_heads
from scipy.special import log_softmax
from tests.tiny import WORDS, tiny_frozen, tiny_tokenizer
from tests.world import sentences

from aligners.api import compare
from aligners.errors import UserError
from aligners.injection.comparing import comparison
from aligners.injection.comparing.comparison import Compared
from aligners.injection.comparing.precision import INT8, rounded, saved_elsewhere, stored_precision, with_weights
from aligners.models import FrozenModel
from aligners.reports.finished_runs import make_report

TEXTS = sentences(80)
GPT = partial(tiny_frozen, "gpt2", task="causal")


def changed(model: FrozenModel, change: Callable[[Any], object]) -> FrozenModel:
    """A copy that was changed in place."""
    copied = copy.deepcopy(model.model)
    with torch.no_grad():
        change(copied)
    return FrozenModel(copied, model.tokenizer, name="new")


def lead(found: Compared) -> str:
    return make_report("comparison", found.meta, found.rows, **found.report_tables).lead


def column(found: Compared, method: str, name: str = "fvu") -> list[float]:
    return [row[name] for row in found.rows if row["method"] == method]


def test_a_model_and_itself_differ_in_nothing() -> None:
    found = compare(GPT(), GPT(), TEXTS, costs=40)
    assert found.verdict == ("rounding", "identity", None, None, True)
    assert column(found, "identity") == [0] * 4
    assert column(found, "rotation", "penalty") == pytest.approx([0] * 4, abs=1e-5)
    assert found.meta["weights"] == {"changed": [], "blocks": 3}
    assert lead(found).startswith("Nothing has changed beyond rounding")


def test_what_states_cost_is_measured_at_evenly_spaced_sites_of_a_deep_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "COSTLY", 2)
    costs = column(compare(GPT(), GPT(seed=1), TEXTS, costs=40), "identity", "kl")
    assert costs[1:3] == [None, None]
    assert min(costs[0], costs[3]) > 0


@pytest.mark.parametrize("precision", ["bfloat16", "float16", INT8])
def test_weights_in_another_precision_are_no_change(precision: str) -> None:
    old = GPT()
    new = with_weights(old, lambda _, w: rounded(w, precision))
    assert [stored_precision(model) for model in (old, new)] == ["float32", precision]
    found = compare(old, new, TEXTS)
    assert found.verdict.kind == "rounding"
    assert min(column(found, "identity")[1:]) > 1e-9  # by which float32 would say that they differ
    assert f"in {precision}" in lead(found)


def test_rounding_to_a_coarse_precision_explains_other_coordinates_and_hides_no_edit() -> None:
    coarse = partial(with_weights, change=lambda _, w: rounded(w, "bfloat16"))
    old = coarse(GPT())
    turned = compare(old, coarse(changed(old, partial(rotate, seed=1))), TEXTS)
    assert turned.verdict[:2] == ("coordinates", "rotation")
    edited = compare(old, coarse(changed(old, lambda model: rank_one(model, 2, "down", 0.01, 0))), TEXTS)
    assert edited.verdict[:3] == ("changed", "identity", 2)


@pytest.mark.parametrize(
    ("model", "change", "map_"),
    [
        (GPT, rotate, "rotation"),
        (tiny_frozen, permute_residual, "permutation"),
        (GPT, permute_units, "identity"),
        (tiny_frozen, turn_heads, "identity"),
    ],
)
def test_other_coordinates_are_told_from_a_change(model: Any, change: Any, map_: str) -> None:
    found = compare(model(), changed(model(), partial(change, seed=1)), TEXTS)
    assert found.verdict == ("coordinates", map_, None, None, True)
    assert max(column(found, map_)) < 1e-11
    assert (min(column(found, "identity")) > 0.1) == (map_ != "identity")
    assert max(column(found, "linear")) < 1e-9
    assert found.meta["weights"]["changed"]  # which takes them for a change
    assert lead(found).startswith("Only coordinates")


@pytest.mark.parametrize("turned", [False, True])
def test_the_first_block_that_changed_is_found_in_any_coordinates(turned: bool) -> None:
    def change(model: Any) -> None:
        rank_one(model, 2, "down", 0.01, 0)
        if turned:
            rotate(model, 1)

    found = compare(GPT(), changed(GPT(), change), TEXTS)
    assert found.verdict[:3] == ("changed", "rotation" if turned else "identity", 2)
    assert found.meta["weights"]["changed"] == ([0, 1, 2, 3, 4] if turned else [2])
    assert lead(found).startswith("The model has changed from block 2 on")
    assert ("in other coordinates" in lead(found)) == turned


def test_a_planted_direction_is_found_with_the_texts_that_have_it() -> None:
    tokens = tiny_tokenizer()(TEXTS[1::2], padding=True, return_tensors="pt")
    batch = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    planted: list[Any] = []
    old = changed(GPT(), lambda model: model.transformer.h[1].mlp.c_proj.weight[0].zero_())  # a unit that is not used
    new = changed(old, lambda model: planted.append(plant(model, 2, batch, 0, lambda: model(**batch))))
    found = compare(old, new, TEXTS)
    assert found.verdict.first == 2
    assert float((found.vectors[2][0] @ planted[0].direction).abs()) > 0.9
    (first, *_) = found.report_tables["directions"]
    assert first["share"] > 0.8
    top = first["texts"].split(" | ")[0]
    assert top == found.report_tables["texts"][0]["text"]
    assert found.report_tables["tokens"][0]["token"] in found.report_tables["tokens"][0]["context"].split()


def test_a_model_that_was_trained_as_a_whole_has_changed_from_its_embeddings_on() -> None:
    def change(model: Any) -> None:
        for weight in model.parameters():
            weight.add_(0.01 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))

    old = tiny_frozen(n_labels=None)
    found = compare(old, changed(tiny_frozen(), change), TEXTS)  # which has a head
    assert found.verdict[:3] == ("changed", "identity", 0)
    assert lead(found).startswith("The model has changed from the embeddings on")
    assert found.meta["weights"]["changed"] == [0, 1, 2, 3, 4]  # the pooler is below the head
    assert "tiny-bert answers nothing (no head) and new answers classes" in found.meta["not_compared"]


def test_answers_alone_are_a_change_of_the_head() -> None:
    found = compare(tiny_frozen(), changed(tiny_frozen(), lambda m: m.classifier.weight.mul_(1.1)), TEXTS)
    assert found.verdict == ("head", "identity", None, None, False)
    assert "in its head only" in lead(found)


def test_what_no_text_excites_only_the_weights_show() -> None:
    texts = [text for text in TEXTS if "good" not in text.split()]
    row = tiny_tokenizer().convert_tokens_to_ids("good")
    found = compare(
        tiny_frozen(), changed(tiny_frozen(), lambda m: m.get_input_embeddings().weight[row].add_(1)), texts
    )
    assert found.verdict.kind == "weights"
    assert "weights differ by more than rounding in block 0" in " ".join(lead(found).split())


def test_figures_are_those_of_the_definition() -> None:
    old, new, labels = tiny_frozen(), tiny_frozen(seed=1), [n % 2 for n in range(len(TEXTS))]
    found = compare(old, new, TEXTS, labels=labels, batch_size=len(TEXTS))
    held, of = TEXTS[1::2], np.array(labels[1::2])
    logits, states = zip(*(_read(model, held) for model in (old, new)), strict=True)
    log = [log_softmax(each, -1) for each in logits]
    fitted = [_read(model, TEXTS[::2])[1] for model in (old, new)]
    (function,) = found.report_tables["function"]
    assert function["difference"] == pytest.approx((np.exp(log[0]) * (log[0] - log[1])).sum(-1).mean(), rel=1e-4)
    assert function["loss_new"] == pytest.approx(-log[1][np.arange(len(of)), of].mean(), rel=1e-5)
    assert function["loss_change"] == pytest.approx(function["loss_new"] - function["loss_old"])
    times = [row["times"] for row in found.report_tables["texts"] if row["site"] == 0]
    assert times == sorted(times, reverse=True)  # of a row, however many a text has
    assert function["agreement"] == pytest.approx((logits[0].argmax(-1) == logits[1].argmax(-1)).mean())
    total = np.square(states[1] - fitted[1].mean(0)).sum()
    assert column(found, "identity")[-1] == pytest.approx(np.square(states[0] - states[1]).sum() / total, rel=1e-5)
    assert found.verdict.kind == "different"
    assert lead(found).startswith("These are different models")


def _read(model: FrozenModel, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and the last states of all real tokens, in float64."""
    tokens = tiny_tokenizer()(texts, padding=True, return_tensors="pt")
    inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    (states,) = model.front(inputs, [model.depth])
    return model.logits(inputs).double().numpy(), states[inputs["attention_mask"].bool()].double().numpy()


def test_models_without_a_head_are_asked_how_alike_texts_are() -> None:
    old = tiny_frozen(n_labels=None)
    found = compare(old, changed(old, lambda model: rank_one(model, 3, "o", 0.1, 0)), TEXTS)
    assert found.report_tables["function"][0]["what"] == "similarities of texts"
    assert found.verdict[2:] == (3, 3, False)
    (apart,) = compare(old, tiny_frozen(n_labels=None, seed=1), TEXTS).report_tables["function"]
    assert apart["agreement"] < 0.9  # no text is its own nearest
    turned = compare(old, changed(old, partial(permute_residual, seed=0)), TEXTS)
    assert turned.verdict == ("coordinates", "permutation", None, None, True)


def test_heads_that_answer_other_questions_are_left_out_and_named() -> None:
    found = compare(GPT(), tiny_frozen("gpt2"), TEXTS)
    assert found.report_tables["function"] == []
    assert "tiny-gpt2 answers next tokens and tiny-gpt2 answers classes" in found.meta["not_compared"]
    assert found.verdict.same_answers is None
    report = make_report("comparison", found.meta, found.rows, **found.report_tables)
    assert any("The verdict is on states alone" in sentence for sentence in report.sentences)


def test_what_has_no_right_answer_has_a_divergence_alone() -> None:
    found = compare(tiny_frozen(), tiny_frozen(seed=1), TEXTS, costs=40)
    assert set(column(found, "rotation", "penalty")) == {None}
    assert min(column(found, "rotation", "kl")) > 0
    named = compare(
        tiny_frozen(), changed(tiny_frozen(), lambda m: setattr(m.config, "id2label", {0: "a", 1: "b"})), TEXTS
    )
    assert "name their classes differently" in named.meta["not_compared"]
    numbers = compare(*(tiny_frozen(n_labels=1, problem_type="regression") for _ in range(2)), TEXTS)
    assert "predicts numbers" in numbers.meta["not_compared"]
    several = compare(*(tiny_frozen(problem_type="multi_label_classification") for _ in range(2)), TEXTS)
    assert "answers nothing (it answers 2 questions of yes or no at once" in several.meta["not_compared"]


def test_texts_as_long_as_a_model_has_positions_leave_no_room_for_further_padding() -> None:
    texts = [" ".join(WORDS[(n + k) % len(WORDS)] for k in range(70)) for n in range(6)]
    assert compare(GPT(), GPT(), texts).verdict.kind == "rounding"


def test_int8_has_its_steps_along_the_axis_of_the_other_model() -> None:
    counts = torch.randint(-126, 127, (8, 5), generator=torch.Generator().manual_seed(0)).float()
    counts[0], counts[:, 0] = 127, 127
    for steps in (torch.rand(5) + 0.5, torch.rand(8, 1) + 0.5):
        grid = counts * steps
        torch.testing.assert_close(rounded(grid * (1 + 1e-4), INT8, grid), grid * (1 + 1e-4))


@pytest.mark.parametrize("precision", ["float16", "bfloat16", INT8])
def test_weights_saved_in_other_coordinates_are_off_by_half_a_step_at_most(precision: str) -> None:
    old = GPT()
    weight = old.model.get_input_embeddings().weight
    moved = saved_elsewhere(old, precision, seed=0).model.get_input_embeddings().weight
    half = weight.abs() * {"float16": 2**-11, "bfloat16": 2**-8}.get(precision, 0)
    if precision == INT8:
        half = weight.abs().amax(1, keepdim=True) / 127 / 2
    share = (moved - weight) / half
    assert 0.95 < share.max() < 1.01
    assert -1.01 < share.min() < -0.95


def test_other_widths_and_depths_are_compared_by_linear_maps_at_named_sites() -> None:
    found = compare(GPT(), GPT(layers=2, width=24), TEXTS, sites=["3:2"])
    assert {row["method"] for row in found.rows} == {"permutation", "rotation", "linear"}
    assert found.verdict.kind == "different"
    assert found.meta["weights"] is None
    with pytest.raises(UserError, match="pairs equal sites"):
        compare(GPT(), GPT(layers=2), TEXTS)


def test_what_cannot_be_compared_is_refused_before_it_is_read() -> None:
    with pytest.raises(UserError, match=r"at least 32 rows, 2 for each dimension.* It takes about \d+ such texts"):
        compare(GPT(), GPT(), TEXTS[:4])
    assert compare(GPT(), GPT(), TEXTS[:4], maps=[]).verdict.kind == "rounding"
    other = GPT()
    other.tokenizer = tiny_tokenizer()
    other.tokenizer.add_tokens(["zebra"])  # of which no text has any
    assert compare(GPT(), other, TEXTS).verdict.kind == "rounding"
    other.tokenizer.backend_tokenizer.post_processor = None
    with pytest.raises(UserError, match="different tokenizers"):
        compare(GPT(), other, TEXTS)
    by_words = compare(GPT(), other, TEXTS, rows="words")
    assert "tokenizers differ" in by_words.meta["not_compared"]
    assert by_words.verdict.kind == "different"
    with pytest.raises(UserError, match="have in common, but got none"):
        compare(GPT(), other, [" "] * 40, rows="words")
