"""States read in a model's vocabulary: its own, and those that a map takes to its last site."""

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, rel_entr
from tests.tiny import TEXTS, tiny_frozen, tiny_tokenizer, tokenised
from tests.world import World

from aligners.api import Linear, inject, load, logit_lens, states
from aligners.models.model import FrozenModel


def gpt(seed: int) -> FrozenModel:
    """A tiny GPT-2 of four sites and one after the norm."""
    frozen = tiny_frozen("gpt2", task="causal").untrained(seed)
    return FrozenModel(frozen.model, tiny_tokenizer(), name=f"gpt-{seed}")


@pytest.mark.parametrize(("family", "task"), [("gpt2", "causal"), ("llama", "causal"), ("bert", "masked")])
def test_of_own_last_states_it_is_what_the_model_answers(family: str, task: str) -> None:
    frozen, inputs = tiny_frozen(family, task=task), tokenised()
    expected = frozen.logits(inputs).flatten(0, 1)
    for site in range(3, frozen.last_site + 1):
        (own,) = frozen.front(inputs, [site])
        torch.testing.assert_close(logit_lens(frozen, own.flatten(0, 1), site=site), expected)
    rows = frozen.front(inputs, [3])[0].flatten(0, 1).requires_grad_()
    (gradient,) = torch.autograd.grad(logit_lens(frozen, rows).square().sum(), rows)
    assert gradient.abs().sum() > 0


def test_of_mapped_states_it_is_what_injection_measures() -> None:
    """The divergence of a tuned lens from X's site 1 to Y's last, against SciPy in float64."""
    model_x, model_y = gpt(0), gpt(1)
    for site in (3, 4):
        lens = Linear().fit(states(model_x, TEXTS, 1), states(model_y, TEXTS, site))
        found = inject(model_x, model_y, lens, TEXTS, site=(1, site))
        divergences = []
        for text in TEXTS:
            own = model_y.logits(tokenised((text,)))[0].double().numpy()
            read = logit_lens(model_y, lens.transform(states(model_x, (text,), 1)), site=site)
            both = [np.exp(log_softmax(logits, -1)) for logits in (own, read.double().numpy())]
            divergences += rel_entr(*both).sum(-1)[:-1].tolist()  # the last token has no next one
        assert found.n == len(divergences)
        assert found.kl == pytest.approx(np.mean(divergences), abs=1e-6)
        assert found.kl > 1e-4


def test_a_models_own_states_diverge_by_nothing() -> None:
    model = gpt(0)
    for site in range(5):
        assert inject(model, model, lambda rows: rows, TEXTS, site=site).kl == 0


def test_what_cannot_be_read_is_refused(world: World) -> None:
    rows = torch.zeros(2, 16)
    with pytest.raises(ValueError, match=r"`site` L = 3 or above, .* but got 2"):
        logit_lens(gpt(0), rows, site=2)
    with pytest.raises(ValueError, match=r"`site` between 0 and 4, but got 5"):
        logit_lens(gpt(0), rows, site=5)
    with pytest.raises(ValueError, match=r"`states` of shape \(N, d = 16\), but got \(2, 15\)"):
        logit_lens(gpt(0), rows[:, 1:])
    with pytest.raises(ValueError, match=r"`model` that predicts tokens, but .* is a BertForSequenceClassification"):
        logit_lens(load(world.model_x), rows)
