"""Which latents a change lies in, against loops over rows and latents, and a change that one latent was planted for."""

import numpy as np
import pytest
import torch
from tests.rows import fitted
from tests.runs import related_rows
from torch import Tensor

from aligners.datamodules.rows.row_types import RowTypes
from aligners.datamodules.rows.shown_rows import ShownRows
from aligners.injection.comparing.changed_latents import ChangedLatents
from aligners.maps.sparse.sparse_aligner import SparseAligner

SITES, TEXTS, LENGTH, WIDTH, LATENTS = 2, 30, 10, 6, 24
ROWS = TEXTS * LENGTH
STRINGS = [f" word{number}" for number in range(7)]
NUMBER = torch.arange(ROWS) % len(STRINGS)
TEXT = torch.arange(TEXTS).repeat_interleave(LENGTH)
PLACE = torch.arange(LENGTH).repeat(TEXTS)


def shown() -> ShownRows:
    return ShownRows(STRINGS, RowTypes("tokens", STRINGS, NUMBER, torch.full((TEXTS,), LENGTH)))


def found(aligner: SparseAligner, x: Tensor, y: Tensor, texts: int) -> ChangedLatents:
    changed = ChangedLatents(aligner, shown())
    for rows in torch.arange(ROWS).split(texts * LENGTH):
        changed.update(x[:, rows], y[:, rows], TEXT[rows], PLACE[rows])
    return changed


def planted(latent: int) -> tuple[SparseAligner, Tensor, Tensor]:
    """A dictionary with one latent of what differs, on rows of one word; the others say the same of both models."""
    torch.manual_seed(0)
    aligner = SparseAligner(SITES, WIDTH, WIDTH, latents=LATENTS, active=1, selection="l1")
    direction = torch.zeros(WIDTH)
    direction[1] = 1.0
    crosscoder = aligner.crosscoder
    with torch.no_grad():
        crosscoder.decoders[1].copy_(crosscoder.decoders[0])
        crosscoder.encoders[0][:, :, latent] = -direction
        crosscoder.encoders[1][:, :, latent] = direction
        crosscoder.decoders[0][:, latent] = 0
        crosscoder.decoders[1][:, latent] = direction
    x = torch.randn(SITES, ROWS, WIDTH)
    y = x + 3 * (NUMBER == 4)[None, :, None] * direction
    return aligner, x, y


def test_the_latent_of_a_planted_change_is_named_with_its_word() -> None:
    aligner, x, y = planted(latent=17)
    rows = found(aligner, x, y, 4).table([2, 5])
    assert [(row["site"], row["latent"]) for row in rows] == [(2, 17), (5, 17)]
    for row in rows:
        assert row["share"] == pytest.approx(1)
        assert row["together"] == pytest.approx(1)
        assert row["fired"] == pytest.approx(float((NUMBER == 4).double().mean()))
        assert row["top_tokens"] == "word4 100%"
        assert "word4" in row["context"].split()


@pytest.mark.parametrize("texts", [1, 30])
def test_shares_are_those_of_a_loop(texts: int) -> None:
    x, y = related_rows(SITES, ROWS, WIDTH, WIDTH)
    torch.manual_seed(0)
    aligner = fitted(SparseAligner(SITES, WIDTH, WIDTH, latents=LATENTS, active=4), x, y).double()
    x, y = x.double(), y.double()
    changed = found(aligner, x, y, texts)
    pair = aligner.paired()
    every = aligner.codes(x, y)
    for site in range(SITES):
        codes, d_x, d_y = (part[site].detach().numpy() for part in (every, *pair.decoders))
        constant = (pair.bias_y - pair.bias_x)[site].numpy()
        delta = (y - x)[site].numpy() - constant
        whole = (delta**2).sum()
        for latent in range(LATENTS):
            added = codes[:, latent, None] * (d_y - d_x)[latent]
            alone = 1 - ((delta - added) ** 2).sum() / whole
            assert float(changed.alone[site, latent] / changed.total[site]) == pytest.approx(alone, abs=1e-9)
        again_x, again_y = (part[site].detach().numpy() for part in aligner.decode(every))
        left = ((delta + constant - (again_y - again_x)) ** 2).sum()
        assert float(changed.left[site]) == pytest.approx(left, rel=1e-6)
    rows = changed.table([1, 2])
    shares = [row["share"] for row in rows if row["site"] == 1]
    assert np.all(np.diff(shares) <= 0)
    assert 0 < len(shares) <= 10


def test_equal_models_have_no_latent_of_a_change() -> None:
    aligner, x, _ = planted(latent=3)
    assert found(aligner, x, x, 4).table([1, 2]) == []


def test_models_of_other_widths_and_dictionaries_of_one_model_are_refused() -> None:
    with pytest.raises(ValueError, match="only in a common space"):
        ChangedLatents(SparseAligner(1, 6, 8, latents=4, active=2), shown())
    with pytest.raises(ValueError, match="of both models"):
        ChangedLatents(SparseAligner(1, 6, 6, latents=4, active=2, of="x"), shown())
