"""Latents that recur in dictionaries of other seeds, by the cosines of their decoders."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from aligners.errors import UserError, check_known, check_range
from aligners.similarity.latents.dictionary import PairedDictionary

ROWS = 1024  # latents compared at a time
Matching = Literal["nearest", "one_to_one"]
MATCHINGS = get_args(Matching)


class Agreement(NamedTuple):
    """Latents of one dictionary and their partners in another.

    Attributes:
        partner: (S, m) numbers of the partners; −1 for none, in a smaller dictionary matched one to one.
        cosine: (S, m) with the partner; −1 for none.
        share: (S,) of the latents whose cosine is at least the threshold.
        chance: (S,) the same for partners in the other dictionary with its coordinates shuffled, each in the same way.
    """

    partner: Tensor
    cosine: Tensor
    share: Tensor
    chance: Tensor


def joint_decoders(
    dictionary: PairedDictionary, variance_x: Tensor, variance_y: Tensor
) -> Tensor:
    """Both decoders of each latent side by side, of states with a total variance of 1: (S, m, d_x + d_y)."""
    scaled = []
    variances = variance_x, variance_y
    for decoder, variance in zip(dictionary.decoders, variances, strict=True):
        deviation = variance.double().sqrt()
        scaled.append(decoder / deviation[:, None, None])
    return torch.cat(scaled, 2)


def agreement(
    a: Tensor,
    b: Tensor,
    matching: Matching = "one_to_one",
    threshold: float = 0.7,
    seed: int = 0,
) -> Agreement:
    """Match the latents of one dictionary with those of another, trained on the same states from another seed.

    Latents recur at a cosine of 0.7 or more after Paulo and Belrose 2025, "Sparse autoencoders trained on the same data
    learn different features", who match one to one. That takes time in the cube of m; `nearest` takes its square, and
    lets several latents have one partner. A decoder of 0 has the cosine 0 with all.

    Args:
        a: (S, m_a, d) decoders, see `joint_decoders`.
        b: (S, m_b, d).
        matching: `one_to_one`, of the largest sum of cosines, or `nearest`.
        threshold: cosine from which a latent recurs.
        seed: of the shuffle that gives chance.

    Raises:
        ValueError: shapes that do not fit, decoders that are not finite, or an unknown matching.
    """
    check_known(MATCHINGS, matching=matching)
    check_range(above=-1, most=1, threshold=threshold)
    fits = (
        a.ndim == b.ndim == 3 and a.shape[0] == b.shape[0] and a.shape[2] == b.shape[2]
    )
    if not fits:
        raise UserError(
            "Expected `a` and `b` of shape (sites, latents, width) with the same sites and width, but got "
            f"{tuple(a.shape)} and {tuple(b.shape)}."
        )
    for name, decoders in (("a", a), ("b", b)):
        if not decoders.isfinite().all():
            raise UserError(
                f"Expected `{name}` to be finite, but it holds NaN or infinity."
            )
    draw = torch.Generator().manual_seed(seed)
    order = torch.randperm(b.shape[2], generator=draw)
    partners, cosines, by_chance = [], [], []
    for of_a, of_b in zip(_unit(a), _unit(b), strict=True):
        partner, cosine = _matched(of_a, of_b, matching)
        _, chance = _matched(of_a, of_b[:, order], matching)
        partners.append(partner)
        cosines.append(cosine)
        by_chance.append(chance)
    cosine = torch.stack(cosines)
    chance = torch.stack(by_chance)
    return Agreement(
        partner=torch.stack(partners),
        cosine=cosine,
        share=(cosine >= threshold).double().mean(1),
        chance=(chance >= threshold).double().mean(1),
    )


def recurrences(
    dictionaries: Sequence[Tensor],
    matching: Matching = "one_to_one",
    threshold: float = 0.7,
) -> list[Tensor]:
    """Count the other dictionaries in which each latent has a partner: (S, m) for each dictionary.

    Args:
        dictionaries: decoders of each seed, (S, m, d).
        matching: see `agreement`.
        threshold: see `agreement`.

    Raises:
        ValueError: fewer than two dictionaries, or as `agreement` does.
    """
    if len(dictionaries) < 2:
        raise UserError(
            f"Expected at least 2 `dictionaries` to compare, but got {len(dictionaries)}."
        )
    found = []
    for place, one in enumerate(dictionaries):
        times = torch.zeros(one.shape[:2], dtype=torch.long, device=one.device)
        for other_place, other in enumerate(dictionaries):
            if other_place == place:
                continue
            matched = agreement(one, other, matching, threshold)
            times += matched.cosine >= threshold
        found.append(times)
    return found


def _unit(decoders: Tensor) -> Tensor:
    """Scale decoders to length 1; 0 stays 0."""
    decoders = decoders.double()
    norms = torch.linalg.vector_norm(decoders, dim=2, keepdim=True)
    return decoders / norms.where(norms > 0, 1.0)


def _matched(a: Tensor, b: Tensor, matching: Matching) -> tuple[Tensor, Tensor]:
    """Return partner and cosine of each latent of a, (m_a,)."""
    if matching == "nearest":
        partners, cosines = [], []
        for some in a.split(ROWS):
            cosine, partner = (some @ b.mT).max(1)
            partners.append(partner)
            cosines.append(cosine)
        return torch.cat(partners), torch.cat(cosines)
    from scipy.optimize import linear_sum_assignment

    every = a @ b.mT
    gains = every.cpu().numpy()
    rows, columns = linear_sum_assignment(gains, maximize=True)
    partner = torch.full((len(a),), -1, device=a.device)
    cosine = torch.full_like(every[:, 0], -1.0)
    partner[rows] = torch.from_numpy(columns).to(a.device)
    cosine[rows] = every[rows, columns]
    return partner, cosine
