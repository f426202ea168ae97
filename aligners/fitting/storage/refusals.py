"""Refuses a checkpoint of other models or states than those of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

__all__ = ["refuse_other_component", "refuse_other_models"]

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
        raise ValueError(
            f"{what} was fitted on other models: {'; '.join(differing)}. Name the same models in the same order. "
            "`evaluate.py share` with `--models` makes a copy of a finished run's maps that is for others."
        )


def _listed(models: Identities) -> Sequence[Mapping[str, Any]]:
    return list(models.values()) if isinstance(models, Mapping) else models


def refuse_other_component(data: Mapping[str, Any], present: str, what: str) -> None:
    """Compare what a state is.

    Args:
        data: what a checkpoint says of its data.
        present: `data.component` of the run.
        what: the checkpoint, for the message.

    Raises:
        ValueError: it was fitted on another component.
    """
    then = data.get("component", "residual")  # earlier checkpoints know no other
    if then != present:
        raise ValueError(
            f"{what} was fitted on `component` {then!r}, but `data.component` is {present!r}. Leave it out, or set it "
            f"to {then!r}."
        )
