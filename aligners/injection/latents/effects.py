"""What latents of a dictionary do in two frozen models: how much of a change they carry, and what their loss shifts."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from aligners.datamodules.tokens.tokenised import TokenisedTexts
from aligners.errors import check_range, finite
from aligners.injection.latents.choosing import (
    Chosen,
    FirstOrder,
    carried_by_text,
    choose,
    first_order,
)
from aligners.injection.latents.moving import Move, moved_divergences, moves_of
from aligners.injection.latents.read_models import ModelPair, ReadBatch, why_not_carried
from aligners.injection.latents.removing import QUANTITIES, shift_sums
from aligners.injection.scoring.scores import (
    Row,
    interval,
    named,
    per_text_sums,
    resampled_counts,
    with_interval,
)
from aligners.progress import track
from aligners.similarity.latents.dictionary import decoder_cosines
from aligners.similarity.passes.ranks import ranks, summed, this_rank

LOGITS = 2**25  # of a batch
ALIKE = 1e-12  # nats, below which a divergence is rounding
Interval = list[float | None]  # a figure and the ends of its interval
NOTHING: Interval = [None, None, None]
SAME_ANSWERS = "both models give the same answers, so that there is no change to carry"


class LatentEffects(NamedTuple):
    """What latents do in both models, on the texts of all ranks; the same on every rank.

    Attributes:
        attributed: (S, m) share of the divergence that each latent carries to first order; NaN where not measured.
        by_row: (S, m) nats that it carries for each row on which it fires; see `FirstOrder.by_row`.
        turned: (S, m) 1 − cos(d_x,j, d_y,j), 0 where the latent has one direction in both; NaN without one space.
        rows: one for each measured latent: `place` of the site pair, `latent`, `chosen` ("first", "random" or
            "narrow"), `fired` (rows), `attributed`, `attributed_by_row`, `recovered`, `correlation`,
            `correlation_null`, `shift_x` and `shift_y` (nats for each row on which it fires). Intervals are of texts;
            None where there is no figure.
        cumulative: one for each number of latents that are moved together: `place`, `moved`, `latents`, `recovered`
            and, where as many random ones are moved, `random`.
        meta: `divergence`, the mean KL(Y ‖ X) in nats; `units` and `texts` that it is a mean over; `not_carried`, why
            nothing is moved, or None.
    """

    attributed: Tensor
    by_row: Tensor
    turned: Tensor
    rows: list[Row]
    cumulative: list[Row]
    meta: Row


def latent_effects(
    pair: ModelPair,
    texts: TokenisedTexts,
    numbers: Sequence[int],
    *,
    count: int = 20,
    one_space: bool = False,
    batch_size: int = 32,
    seed: int = 0,
) -> LatentEffects:
    """Measure what latents do in two frozen models.

    Three questions, each with its floor:

    - recovered: what part of KL(Y ‖ X), the change of the answers, is gone where X's state is moved by what the latent
      adds to Y's more than to X's, f_j (d_y,j − d_x,j)? First to first order, for all latents; then measured, for the
      first ones, as many random ones that fire, and the first five by what they carry for each row on which they fire:
      a narrow change, such as of one word, is a small part of all there is. Beside it, all latents (what the dictionary
      can do at most) with and without biases, and Y's whole state in place.
    - correlation: where the latent is taken out of X's and of Y's states, are the shifts of the answers alike? The null
      takes the direction of another latent out of Y's.
    - how large those shifts are.

    Nothing depends on the batches or the number of ranks but by rounding.

    Args:
        pair: the models and their dictionary.
        texts: held-out texts, which neither the dictionary nor a map was trained on, tokenised for both models.
        numbers: which of them are read.
        count: T, latents that are measured at each site; and as many random ones.
        one_space: whether the states of both models are in one space, as those of a model and its fine-tuning. Without,
            nothing is moved from one to the other.
        batch_size: texts that are read together at most; fewer where a vocabulary is large.
        seed: seed of the random latents and of the resampling of texts.

    Raises:
        ValueError: an option is out of its range, or as `ModelPair.read` does.
    """
    check_range(least=1, count=count, batch_size=batch_size, numbers=len(numbers))
    reading = _Reading(pair, texts, list(numbers), batch_size)
    # a Trainer tests in inference mode, in which there are no gradients
    with torch.inference_mode(False), torch.no_grad():
        why = why_not_carried(pair, one_space=one_space)
        found = first_order(pair, reading.batches("Attributing"), slopes=why is None)
        if found.divergence <= ALIKE * found.units:
            why = why or SAME_ANSWERS
            found = found._replace(carried=found.carried + torch.nan)
        chosen = choose(pair, found, count, seed)
        measured = _measured(reading, chosen, carried=why is None)
    divergence = finite(found.divergence / max(found.units, 1))
    meta: Row = {"divergence": divergence, "units": found.units}
    meta |= {"texts": len(numbers), "not_carried": why}
    rows, cumulative = [], []
    for place, of_site in enumerate(measured):
        rows += _latent_rows(place, chosen[place], of_site, found, seed)
        cumulative += _cumulative_rows(place, of_site, seed)
    attributed = found.attributed().cpu()
    by_row = found.by_row().cpu()
    turned = _turned(pair, one_space=one_space)
    return LatentEffects(attributed, by_row, turned, rows, cumulative, meta)


def _turned(pair: ModelPair, *, one_space: bool) -> Tensor:
    """Return 1 − cosine of both decoders of each latent, (S, m) on the CPU; NaN without one space."""
    x, y = pair.models
    if not one_space or x.width != y.width:
        return torch.full(pair.sizes, torch.nan)
    return 1 - decoder_cosines(pair.dictionary).cpu()


class _Reading:
    """This rank's share of the texts, read batch by batch, the longest first."""

    def __init__(
        self,
        pair: ModelPair,
        texts: TokenisedTexts,
        numbers: list[int],
        batch_size: int,
    ) -> None:
        self.pair = pair
        self.texts = texts
        self.numbers = numbers
        lengths = texts.lengths[numbers]
        places = lengths.argsort(descending=True, stable=True)
        answers = max(model.vocabulary for model in pair.models)
        if pair.asked.what == "classes":
            answers = 1
        most = LOGITS // (int(lengths.max()) * answers)
        size = max(1, min(batch_size, most))
        own = places[this_rank() :: ranks()]
        self.parts = [part for part in own.split(size) if len(part)]

    def batches(self, what: str) -> Iterator[ReadBatch]:
        """Yield what both models compute on each batch."""
        for read, _ in self.with_places(what):
            yield read

    def with_places(self, what: str) -> Iterator[tuple[ReadBatch, Tensor]]:
        """Yield also the places (B,) of the batch's texts among all that are read."""
        for part in track(self.parts, what):
            batch = self.texts[[self.numbers[place] for place in part.tolist()]]
            yield self.pair.read(batch), part


class _OfSite(NamedTuple):
    """Sums over each of n texts at one site, for T' chosen latents.

    Attributes:
        moves: what is moved; empty where nothing is.
        before: (n,) KL(Y ‖ X) with nothing moved.
        after: (moves, n) with each move.
        carried: (T', n) what each latent takes away of it to first order; 0 where nothing is moved.
        shifts: (T', 8, n), see `shift_sums`.
    """

    moves: list[Move]
    before: Tensor
    after: Tensor
    carried: Tensor
    shifts: Tensor

    @classmethod
    def empty(cls, moves: list[Move], latents: int, before: Tensor) -> Self:
        """Begin with sums of nothing; `before` is that of all sites."""
        texts = len(before)
        after = before.new_zeros(len(moves), texts)
        carried = before.new_zeros(latents, texts)
        shifts = before.new_zeros(latents, len(QUANTITIES), texts)
        return cls(moves, before, after, carried, shifts)

    def summed(self) -> Self:
        """Return the sums of all ranks, on the CPU; those of `before` are summed already."""
        after = summed(self.after).cpu()
        carried = summed(self.carried).cpu()
        shifts = summed(self.shifts).cpu()
        return type(self)(self.moves, self.before.cpu(), after, carried, shifts)


def _measured(
    reading: _Reading, chosen: Sequence[Chosen], *, carried: bool
) -> list[_OfSite]:
    """Move and remove the chosen latents of each site in one pass over the texts."""
    pair = reading.pair
    texts = len(reading.numbers)
    before = torch.zeros(texts, dtype=torch.float64, device=pair.device)
    sites = []
    for latents in chosen:
        moves = moves_of(latents, pair.sizes[1]) if carried else []
        sites.append(_OfSite.empty(moves, len(latents.every), before))
    for read, places in reading.with_places("Measuring latents"):
        texts_at = places.to(pair.device)
        kl = read.divergences()
        before[texts_at] = per_text_sums(kl, read.task.targets)
        for place, of_site in enumerate(sites):
            _add_batch(of_site, pair, read, place, chosen[place], texts_at)
    summed(before)
    return [of_site.summed() for of_site in sites]


def _add_batch(
    of_site: _OfSite,
    pair: ModelPair,
    read: ReadBatch,
    place: int,
    chosen: Chosen,
    texts: Tensor,
) -> None:
    """Write what is measured on a batch at a site into the columns of its texts."""
    if of_site.moves:
        of_site.carried[:, texts] = carried_by_text(pair, read, place, chosen.every)
    each = moved_divergences(pair, read, place, of_site.moves)
    for number, of_move in enumerate(each):
        of_site.after[number, texts] = of_move
    sums = shift_sums(pair, read, place, chosen)
    for number, of_latent in enumerate(sums):
        of_site.shifts[number][:, texts] = of_latent


def _latent_rows(
    place: int, chosen: Chosen, of_site: _OfSite, found: FirstOrder, seed: int
) -> list[Row]:
    """Make a row for each measured latent of a site."""
    recovered = _recovered(of_site, seed)
    attributed = _attributed(of_site, seed)
    by_row = _by_row(of_site, seed)
    correlations = _correlations(of_site.shifts, seed)
    enough = found.by_row()[place].isfinite().tolist()
    fired = found.fired[place].long().tolist()
    kinds = chosen.kinds()
    totals = of_site.shifts.sum(2)
    rows = []
    for number, latent in enumerate(chosen.every.tolist()):
        kl_x, kl_y, times = totals[number, -3:].tolist()
        row: Row = {
            "place": place,
            "latent": latent,
            "chosen": kinds[number],
            "fired": fired[latent],
        }
        row |= named("attributed", attributed[number])
        row |= named("attributed_by_row", by_row[number] if enough[latent] else NOTHING)
        row |= named("recovered", recovered[number] if of_site.moves else NOTHING)
        row |= correlations[number]
        row["shift_x"] = kl_x / times
        row["shift_y"] = kl_y / times
        rows.append(row)
    return rows


def _attributed(of_site: _OfSite, seed: int) -> list[Interval]:
    """Return for each latent the share of the divergence that it carries to first order, with its interval."""
    if not of_site.moves:
        return [NOTHING] * len(of_site.carried)
    before = of_site.before.expand_as(of_site.carried)
    return _ratios(of_site.carried, before, seed)


def _by_row(of_site: _OfSite, seed: int) -> list[Interval]:
    """Return for each latent the nats that it carries for each row on which it fires, with their interval."""
    rows = of_site.shifts[:, QUANTITIES.index("rows")]
    return _ratios(of_site.carried, rows, seed)


def _recovered(of_site: _OfSite, seed: int) -> list[Interval]:
    """Return for each move the share of the divergence that is gone, and the ends of its interval over texts."""
    if not of_site.moves:
        return []
    before = of_site.before.expand_as(of_site.after)
    return _ratios(before - of_site.after, before, seed)


def _ratios(values: Tensor, weights: Tensor, seed: int) -> list[Interval]:
    """Return ratios of sums over texts, (K, n) each, and the ends of their intervals over texts."""
    figures = interval(values, weights, seed=seed)
    each = zip(*figures, strict=True)
    return [list(map(finite, of_one)) for of_one in each]


def _correlations(shifts: Tensor, seed: int) -> list[Row]:
    """Return the correlation of shifts for each latent with its interval, and that with the null."""
    counts = resampled_counts(shifts.shape[-1], seed)
    rows = []
    for of_latent in shifts:
        xx, yy, xy, nn, xn = of_latent[:5] @ counts.T
        correlation = with_interval(xy / (xx * yy).sqrt())
        row = named("correlation", map(finite, correlation))
        null = xn[0] / (xx[0] * nn[0]).sqrt()
        rows.append(row | {"correlation_null": finite(null)})
    return rows


def _cumulative_rows(place: int, of_site: _OfSite, seed: int) -> list[Row]:
    """Make a row for each number of latents that are moved together at a site, random ones beside the first."""
    random: dict[int, Interval] = {}
    rows = []
    moves = list(zip(of_site.moves, _recovered(of_site, seed), strict=True))
    for move, figures in moves:
        if move.what == "random":
            random[move.size] = figures
    for move, figures in moves:
        if move.what in ("one", "random"):
            continue
        floor = NOTHING
        if move.what == "first":
            floor = random.get(move.size, NOTHING)
        row = {"place": place, "moved": move.what, "latents": move.size}
        row |= named("recovered", figures) | named("random", floor)
        rows.append(row)
    return rows


def draw_texts(numbers: Sequence[int], most: int, seed: int) -> list[int]:
    """Draw at most so many of the numbers of texts, ascending."""
    if len(numbers) <= most:
        return sorted(numbers)
    draw = np.random.default_rng(seed)
    drawn = draw.permutation(np.array(numbers))[:most]
    return np.sort(drawn).tolist()
