"""Who sees what comes after a position: a model answers that itself, whatever its family and its config say."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tiny import TEXTS, tiny_frozen, tiny_model, tiny_tokenizer, tokenised
from transformers import BertLMHeadModel

from aligners.api import inject
from aligners.injection.generation.continuing import Replaced, generate
from aligners.injection.routes import build_routes, check_routes
from aligners.models import FrozenModel, load_frozen
from aligners.models.causality import MOST, movement, ordinary_tokens, random_texts, rounding


def test_a_decoder_whose_config_lets_it_see_ahead_is_not_causal_and_has_no_answers() -> None:
    sees, causal = (tiny_frozen("gpt2", task="causal", seed=seed, is_causal=bool(seed)) for seed in (0, 1))
    assert (sees.causal, sees.task) == (False, None)
    assert (causal.causal, causal.task, causal.unasked) == (True, "causal", None)
    with pytest.raises(ValueError, match=r"a model whose head can be asked, but tiny-gpt2 .* sees it already"):
        sees.logits(tokenised())
    assert len(sees.front(tokenised(), [3])) == 1


def test_a_model_is_asked_before_anything_is_replaced_in_it() -> None:
    model = tiny_frozen("gpt2", task="causal")
    (states,) = model.front(tokenised(), [3])
    tail = model.tail(tokenised(), 3, states)
    assert torch.equal(tail, model.logits(tokenised()))
    fresh = tiny_frozen("gpt2", task="causal")
    through, later = fresh.tail_through(tokenised(), 1, *model.front(tokenised(), [1]), 3)
    assert torch.equal(through, tail)
    assert torch.equal(later, states)


def test_such_a_front_is_refused_wherever_its_states_would_give_the_answers() -> None:
    sees, causal = (tiny_frozen("gpt2", task="causal", seed=seed, is_causal=bool(seed)) for seed in (0, 1))
    says = "sees the whole text .* would reveal to tiny-gpt2 the tokens that it should predict"
    with pytest.raises(ValueError, match=says):
        inject(sees, causal, lambda rows: rows, TEXTS, site=1)
    with pytest.raises(ValueError, match=says):
        check_routes(build_routes([sees, causal], [1], "forward"), None, "a.csv", allow_mixed=False, gradients=True)
    with pytest.raises(ValueError, match="sees it already"):
        inject(causal, sees, lambda rows: rows, TEXTS, site=1)
    with pytest.raises(ValueError, match=r"to stitch into, but tiny-gpt2 .* sees it already"):
        check_routes(build_routes([causal, sees], [1], "forward"), None, "a.csv", allow_mixed=True, gradients=True)
    prompts = tokenised(("the film is good",))["input_ids"]
    with pytest.raises(ValueError, match="sees only those before it, as generating text needs, but got tiny-gpt2"):
        generate(causal, prompts, Replaced(1, sees, 1, lambda rows: rows), new_tokens=2)
    with pytest.raises(ValueError, match=r"Expected a causal language model, but tiny-gpt2 .* sees it already"):
        generate(sees, prompts, new_tokens=2)


def test_a_bidirectional_encoder_is_refused_by_the_api_as_by_the_command() -> None:
    with pytest.raises(ValueError, match=r"tiny-bert sees the whole text .*states can still be mapped"):
        inject(tiny_frozen("bert"), tiny_frozen("gpt2", task="causal"), lambda rows: rows, TEXTS, site=1)


def test_a_classifier_on_a_decoder_may_stand_behind_a_bidirectional_front() -> None:
    found = inject(tiny_frozen("bert"), tiny_frozen("gpt2"), lambda rows: rows, TEXTS, site=1)
    assert found.n == len(TEXTS)


@pytest.mark.parametrize(
    ("family", "settings", "causal"),
    [
        ("gemma4_text", {"use_bidirectional_attention": "vision"}, True),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, False),
        ("gemma3_text", {"use_bidirectional_attention": True}, False),
        ("gpt2", {"is_causal": False}, False),
        ("llama", {"is_causal": False}, False),
    ],
)
def test_bare_models_are_read_whatever_they_see(family: str, settings: dict[str, Any], causal: bool) -> None:
    bare = tiny_frozen(family, n_labels=None, **settings)
    assert (bare.causal, bare.task) == (causal, None)
    with_head = tiny_frozen(family, task="causal", **settings)
    assert with_head.task == ("causal" if causal else None)
    if causal:
        with_head.self_test(tokenised(side="left"))


def test_an_encoder_that_is_made_to_be_a_decoder_predicts_the_next_token(tmp_path: Path) -> None:
    config = tiny_model("bert", is_decoder=True).config
    torch.manual_seed(0)
    decoder = FrozenModel(BertLMHeadModel(config), tiny_tokenizer(), name="decoder")
    assert (decoder.causal, decoder.task) == (True, "causal")
    decoder.self_test(tokenised(side="left"))
    decoder.model.save_pretrained(tmp_path)
    loaded = load_frozen(tmp_path, tokenizer=False)
    assert loaded.task == "causal"
    assert torch.equal(loaded.logits(tokenised()), decoder.logits(tokenised()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "causal"), [("gpt2", True), ("mixtral", True), ("mamba", True), ("bert", False)])
def test_half_precision_says_the_same(family: str, causal: bool, dtype: torch.dtype) -> None:
    model = FrozenModel(tiny_model(family, n_labels=None).to(dtype), tiny_tokenizer(), name="m")
    assert model.causal is causal


def test_a_position_moves_where_half_of_its_features_do() -> None:
    torch.manual_seed(0)
    before = torch.randn(4, 7, 10)
    assert movement(before, before) == 0
    rounded = before + 1e-6 * torch.randn_like(before)
    assert 0 < movement(before, rounded) < 1e-5
    outlier = before.clone()
    outlier[..., 0] += 1000  # a feature with a large constant hides nothing and shows nothing
    leaking = outlier.clone()
    leaking[2, 5, 1:] += 0.1
    assert movement(outlier, leaking) > 0.05
    one = outlier.clone()
    one[2, 5, 0] += 100
    assert movement(outlier, one) == 0


def test_what_counts_as_rounding() -> None:
    assert rounding(torch.float32, quantised=False) == pytest.approx(3.45e-4, rel=1e-2)
    assert rounding(torch.bfloat16, quantised=False) == MOST
    assert rounding(torch.float32, quantised=True) == MOST


def test_the_texts_differ_in_their_last_token_alone_and_hold_no_special_ones() -> None:
    config = tiny_model("gpt2", eos_token_id=20).config
    tokens = ordinary_tokens(30, config, tiny_tokenizer())
    assert not {0, 1, 2, 3, 20} & set(tokens.tolist())
    ids, changed = random_texts(tokens, 8)
    assert torch.equal(ids[:, :-1], changed[:, :-1])
    assert (ids[:, -1] != changed[:, -1]).all()
    assert set(ids.flatten().tolist()) <= set(tokens.tolist())
