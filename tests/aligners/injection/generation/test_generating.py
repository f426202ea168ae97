from typing import Any

import pytest
import torch
from tests.tiny import TEXTS, hooks_of, tiny_frozen, tokenised
from torch import Tensor

from aligners.injection.generation.continuing import Added, Replaced, generate
from aligners.models import FrozenModel

FAMILIES = ("gpt2", "llama", "gpt_neox", "qwen2", "opt", "gemma3_text")
NEW = 6
PROMPTS = tokenised((TEXTS[0], TEXTS[1], TEXTS[3]))["input_ids"][:, :4]


def model(family: str, **options: Any) -> FrozenModel:
    frozen = tiny_frozen(family, task="causal", **options)
    frozen.model.generation_config.eos_token_id = None  # a random model would end soon
    return frozen


def written(target: FrozenModel, put: Any = None, prompts: Tensor = PROMPTS) -> tuple[Tensor, Tensor]:
    """What `generate` writes, and the logits of every step."""
    logits: list[Tensor] = []
    head: Any = target.model.get_output_embeddings()
    with head.register_forward_hook(lambda module, args, output: logits.append(output[:, -1])):
        tokens = generate(target, prompts, put, new_tokens=NEW)
    return tokens, torch.stack(logits, 1)


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
    target = model(family)
    (own, logits), (back, again) = written(target), written(target, Replaced(site, target, site, lambda rows: rows))
    assert torch.equal(back, own)
    assert torch.equal(again, logits)
    assert hooks_of(target) == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("source_site", "site"), [(0, 2), (2, 1), (3, 0)])
def test_caches_give_what_the_whole_text_gives(family: str, source_site: int, site: int) -> None:
    source, target = model(family, seed=1), model(family)
    turn = torch.linalg.qr(torch.randn(16, 16, generator=torch.Generator().manual_seed(0)))[0]
    put = Replaced(site, source, source_site, lambda rows: rows @ turn)
    found, found_logits = written(target, put)
    state = lambda ids: source.front({"input_ids": ids}, [source_site])[0] @ turn  # noqa: E731
    tokens, logits = step_by_step(target, PROMPTS, site, state)
    assert torch.equal(found, tokens)
    torch.testing.assert_close(found_logits, logits, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_an_added_vector_is_added_at_every_position(family: str) -> None:
    target = model(family)
    vector = 3 * torch.randn(16, generator=torch.Generator().manual_seed(0))
    state = lambda ids: target.front({"input_ids": ids}, [2])[0] + vector  # noqa: E731
    assert torch.equal(written(target, Added(2, vector))[0], step_by_step(target, PROMPTS, 2, state)[0])
    assert torch.equal(written(target)[1], written(target, Added(2, 0 * vector))[1])


def test_draws_follow_from_the_seed_and_leave_others_alone() -> None:
    target = model("gpt2")
    before = torch.get_rng_state()
    a, b, c = (generate(target, PROMPTS, temperature=2.0, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_text_ends_at_the_end_of_text_token() -> None:
    target = model("gpt2")
    free = generate(target, PROMPTS, new_tokens=NEW)
    target.model.generation_config.eos_token_id = int(free[0, 2])
    found = generate(target, PROMPTS, new_tokens=NEW)
    first = [(row == free[0, 2]).nonzero()[:1, 0].tolist() for row in free]
    assert (found >= 0).sum(1).tolist() == [place[0] + 1 if place else NEW for place in first]
    assert torch.equal(found[0], free[0].where(torch.arange(NEW) <= first[0][0], -1))


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
        generate(given(), PROMPTS)
    with pytest.raises(ValueError, match=r"with a cache|sees only those before it"):  # nor can it be read
        generate(model("gpt2"), PROMPTS, Replaced(1, given(), 1, lambda rows: rows))


def test_other_bad_input() -> None:
    target = model("gpt2")
    with pytest.raises(ValueError, match="Expected `site` between 0 and 4, but got 5"):
        generate(target, PROMPTS, Added(5, torch.ones(16)))
    with pytest.raises(ValueError, match="at most 64 tokens in all"):
        generate(target, PROMPTS, new_tokens=61)
    with pytest.raises(ValueError, match="temperature"):
        generate(target, PROMPTS, temperature=-1)
