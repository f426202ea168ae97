from typing import Any

import pytest
import torch
from torch import Tensor

from aligners.injection.generation.generating import Added, Replaced, generate
from aligners.models import FrozenModel
from tests.tiny import TEXTS, hooks_of, tiny_frozen, tokenised

FAMILIES = ("gpt2", "llama", "gpt_neox", "qwen2", "opt", "gemma3_text")
NEW = 6


def model(family: str, **options: Any) -> FrozenModel:
    frozen = tiny_frozen(family, task="causal", **options)
    frozen.model.generation_config.eos_token_id = None  # a random model would end soon
    return frozen


def step_by_step(target: FrozenModel, prompt: Tensor, site: int, state: Any) -> tuple[Tensor, Tensor]:
    """The greedy continuation of one prompt without any cache: the whole text anew for every token."""
    ids, logits = prompt, []
    for _ in range(NEW):
        logits.append(target.tail({"input_ids": ids}, site, state(ids))[:, -1])
        ids = torch.cat([ids, logits[-1].argmax(-1, keepdim=True)], 1)
    return ids[:, prompt.shape[1] :], torch.stack(logits, 1)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("site", [0, 2, 3])
def test_own_states_put_back_change_no_token_and_no_bit(family: str, site: int) -> None:
    target, prompts = model(family), tokenised(side="left")
    own = generate(target, prompts, new_tokens=NEW, logits=True)
    back = generate(target, prompts, Replaced(site, target, site, lambda rows: rows), new_tokens=NEW, logits=True)
    assert torch.equal(back.tokens, own.tokens)
    assert own.logits is not None
    assert back.logits is not None
    assert torch.equal(back.logits, own.logits)
    assert hooks_of(target) == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("source_site", "site"), [(0, 2), (2, 1), (3, 0)])
def test_caches_give_what_the_whole_text_gives_and_padding_nothing(family: str, source_site: int, site: int) -> None:
    source, target = model(family, seed=1), model(family)
    turn = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))[0]
    put = Replaced(site, source, source_site, lambda rows: rows @ turn)
    right = tokenised()
    found = generate(target, right, put, new_tokens=NEW, logits=True)
    assert found.logits is not None
    for place, (ids, mask) in enumerate(zip(right["input_ids"], right["attention_mask"], strict=True)):
        prompt = ids[mask.bool()][None]
        state = lambda ids: source.front({"input_ids": ids}, [source_site])[0] @ turn  # noqa: E731
        tokens, logits = step_by_step(target, prompt, site, state)
        assert torch.equal(found.tokens[place], tokens[0])
        torch.testing.assert_close(found.logits[place], logits[0], atol=2e-4, rtol=1e-4)


def test_what_a_map_makes_of_padding_is_never_seen() -> None:
    target, prompts = model("gpt2"), tokenised(side="left")
    padding = (prompts["attention_mask"] == 0).flatten()[:, None]

    def overflows(rows: Tensor) -> Tensor:
        return rows.masked_fill(padding, torch.nan) if len(rows) == len(padding) else rows

    found = generate(target, prompts, Replaced(1, target, 1, overflows), new_tokens=NEW)
    assert torch.equal(found.tokens, generate(target, prompts, new_tokens=NEW).tokens)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_an_added_vector_is_added_at_every_position(family: str) -> None:
    target, prompt = model(family), tokenised(TEXTS[:1])["input_ids"]
    vector = 3 * torch.randn(16, generator=torch.Generator().manual_seed(0))
    found = generate(target, {"input_ids": prompt}, Added(2, vector), new_tokens=NEW)
    state = lambda ids: target.front({"input_ids": ids}, [2])[0] + vector  # noqa: E731
    assert torch.equal(found.tokens, step_by_step(target, prompt, 2, state)[0])
    own, none = (generate(target, {"input_ids": prompt}, put, logits=True) for put in (None, Added(2, 0 * vector)))
    assert own.logits is not None
    assert none.logits is not None
    assert torch.equal(own.logits, none.logits)


def test_draws_follow_from_the_seed_and_leave_others_alone() -> None:
    target, prompts = model("gpt2"), tokenised()
    before = torch.get_rng_state()
    a, b, c = (generate(target, prompts, temperature=2.0, seed=seed).tokens for seed in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_text_ends_at_the_end_of_text_token() -> None:
    target, prompts = model("gpt2"), tokenised()
    free = generate(target, prompts, new_tokens=NEW).tokens
    target.model.generation_config.eos_token_id = int(free[0, 2])
    found = generate(target, prompts, new_tokens=NEW)
    first = [(row == free[0, 2]).nonzero()[:1, 0].tolist() for row in free]
    assert (found.tokens >= 0).sum(1).tolist() == [place[0] + 1 if place else NEW for place in first]
    assert torch.equal(found.tokens[0], free[0].where(torch.arange(NEW) <= first[0][0], -1))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda: tiny_frozen("bert", task="masked"), "Expected a causal language model"),
        (lambda: tiny_frozen("openai-gpt", task="causal"), "Expected a model with a cache"),
        (lambda: tiny_frozen("mamba", task="causal"), "Expected a model with a cache"),
    ],
)
def test_what_generates_nothing_is_refused(given: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        generate(given(), tokenised())
    with pytest.raises(ValueError, match="with a cache"):  # nor can it be read
        generate(model("gpt2"), tokenised(), Replaced(1, given(), 1, lambda rows: rows))


def test_other_bad_input() -> None:
    target = model("gpt2")
    with pytest.raises(ValueError, match="Expected `site` between 0 and 3, but got 4"):
        generate(target, tokenised(), Added(4, torch.ones(16)))
    with pytest.raises(ValueError, match="at most 64 tokens in all"):
        generate(target, tokenised(), new_tokens=60)
    with pytest.raises(ValueError, match="temperature"):
        generate(target, tokenised(), temperature=-1)
