"""How both models' answers shift when a latent is taken out of their states: alike, if they use it alike."""

from collections.abc import Iterator

import torch
from torch import Tensor

from aligners.injection.comparing.read_answers import UNITS, divergences
from aligners.injection.latents.choosing import Chosen
from aligners.injection.latents.moving import only
from aligners.injection.latents.read_models import ModelPair, Moved, ReadBatch, X, Y
from aligners.injection.scoring.scores import per_text_sums

# Sums over each text, see `shift_sums`.
QUANTITIES = ("xx", "yy", "xy", "nn", "xn", "kl_x", "kl_y", "rows")


def shift_sums(
    pair: ModelPair, read: ReadBatch, place: int, chosen: Chosen
) -> Iterator[Tensor]:
    """Yield, for each chosen latent at a site, sums over each text of a batch: (8, B) float64, see `QUANTITIES`.

    The latent's part f_j d_j is taken out of the states of the model, of X and of Y each in its own space. A shift is
    that of the log-probabilities at every unit, less its mean over the answers. Sums are of products of shifts, of X
    and of Y, and n of the null; of KL(own answers ‖ shifted ones) in nats; and of rows on which the latent fires. The
    null takes another latent's direction out of the same rows of Y, as long as the longer part of this one.
    """
    entries = read.entries[place]
    decoder_x, decoder_y = (each[place] for each in pair.dictionary.decoders)
    for latent, partner in zip(chosen.every, chosen.partners, strict=True):
        of_latent = only(entries, latent)
        sums = decoder_x.new_zeros(len(QUANTITIES), read.rows.texts)
        texts = read.texts_of(of_latent)
        if len(texts):
            codes = decoder_x.new_zeros(len(read.rows), 1)
            codes[of_latent.row, 0] = of_latent.value
            null = _as_long(decoder_y[partner], decoder_x[latent], decoder_y[latent])
            taken = (X, decoder_x[latent]), (Y, decoder_y[latent]), (Y, null)
            shifted = []
            for side, direction in taken:
                added = -codes * direction
                shifted.append(pair.moved(read, side, place, added, texts))
            sums[:-1] = _products(read, shifted)
            fired = (codes[:, 0] > 0).double()
            sums[-1] = per_text_sums(fired, read.rows)
        yield sums


def _as_long(direction: Tensor, *others: Tensor) -> Tensor:
    """Return a direction with the length of the longest of others."""
    lengths = [torch.linalg.vector_norm(other) for other in others]
    longest = torch.stack(lengths).max()
    return torch.nn.functional.normalize(direction, dim=0) * longest


def _products(read: ReadBatch, shifted: list[Moved]) -> Tensor:
    """Return the sums of products of shifts, and of divergences, over each text of the batch: (7, B)."""
    units = shifted[0].units
    found = []
    size = max(1, UNITS // read.answers[X].shape[-1])
    for part in torch.arange(len(units), device=units.device).split(size):
        rows = units[part]
        own_x, own_y = (logits[rows] for logits in read.answers)
        of_x, of_y, of_null = (each.logits[part] for each in shifted)
        x = _shift(own_x, of_x)
        y = _shift(own_y, of_y)
        n = _shift(own_y, of_null)
        products = [(a * b).sum(1) for a, b in ((x, x), (y, y), (x, y), (n, n), (x, n))]
        kl = divergences(own_x, of_x), divergences(own_y, of_y)
        found.append(torch.stack([*products, *kl]))
    values = found[0].new_zeros(len(found[0]), len(read.task.targets))
    values[:, units] = torch.cat(found, 1)
    return per_text_sums(values, read.task.targets)


def _shift(own: Tensor, moved: Tensor) -> Tensor:
    """Return the shift of log-probabilities of units (U', C), less its mean over the answers, float64."""
    shift = moved.double() - own.double()
    return shift - shift.mean(1, keepdim=True)
