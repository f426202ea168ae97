"""Maps to carry artefacts with: closed forms between two models' states, chosen by the artefact's answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from aligners.datamodules.rows.far import far_rows
from aligners.errors import UserError, check_known
from aligners.fitting.fits import fit_map
from aligners.maps.base import Aligner
from aligners.maps.linear import Identity, Linear, Procrustes, Ridge
from aligners.maps.solvers import STRENGTHS, ridge_path
from aligners.probing.artefacts.kinds import Artefact
from aligners.similarity.algebra.moments import Moments, merge_moments, moments_of

STALE = "identity"
MAPS = (STALE, "shift", "procrustes", "linear", "ridge", "ridge_identity")
EQUAL_WIDTHS = (STALE, "shift", "ridge_identity")


@dataclass(frozen=True)
class PairedRows:
    """Rows of the same tokens, words or texts.

    Attributes:
        old: (N, d_old) states of the old model.
        new: (N, d_new) states of the new model.
        text: (N,) number of the text of each row.
    """

    old: Tensor
    new: Tensor
    text: Tensor

    def at(self, chosen: Tensor) -> "PairedRows":
        """Return some of the rows."""
        return PairedRows(self.old[chosen], self.new[chosen], self.text[chosen])

    @property
    def typical(self) -> "PairedRows":
        """Return the rows that are not far from all others in either model, as a text's first token often is."""
        far = far_rows(self.old) | far_rows(self.new)
        return self.at(~far)

    @cached_property
    def moments(self) -> Moments:
        """Moments of the pairs (new, old), to fit maps to pull back by; computed once for all artefacts."""
        return moments_of(self.new[None], self.old[None])


class FittedMap(NamedTuple):
    """A map that was fitted for an artefact.

    Attributes:
        name: one of `MAPS`.
        back: g, from new states to old ones, a bank of one.
        error: share of the variance of the artefact's own answers that its answers through the map miss, on rows that
            the map was not fitted on.
        strength: strength of a ridge.
        common: whether the strength is relative to the mean variance of all features, instead of each feature's own.
    """

    name: str
    back: Aligner
    error: float
    strength: float | None = None
    common: bool = False

    def refitted(self, fitting: PairedRows, validation: PairedRows) -> "FittedMap":
        """Refit the map with the same strength, on the fitting rows and the rows that chose it."""
        moments = merge_moments(fitting.moments, validation.moments)
        for bank in _banks(self.name, moments):
            if (bank.strength, bank.common) == (self.strength, self.common):
                return self._replace(back=bank.aligner)
        raise RuntimeError(f"there is no map {self.name} of strength {self.strength}")


def _able(maps: Sequence[str], moments: Moments) -> list[str]:
    """Return the maps that the widths allow, each once, if there are rows enough for one of them."""
    d_new, d_old = moments.xy.shape[1:]
    able = []
    for name in dict.fromkeys(maps):
        if d_new == d_old or name not in EQUAL_WIDTHS:
            able.append(name)
    if not able:
        raise UserError(
            f"Expected a map in `maps` that leads from width {d_new} to width {d_old}, but got {', '.join(maps)}."
        )
    least = min(rows_needed(name, d_new) for name in able)
    if moments.n < least:
        raise UserError(
            f"Expected at least {least} fitting rows for the maps {', '.join(maps)} from width {d_new} to {d_old}, but "
            f"got {int(moments.n)}. Give more texts."
        )
    return able


def fit_maps(
    artefact: Artefact,
    fitting: PairedRows,
    validation: PairedRows,
    maps: Sequence[str] = MAPS,
) -> list[FittedMap]:
    """Fit maps for an artefact on rows without labels, and return them with the best first.

    The strength of a ridge is the one that changes the artefact's answers on the validation rows least. A ridge towards
    the identity, argmin ‖YW − X‖² + λ‖W − I‖² on centred rows, leaves the artefact unchanged where the rows determine
    nothing. λ is relative to each feature's own variance or to the mean of all, whichever the artefact chooses.

    Args:
        artefact: artefact to carry.
        fitting: rows that maps are fitted on.
        validation: other rows, which choose the best map.
        maps: maps out of `MAPS`. Those that the widths or the number of rows rule out are left out.

    Raises:
        ValueError: a name is unknown, or no map can be fitted; the message says how many rows are needed.
    """
    check_known(MAPS, maps=maps)
    moments = fitting.moments
    able = _able(maps, moments)
    truth = artefact.answers(validation.old)
    found = list[FittedMap]()
    d_new = moments.xy.shape[1]
    for name in able:
        if moments.n < rows_needed(name, d_new):
            continue
        tried = []
        for bank in _banks(name, moments):
            answers = artefact.carried(bank.aligner).answers(validation.new)
            error = answers_missed(truth, answers)
            tried.append(
                FittedMap(name, bank.aligner, error, bank.strength, bank.common)
            )
        found.append(min(tried, key=lambda fitted: fitted.error))
    return sorted(found, key=lambda fitted: fitted.error)


def forward_map(name: str, fitting: PairedRows, validation: PairedRows) -> Aligner:
    """Return the map of that name from old states to new ones, which pushes forward what is added to states.

    It is fitted on `typical` rows: otherwise a few huge states would dominate the least squares.

    Args:
        name: one of `MAPS`.
        fitting: rows that it is fitted on.
        validation: other rows, which choose the strength of a ridge by the states themselves.
    """
    fitting, validation = fitting.typical, validation.typical

    def error(aligner: Aligner) -> float:
        return answers_missed(validation.new, aligner(validation.old[None])[0])

    tried = [bank.aligner for bank in _banks(name, fitting.moments.swap())]
    return min(tried, key=error)


def rows_needed(name: str, width: int) -> int:
    """Return the fewest fitting rows of a map: enough to determine it, or a few if it shrinks."""
    if name == "linear":
        return width + 2
    if name == STALE:
        return 1
    return 10


def answers_missed(truth: Tensor, answers: Tensor) -> float:
    """Return ‖answers − truth‖² / ‖truth − mean‖², for answers (N, C)."""
    spread = (truth - truth.mean(0)).double().square().sum().clamp(min=1e-30)
    return float((answers - truth).double().square().sum() / spread)


class _Bank(NamedTuple):
    """A map and, for a ridge, its strength and what that is relative to."""

    aligner: Aligner
    strength: float | None = None
    common: bool = False


def _banks(name: str, moments: Moments) -> list[_Bank]:
    """Yield maps of a name from X to Y, one for each strength."""
    d_x, d_y = moments.xy.shape[1:]
    if name in ("ridge", "ridge_identity"):
        return list(_ridges(moments, towards_identity=name == "ridge_identity"))
    kinds: dict[str, type[Aligner]] = {
        STALE: Identity,
        "shift": Ridge,
        "procrustes": Procrustes,
        "linear": Linear,
    }
    bank = kinds[name](1, d_x, d_y)
    if isinstance(bank, Ridge):
        bank.set_map(moments, torch.eye(d_x, dtype=torch.float64)[None])
    else:
        fit_map(name, bank, moments)
    return [_Bank(bank)]


def _ridges(moments: Moments, *, towards_identity: bool) -> Iterator[_Bank]:
    """Yield ridge regressions of every strength, relative to each feature's own variance and to the mean of all."""
    towards = None
    if towards_identity:
        towards = torch.eye(moments.xx.shape[-1]).to(moments.xx)
    for common in (True, False):
        weights = ridge_path(moments, STRENGTHS, towards, common)
        for strength, weight in zip(STRENGTHS, weights, strict=True):
            bank = Ridge(1, *moments.xy.shape[1:])
            bank.set_map(moments, weight)
            yield _Bank(bank, strength, common)
