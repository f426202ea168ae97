"""Refuses the maps of other models, states or sites than those of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from aligners.errors import UserError
from aligners.fitting.storage.bank import StoredBank

Identities = Mapping[str, Mapping[str, Any]] | Sequence[Mapping[str, Any]]  # of models: name, fingerprint, ...


def refuse_other_models(stored: Identities, present: Identities, what: str) -> None:
    """Compare models by their fingerprints: a name may differ, as of a folder that has moved.

    Args:
        stored: identities in a checkpoint, X and Y by name or all in the order of the run.
        present: identities of the run's models, likewise.
        what: the checkpoint, for the message.

    Raises:
        ValueError: they are not the same models in the same order; says which differ.
    """
    missing = {"name": "nothing", "fingerprint": "none"}
    sided = isinstance(present, Mapping)
    differing = [
        f"{'XY'[place] if sided and place < 2 else f'model {place}'} was {a['name']} (fingerprint "
        f"{a['fingerprint'][:12]}) and is {b['name']} (fingerprint {b['fingerprint'][:12]})"
        for place, (a, b) in enumerate(zip_longest(_listed(stored), _listed(present), fillvalue=missing))
        if a["fingerprint"] != b["fingerprint"]
    ]
    if differing:
        raise UserError(
            f"{what} was fitted on other models: {'; '.join(differing)}. Name the same models in the same order. "
            "`evaluate.py share` with `--models` makes a copy of a finished run's maps that is for others."
        )


def _listed(models: Identities) -> Sequence[Mapping[str, Any]]:
    return list(models.values()) if isinstance(models, Mapping) else models


def refuse_other_bank(
    bank: StoredBank, models: Identities, component: str, pairs: Mapping[str, Sequence[tuple[int, int]]]
) -> None:
    """Compare the maps of a finished run with the run that is to use them.

    Args:
        bank: the maps.
        models: of the run, as in `refuse_other_models`.
        component: `data.component` of the run.
        pairs: route -> the run's site pairs.

    Raises:
        ValueError: the models, the component, or the site pairs of a route differ.
    """
    refuse_other_models(bank.data["models"], models, str(bank.path))
    then = bank.data.get("component", "residual")
    if then != component:
        raise UserError(
            f"{bank.path} was fitted on `component` {then!r}, but `data.component` is {component!r}. Leave it out, or "
            f"set it to {then!r}."
        )
    for route, present in pairs.items():
        fitted = bank.pairs.get(route, [])
        if fitted != list(present):
            raise UserError(
                f"{bank.path} holds maps of the site pairs {fitted}, but `data.sites` gives {list(present)}. Leave "
                "`data.sites` out, or set it to those of the fit."
            )
