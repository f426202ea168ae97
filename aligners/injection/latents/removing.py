"""How both models' answers shift when a latent is taken out of their states: alike, if they use it alike."""

from collections.abc import Iterator

import torch
from torch import Tensor

from aligners.injection.comparing.read_answers import UNITS, divergences
from aligners.injection.latents.choosing import Chosen
from aligners.injection.latents.moving import only
from aligners.injection.latents.read_models import ModelPair, Moved, ReadBatch, X, Y
from aligners.injection.scoring.scores import per_text_sums
from aligners.similarity.latents.dictionary import Firing

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
    for latent, partner in zip(chosen.every, chosen.partners, strict=True):
        directions = _directions(pair, place, latent, partner)
        of_latent = only(entries, latent)
        yield _of_latent(pair, read, place, of_latent, directions)


def _directions(
    pair: ModelPair, place: int, latent: Tensor, partner: Tensor
) -> list[tuple[int, Tensor]]:
    """Return what is taken out of which model: a latent of X, of Y, and another's direction, as long, of Y."""
    part_x = pair.dictionary.decoder_x[place, latent]
    decoder_y = pair.dictionary.decoder_y[place]
    part_y = decoder_y[latent]
    null = _as_long(decoder_y[partner], part_x, part_y)
    return [(X, part_x), (Y, part_y), (Y, null)]


def _of_latent(
    pair: ModelPair,
    read: ReadBatch,
    place: int,
    entries: Firing,
    directions: list[tuple[int, Tensor]],
) -> Tensor:
    """Return the sums of one latent over each text of a batch, (8, B), given its entries."""
    texts = read.texts_of(entries)
    sums = entries.value.new_zeros(len(QUANTITIES), read.rows.texts)
    if not len(texts):
        return sums
    codes = sums.new_zeros(len(read.rows), 1)
    codes[entries.row, 0] = entries.value
    shifted = []
    for side, direction in directions:
        added = -codes * direction
        moved = pair.moved(read, side, place, added, texts)
        shifted.append(moved)
    sums[:-1] = _products(read, shifted)
    fired = (codes[:, 0] > 0).double()
    sums[-1] = per_text_sums(fired, read.rows)
    return sums


def _as_long(direction: Tensor, *others: Tensor) -> Tensor:
    """Return a direction with the length of the longest of others."""
    lengths = [torch.linalg.vector_norm(other) for other in others]
    longest = torch.stack(lengths).max()
    unit = torch.nn.functional.normalize(direction, dim=0)
    return unit * longest


def _products(read: ReadBatch, shifted: list[Moved]) -> Tensor:
    """Return the sums of products of shifts, and of divergences, over each text of the batch: (7, B)."""
    units = shifted[0].units
    targets = read.task.targets
    size = max(1, UNITS // read.answers[X].shape[-1])
    every = torch.arange(len(units), device=units.device)
    found = []
    for part in every.split(size):
        rows = units[part]
        own_x = read.answers[X][rows]
        own_y = read.answers[Y][rows]
        moved = [each.logits[part] for each in shifted]
        found.append(_of_units(own_x, own_y, moved))
    values = found[0].new_zeros(len(found[0]), len(targets))
    values[:, units] = torch.cat(found, 1)
    return per_text_sums(values, targets)


def _of_units(own_x: Tensor, own_y: Tensor, moved: list[Tensor]) -> Tensor:
    """Return the quantities of units, but the number of rows: logits (U', C) → (7, U')."""
    of_x, of_y, of_null = moved
    x = _shift(own_x, of_x)
    y = _shift(own_y, of_y)
    n = _shift(own_y, of_null)
    quantities = []
    for one, other in ((x, x), (y, y), (x, y), (n, n), (x, n)):
        product = torch.linalg.vecdot(one, other)
        quantities.append(product)
    quantities.append(divergences(own_x, of_x))
    quantities.append(divergences(own_y, of_y))
    return torch.stack(quantities)


def _shift(own: Tensor, moved: Tensor) -> Tensor:
    """Return the shift of log-probabilities of units (U', C), less its mean over the answers, float64."""
    shift = moved.double() - own.double()
    return shift - shift.mean(1, keepdim=True)
