"""The rows of a report on a dictionary of two models: of latents, and of sites."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from aligners.datamodules.rows.read_rows import Place
from aligners.errors import finite
from aligners.similarity.latents.dictionary import MODELS, Pair
from aligners.similarity.latents.examination import Examination
from aligners.similarity.latents.ratios import Ratios
from aligners.similarity.latents.verdicts import SHARED, VERDICTS, Verdicts

Row = dict[str, Any]
# Relative norm from which a latent counts as Y's alone; as far from 0, as X's.
FAR_NORM = 0.9
KINDS = ("nu_error", "nu_rebuilt")  # columns of the ratios


def head_of(place: Place) -> Row:
    """The columns that say where a row is measured."""
    return {
        "model_x": place.model_x,
        "model_y": place.model_y,
        "site_x": place.site_x,
        "site_y": place.site_y,
    }


def latent_rows(
    places: Sequence[Place],
    found: Examination,
    judged: Verdicts,
    ratios: Ratios,
    carried: Pair,
    n: Tensor,
    recurs: Tensor | None = None,
) -> list[Row]:
    """Make one row for each latent that fired.

    Args:
        places: of the sites.
        found: what both models have of each latent.
        judged: the verdicts.
        ratios: ν with their intervals.
        carried: (S, m) each, the share of X's and of Y's variance that the latent adds to what is rebuilt.
        n: () number of rows that were measured.
        recurs: (S, m) number of dictionaries of other seeds that have it, if there are any.
    """
    fired = found.parts.fired
    columns = {
        "norm": found.norm,
        "p_own": judged.p_own,
        "p_shared": judged.p_shared,
        "rank_own": judged.rank_own,
        "fired": fired.sum(0) / n,
    }
    for model, share in zip(MODELS, carried, strict=True):
        columns[f"variance_{model}"] = share
    for kind, name in enumerate(KINDS):
        columns[name] = ratios.ratio[kind]
        columns[f"{name}_low"] = ratios.low[kind]
        columns[f"{name}_high"] = ratios.high[kind]
    numbers = {name: values.tolist() for name, values in columns.items()}
    units = (fired > 0).sum(0).tolist()
    verdict = judged.verdict.tolist()
    rows = []
    for site, place in enumerate(places):
        for latent in fired[:, site].sum(0).nonzero()[:, 0].tolist():
            row = {
                **head_of(place),
                "latent": latent,
                "verdict": VERDICTS[verdict[site][latent]],
            }
            for name, values in numbers.items():
                row[name] = finite(values[site][latent])
            row["units"] = units[site][latent]
            row["seeds"] = None if recurs is None else int(recurs[site, latent])
            rows.append(row)
    return rows


def site_rows(
    places: Sequence[Place], found: Examination, judged: Verdicts, fvu: Pair, texts: int
) -> list[Row]:
    """Make one row for each site.

    Args:
        places: of the sites.
        found: what both models have of each latent.
        judged: the verdicts.
        fvu: (S,) each, what the dictionary leaves of X's and of Y's variance.
        texts: number of texts that were measured.
    """
    far = (found.norm - 0.5).abs() > FAR_NORM - 0.5
    alive = found.parts.fired.sum(0) > 0
    own = judged.verdict < SHARED
    rows = []
    for site, place in enumerate(places):
        row = {**head_of(place), "n_texts": texts, "latents": found.norm.shape[1]}
        row["live"] = int(alive[site].sum())
        for number, name in enumerate(VERDICTS):
            row[name] = int((judged.verdict[site] == number).sum())
        by_norm = far[site] & alive[site]
        row["own_by_norm"] = int(by_norm.sum())
        row["own_by_norm_alone"] = int((by_norm & ~own[site]).sum())
        for model, left in zip(MODELS, fvu, strict=True):
            row[f"fvu_{model}"] = finite(left[site])
        rows.append(row)
    return rows
