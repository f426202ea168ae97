"""The largest codes and the top tokens of latents against sorts in NumPy, in any batches, orders, halves and ranks."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.ranks import two_ranks
from tests.references import latents as reference
from torch import Tensor

from aligners.similarity.latents.contexts import AROUND, Contexts, LatentContexts
from aligners.similarity.latents.token_shares import LatentTokens, TopTokens

SITES, TEXTS, LATENTS, COUNT, TOKENS = 2, 70, 6, 4, 11


def rows_of() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes with many ties and a dead latent, text, place and token of rows of texts of 1 to 30 rows."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 31, (TEXTS,), generator=draw)
    text = torch.arange(TEXTS).repeat_interleave(lengths)
    place = torch.cat([torch.arange(int(length)) for length in lengths])
    codes = torch.randint(-8, 5, (SITES, len(text), LATENTS), generator=draw).float().relu() / 3
    codes[:, :, 2] = 0
    codes[:, 3:, 3] = 0  # fires on fewer texts than are kept
    token = torch.randint(0, TOKENS, (len(text),), generator=draw)
    return codes, text, place, token


def batches(texts: Tensor, size: int) -> list[Tensor]:
    """Numbers of the rows of so many texts each, in this order of texts."""
    _, text, _, _ = rows_of()
    return [torch.isin(text, some).nonzero()[:, 0] for some in texts.split(size)]


def metrics() -> tuple[LatentContexts, LatentTokens]:
    return LatentContexts(SITES, LATENTS, COUNT), LatentTokens(SITES, LATENTS, TOKENS, COUNT)


def updated(parts: list[Tensor]) -> tuple[LatentContexts, LatentTokens]:
    contexts, tokens = metrics()
    codes, text, place, token = rows_of()
    for rows in parts:
        contexts.update(codes[:, rows], text[rows], place[rows])
        tokens.update(codes[:, rows], token[rows])
    return contexts, tokens


def check_contexts(found: Contexts) -> None:
    """Compare with a sort of all rows of each latent."""
    codes, text, place, _ = (part.numpy() for part in rows_of())
    for site in range(SITES):
        for latent in range(LATENTS):
            expected = reference.contexts(codes[site, :, latent], text, place, COUNT, AROUND)
            kept = found.code[site, latent] > 0
            for name in ("code", "text", "place", "window"):
                own = getattr(found, name)[site, latent][kept].numpy()
                np.testing.assert_array_equal(own, np.array([row[name] for row in expected]).reshape(own.shape))
            assert (found.text[site, latent][~kept] == -1).all()
            assert int(found.fired[site, latent]) == (codes[site, :, latent] > 0).sum()


def check_tokens(found: TopTokens) -> None:
    codes, _, _, token = (part.numpy() for part in rows_of())
    for site in range(SITES):
        for latent in range(LATENTS):
            expected = reference.top_tokens(codes[site, :, latent], token, COUNT)
            filled = len(expected)
            assert found.token[site, latent].tolist() == [name for name, _ in expected] + [-1] * (COUNT - filled)
            shares = [share for _, share in expected] + [0.0] * (COUNT - filled)
            np.testing.assert_allclose(found.share[site, latent], shares, rtol=1e-12)


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("size", [1, 8, 64])
def test_both_are_those_of_a_sort_in_any_batches(size: int, seed: int | None) -> None:
    texts = torch.arange(TEXTS)
    if seed is not None:
        texts = torch.randperm(TEXTS, generator=torch.Generator().manual_seed(seed))
    contexts, tokens = updated(batches(texts, size))
    check_contexts(contexts.compute())
    check_tokens(tokens.compute())


def test_sums_by_token_are_joined_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aligners.similarity.latents.token_shares.BUFFER", 3)
    _, tokens = updated(batches(torch.arange(TEXTS), 8))
    assert sum(map(len, tokens.keys)) <= 2 * SITES * LATENTS * TOKENS
    check_tokens(tokens.compute())


def test_merged_halves_are_the_whole() -> None:
    halves = torch.arange(TEXTS).split(TEXTS // 2)
    (contexts, tokens), (other_contexts, other_tokens) = (updated(batches(half, 8)) for half in halves)
    contexts.merge_state(other_contexts)
    tokens.merge_state(other_tokens)
    check_contexts(contexts.compute())
    check_tokens(tokens.compute())


def half(rank: int, parts: list[list[Tensor]]) -> tuple[Contexts, TopTokens]:
    contexts, tokens = updated(parts[rank])
    return contexts.compute(), tokens.compute()


def test_two_ranks_keep_what_one_does(tmp_path: Path) -> None:
    parts = [batches(texts, 8) for texts in (torch.arange(0, TEXTS, 2), torch.arange(1, TEXTS, 2))]
    for contexts, tokens in two_ranks(partial(half, parts=parts), tmp_path):
        check_contexts(contexts)
        check_tokens(tokens)


def test_a_rank_without_texts_adds_nothing(tmp_path: Path) -> None:
    parts = [batches(torch.arange(TEXTS), 8), []]
    for contexts, tokens in two_ranks(partial(half, parts=parts), tmp_path):
        check_contexts(contexts)
        check_tokens(tokens)


def test_half_precision_does_not_touch_what_is_kept() -> None:
    contexts, tokens = updated(batches(torch.arange(TEXTS), 8))
    check_contexts(contexts.to(torch.float16).compute())
    check_tokens(tokens.to(torch.float16).compute())


def test_nothing_read_is_nothing_found() -> None:
    contexts, tokens = metrics()
    with pytest.warns(UserWarning, match="before the ``update``"):
        assert not contexts.compute().code.any()
    with pytest.warns(UserWarning, match="before the ``update``"):
        assert (tokens.compute().token == -1).all()


def test_rows_left_out_leave_gaps_in_windows() -> None:
    codes = torch.tensor([[[3.0], [1.0], [2.0]]])
    contexts = LatentContexts(1, 1, 1)
    contexts.update(codes, torch.zeros(3).long(), torch.tensor([4, 5, 7]))
    window = contexts.compute().window[0, 0, 0]
    assert window[AROUND - 1 : AROUND + 5].tolist() == [0, 3, 1, 0, 2, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"codes": torch.zeros(2, 3)}, "`codes` of shape"),
        ({"codes": torch.zeros(SITES, 5, LATENTS + 1)}, "`codes` of shape"),
        ({"codes": -torch.ones(SITES, 5, LATENTS)}, "at least 0.*-1"),
        ({"codes": torch.full((SITES, 5, LATENTS), torch.nan)}, "finite"),
        ({"text": torch.zeros(4).long()}, r"`text` of shape \(5,\)"),
        ({"place": torch.full((5,), -1)}, "`place` from 0 to 16777215, but got -1"),
        ({"text": torch.full((5,), 2**24)}, "`text` from 0"),
    ],
)
def test_bad_rows_are_refused(change: dict[str, Tensor], message: str) -> None:
    contexts, _ = metrics()
    rows = {"codes": torch.ones(SITES, 5, LATENTS), "text": torch.zeros(5).long(), "place": torch.arange(5)}
    with pytest.raises(ValueError, match=message):
        contexts.update(**{**rows, **change})


@pytest.mark.parametrize(
    ("token", "message"),
    [(torch.full((5,), TOKENS), f"0 to {TOKENS - 1}, but got"), (torch.zeros(4).long(), r"`token` of shape \(5,\)")],
)
def test_unknown_tokens_are_refused(token: Tensor, message: str) -> None:
    _, tokens = metrics()
    with pytest.raises(ValueError, match=message):
        tokens.update(torch.ones(SITES, 5, LATENTS), token)
