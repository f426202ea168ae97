"""Heads on a model's states: which rows and labels each learns from, and how it is fitted."""

import warnings
from typing import NamedTuple

import numpy as np
from scipy.stats import rankdata
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from benchmarks.updates.texts import SETTINGS, Text

__all__ = ["Labelled", "auroc", "fitted", "labelled", "rows_of"]

MOST = 2000  # labelled rows that a head learns from
STRENGTH = 0.01  # inverse of the penalty on a head's weights, of standardised states
DEAD = 1e-3  # of the median deviation
KINDS = {
    "sst2": ["sst2"],
    "ewt": ["ewt"],
    "both": ["sst2", "ewt"],
    "planted": ["planted"],
}


class Labelled(NamedTuple):
    """Where a head's rows are, (part, how many), and their labels."""

    parts: list[tuple[str, int]]
    labels: np.ndarray


def labelled(texts: dict[str, list[Text]], head: str, purpose: str) -> Labelled:
    """The rows that a head learns from or is tested on (`purpose` labelled or test)."""
    about = SETTINGS["heads"][head]
    kinds = KINDS[about["texts"]]
    found, labels = [], []
    for kind in kinds:
        part, suffix = f"{purpose}_{kind}", ".words" if about["rows"] == "words" else ""
        if suffix:
            values = [value for text in texts[part] for value in text["tense"].values()]
        else:
            values = [text["labels"][head] for text in texts[part]]
        values = values[: MOST // len(kinds)]
        found.append((part + suffix, len(values)))
        labels += values
    return Labelled(found, np.array(labels))


def rows_of(states: dict[str, Tensor], place: Labelled, site: int) -> np.ndarray:
    """(N, d) float64 rows of a model at the site of this index."""
    return np.concatenate(
        [states[part][site, :count].double().numpy() for part, count in place.parts]
    )


def fitted(rows: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, float]:
    """Weight (d,) and bias of a logistic regression on standardised rows, folded into the rows' own units.

    A feature that does not vary but for rounding, as three of MiniLM's last block do not, gets no weight. Standardised,
    it would get one in the tens of millions, and any update that lets it vary would ruin the head. scikit-learn's
    StandardScaler leaves one of the three in, whose deviation is 2e-9.
    """
    mean, deviation = rows.mean(0), rows.std(0)
    deviation[deviation < DEAD * np.median(deviation)] = np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = LogisticRegression(C=STRENGTH, max_iter=300).fit(
            (rows - mean) / deviation, labels
        )
    weight = model.coef_[0] / deviation
    return weight, float(model.intercept_[0] - weight @ mean)


def auroc(scores: np.ndarray, labels: np.ndarray) -> float:
    """Area under the ROC curve."""
    positive = labels > 0
    n, m = int(positive.sum()), int((~positive).sum())
    return float((rankdata(scores)[positive].sum() - n * (n + 1) / 2) / (n * m))
