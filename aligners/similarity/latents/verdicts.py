"""A verdict on each latent: shared, X's own, Y's own, undecided or dead, with the errors that nothing makes."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from aligners.errors import UserError, check_range
from aligners.similarity.latents.ratios import Limits, p_above, p_below, ratios
from aligners.similarity.latents.unit_sums import Parts

VERDICTS = ("x", "y", "shared", "undecided", "dead")
X, Y, SHARED, UNDECIDED, DEAD = range(5)
# Of ν^ε and ν^r: those of 2504.02922 for latents that only one model has.
LIMITS = (0.2, 0.5)
# Largest share of a control's latents that look as much like own, or as shared, as one that is called so.
RANK = 0.01


class Verdicts(NamedTuple):
    """What each latent is, and how far that can be trusted.

    Attributes:
        verdict: (S, m) numbers in `VERDICTS`.
        p_own: (S, m) adjusted p that the other model has it, over texts; p_shared: that it has nothing of it.
        rank_own: (S, m) share of the latents of the worst same-model control that look as much like own; NaN without.
        rank_shared: (S, m) share of the latents of the worst permuted control that look as shared; NaN without.
        false_own: how many own latents of these the same rule finds where there is none, from the worst same-model
            control, scaled to the number of live latents here; NaN without.
        error_rate: `false_own` as a share of the own latents that are found, at most 1; NaN without, and where none is
            found.
    """

    verdict: Tensor
    p_own: Tensor
    p_shared: Tensor
    rank_own: Tensor
    rank_shared: Tensor
    false_own: float
    error_rate: float

    def counts(self) -> dict[str, int]:
        """The number of latents of each verdict."""
        found = {}
        for number, name in enumerate(VERDICTS):
            called = self.verdict == number
            found[name] = int(called.sum())
        return found


def verdicts(
    parts: Parts,
    same: Sequence[Parts] = (),
    permuted: Sequence[Parts] = (),
    *,
    limits: Limits = LIMITS,
    rate: float = 0.05,
    rank: float = RANK,
) -> Verdicts:
    """Give each latent the verdict that survives all controls.

    Own: ν^ε and ν^r are both below their limits over texts (`p_below`, the larger p of the two, adjusted by Benjamini
    and Hochberg over the live latents at `rate`), and in each same-model control at most a share `rank` of the latents
    look as much like own. Shared: one of the two is above its limit (`p_above`, twice the smaller p, adjusted
    likewise), and in each permuted control at most a share `rank` have as small a p. How much a latent looks like own
    is the larger of ν^ε and ν^r, each over its limit (`own_score`). Dead latents never fired. The others are undecided.

    A rank is a conformal p-value (Bates et al. 2023, "Testing for outliers with conformal p-values"): if the shared
    latents of the pair behave as those of the control, at most a share `rank` of them, and one in the number of the
    control's latents, becomes own, whatever the dictionary's own artefacts are. `false_own` counts one more false
    latent than the control shows, for that is as little as its size can tell.

    Args:
        parts: of the pair.
        same: parts of dictionaries of one model with itself, or with another seed of it, in which nothing is own.
        permuted: parts of the pair with `null`, in which the other model has nothing of any latent.
        limits: of ν^ε and ν^r.
        rate: false discovery rate over latents, of own and of shared ones each.
        rank: see above.

    Raises:
        ValueError: a rate outside (0, 1), a limit not above 0, or a control of which no latent fires, or too few to
            rank any so low.
    """
    check_range(above=0, below=1, rate=rate, rank=rank)
    check_range(above=0, limits=limits)
    alive = parts.fired.sum(0) > 0
    score = own_score(parts, limits)
    p_own, p_shared = _adjusted(parts, limits, alive)
    rank_own = score.new_full(score.shape, torch.nan)
    for control in same:
        scores = control_scores(control, limits)
        _check_size(scores, rank)
        as_own = _share(scores, score)
        rank_own = torch.fmax(rank_own, as_own)
    rank_shared = torch.full_like(rank_own, torch.nan)
    raw = _p_shared(parts, limits)
    for control in permuted:
        _check_size(control_scores(control, limits), rank)
        by_chance = _p_shared(control, limits)
        as_shared = _share(by_chance.flatten(), raw)
        rank_shared = torch.fmax(rank_shared, as_shared)

    own = (p_own <= rate) & ~(rank_own > rank)
    shared = (p_shared <= rate) & ~(rank_shared > rank) & ~own
    verdict = torch.full_like(parts.owner, UNDECIDED, dtype=torch.long)
    verdict[shared] = SHARED
    verdict[own] = parts.owner[own].long()
    verdict[~alive] = DEAD
    live = int(alive.sum())
    false_own = _false_own(same, limits, rate, rank, live)
    own_alive = own & alive
    found = int(own_alive.sum())
    error_rate = torch.nan
    if same and found:
        error_rate = min(1.0, false_own / found)
    return Verdicts(
        verdict, p_own, p_shared, rank_own, rank_shared, false_own, error_rate
    )


def own_score(parts: Parts, limits: Limits = LIMITS) -> Tensor:
    """The larger of ν^ε and ν^r, each over its limit, (S, m): below 1 it looks like own. NaN where either is."""
    over = ratios(parts)
    over[0] /= limits[0]
    over[1] /= limits[1]
    return torch.maximum(over[0], over[1])


def control_scores(control: Parts, limits: Limits = LIMITS) -> Tensor:
    """The scores of a control's latents that have one, (n,).

    Raises:
        ValueError: none has.
    """
    scores = own_score(control, limits)
    known = scores[scores.isfinite()]
    if not len(known):
        raise UserError(
            "Expected a control of which latents fire, but no latent of it has a ratio."
        )
    return known


def _adjusted(parts: Parts, limits: Limits, alive: Tensor) -> tuple[Tensor, Tensor]:
    """The p of own and of shared, (S, m) each, adjusted over the latents that fire; 1 for the others."""
    below = p_below(parts, limits).amax(0)
    adjusted = []
    for p in (below, _p_shared(parts, limits)):
        of_all = torch.ones_like(p)
        of_all[alive] = benjamini_hochberg(p[alive])
        adjusted.append(of_all)
    return adjusted[0], adjusted[1]


def _p_shared(parts: Parts, limits: Limits) -> Tensor:
    """The p that neither ν^ε nor ν^r is above its limit, (S, m): twice the smaller of two, after Bonferroni."""
    smaller = p_above(parts, limits).amin(0)
    return (2 * smaller).clamp(max=1)


def benjamini_hochberg(p: Tensor) -> Tensor:
    """Adjust p-values (n,) so that those up to q are false in a share q of the findings, on average."""
    if not len(p):
        return p
    from scipy.stats import false_discovery_control

    adjusted = false_discovery_control(p.cpu().numpy())
    return torch.from_numpy(adjusted).to(p)


def can_rank(scores: Tensor, rank: float = RANK) -> bool:
    """Tell whether a control has so many scores (n,) that one below all of them has at most this rank."""
    return 1 / (1 + len(scores)) <= rank


def _check_size(scores: Tensor, rank: float) -> None:
    if not can_rank(scores, rank):
        raise UserError(
            f"A control of {len(scores)} latents cannot give a rank below 1 in {1 + len(scores)}, so nothing would "
            f"pass `rank` {rank:g}. Give a control of more latents, or raise `rank`."
        )


def _share(control: Tensor, scores: Tensor) -> Tensor:
    """(1 + #{control ≤ score}) / (1 + n) of each score; 1 where there is no score."""
    ordered = control.sort().values
    known = scores.nan_to_num()
    places = torch.searchsorted(ordered, known, right=True)
    share = (1 + places).double() / (1 + len(ordered))
    return share.where(scores.isfinite(), 1.0)


def _false_own(
    same: Sequence[Parts], limits: Limits, rate: float, rank: float, live: int
) -> float:
    """How many of so many live latents the rule calls own falsely, by the worst control; NaN without one."""
    shares = []
    for control in same:
        alive = control.fired.sum(0) > 0
        p_own, _ = _adjusted(control, limits, alive)
        scores = own_score(control, limits)
        known = control_scores(control, limits)
        among = _share(known, scores)
        own = (p_own <= rate) & (among <= rank) & alive
        found = 1 + int(own.sum())
        every = 1 + int(alive.sum())
        shares.append(found / every)
    return live * max(shares, default=torch.nan)
