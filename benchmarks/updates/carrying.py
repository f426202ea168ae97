"""Heads left as they are, carried and trained anew after updates: every update, head, site, map and number of texts.

    python -m benchmarks.updates.carrying REAL UPDATES --json FILE [--set_aside]

REAL is what benchmarks/real/models.py made, UPDATES what benchmarks/updates/models.py made. Without --set_aside it
looks only at the updates on which everything was decided. States are read once and kept in UPDATES/states.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # runs from a bare checkout

from benchmarks.harness import machine
from benchmarks.updates.fits import Rows, least_squares, procrustes, ranked, ridge
from benchmarks.updates.heads import auroc, fitted, labelled, rows_of
from benchmarks.updates.reading import kept_states
from benchmarks.updates.texts import SETTINGS, Text, divided

TEXTS = (50, 100, 200, 500, 1000, 2000, 5000)
TOKEN_TEXTS = (50, 200, 1000)  # of which all tokens are rows
RANKS = (8, 32)
LABELS = (50, 200, 500, 1000)


class Bench:
    """Texts, heads on OLD, and what is measured of them on an update.

    Args:
        real: the folder of real models.
        updates: the folder of updates.
        texts: see `texts.divided`.
    """

    def __init__(self, real: Path, updates: Path, texts: dict[str, list[Text]]) -> None:
        self.updates, self.texts = updates, texts
        self.old = self.states(real / "models" / "minilm")
        self.learned = {
            head: labelled(texts, head, "labelled") for head in SETTINGS["heads"]
        }
        self.tested = {
            head: labelled(texts, head, "test") for head in SETTINGS["heads"]
        }
        self.heads = {
            (head, site): fitted(rows_of(self.old, place, site), place.labels)
            for head, place in self.learned.items()
            for site in range(len(SETTINGS["sites"]))
        }
        sst2 = np.array(["sentiment" in text["labels"] for text in texts["unlabelled"]])
        ewt = np.array(["topic" in text["labels"] for text in texts["unlabelled"]])
        self.own = {"sst2": sst2.nonzero()[0], "ewt": ewt.nonzero()[0]}
        ends = self.old["unlabelled.counts"].cumsum(0)
        self.tokens = {n: int(ends[n - 1]) for n in TOKEN_TEXTS}

    def states(self, model: Path) -> dict[str, Tensor]:
        """States of a model, read or remembered."""
        return kept_states(
            model, self.texts, self.updates / "states" / f"{model.name}.safetensors"
        )

    def cells(self, update: str) -> list[dict[str, Any]]:
        """One entry for each head and site of an update."""
        new, found = self.states(self.updates / update), []
        for site in range(len(SETTINGS["sites"])):
            carried = {
                rows: self.carried(new, site, rows) for rows in ("mean", "words")
            }
            for head, about in SETTINGS["heads"].items():
                found.append(
                    self.cell(new, site, head, carried[about["rows"]])
                    | {"update": update}
                )
        return found

    def carried(
        self, new: dict[str, Tensor], site: int, rows: str
    ) -> dict[str, dict[str, tuple[np.ndarray, Any]]]:
        """Way -> head -> (weights on NEW, agreement or None), for the heads on rows of this kind."""
        names = [
            head for head, about in SETTINGS["heads"].items() if about["rows"] == rows
        ]
        weights = np.stack([self.heads[head, site][0] for head in names])
        ways: dict[str, dict[str, tuple[np.ndarray, Any]]] = {}

        def keep(way: str, carried: np.ndarray, agreement: Any = None) -> None:
            ways[way] = {
                head: (carried[i], None if agreement is None else float(agreement[i]))
                for i, head in enumerate(names)
            }

        on_tokens: dict[int, np.ndarray] = {}
        for n, count in self.tokens.items():
            x, y = (
                model["unlabelled.tokens"][site, :count].double().numpy()
                for model in (self.old, new)
            )
            decomposed, answers = Rows(y), x @ weights.T
            keep(f"least squares, tokens, {n}", least_squares_of(decomposed, answers))
            keep(f"procrustes, tokens, {n}", procrustes(y, x, weights))
            found = ridge(decomposed, answers, weights)
            keep(f"ridge to identity, tokens, {n}", *found)
            on_tokens[n] = found.weights
            found = ridge(decomposed, answers, 0 * weights)
            keep(f"ridge to 0, tokens, {n}", *found)
        if rows == "words":
            return ways
        for n in (n for n in TEXTS if n <= new["unlabelled"].shape[1]):
            x, y = (
                model["unlabelled"][site, :n].double().numpy()
                for model in (self.old, new)
            )
            decomposed, answers = Rows(y), x @ weights.T
            rotated = procrustes(y, x, weights)
            keep(f"procrustes, {n}", rotated)
            if n > y.shape[1]:
                keep(f"least squares, {n}", least_squares(y, answers))
            towards = {"0": 0 * weights, "identity": weights, "rotation": rotated}
            if n in on_tokens:
                towards["map on tokens"] = on_tokens[n]
            for name, base in towards.items():
                keep(f"ridge to {name}, {n}", *ridge(decomposed, answers, base))
            if n == 1000:
                for rank in RANKS:
                    keep(f"rank {rank}, {n}", ranked(decomposed, y, x, weights, rank))
                order = np.random.default_rng(0).permutation(n)
                keep(f"shuffled, {n}", *ridge(decomposed, answers[order], 0 * weights))
                for kind, places in self.own.items():
                    places = places[places < new["unlabelled"].shape[1]]
                    x, y = (
                        model["unlabelled"][site][places[:n]].double().numpy()
                        for model in (self.old, new)
                    )
                    keep(
                        f"ridge to identity, {kind}, {n}",
                        *ridge(Rows(y), x @ weights.T, weights),
                    )
        return ways

    def cell(
        self, new: dict[str, Tensor], site: int, head: str, ways: dict[str, Any]
    ) -> dict[str, Any]:
        """What a head scores on OLD and on NEW: stale, carried in every way, trained anew."""
        learned, tested = self.learned[head], self.tested[head]
        old_rows, new_rows = (rows_of(model, tested, site) for model in (self.old, new))
        weight, _ = self.heads[head, site]
        rows, labels = rows_of(new, learned, site), learned.labels
        order = np.random.default_rng(0).permutation(len(labels))
        random = np.random.default_rng(1).standard_normal(len(weight))
        unlabelled = (
            "unlabelled"
            if SETTINGS["heads"][head]["rows"] == "mean"
            else "unlabelled.tokens"
        )
        x, y = (
            model[unlabelled][site, :1000].double().numpy() @ weight
            for model in (self.old, new)
        )
        anew = {str(n): order[:n] for n in LABELS} | {"all": order}
        return {
            "site": SETTINGS["sites"][site],
            "head": head,
            "native": auroc(old_rows @ weight, tested.labels),
            "stale": auroc(new_rows @ weight, tested.labels),
            "stale agreement": float(np.corrcoef(x, y)[0, 1]),
            "anew": {
                n: auroc(new_rows @ fitted(rows[at], labels[at])[0], tested.labels)
                for n, at in anew.items()
            },
            "random": auroc(new_rows @ random, tested.labels),
            "carried": {
                way: auroc(new_rows @ found[head][0], tested.labels)
                for way, found in ways.items()
            },
            "agreement": {
                way: found[head][1]
                for way, found in ways.items()
                if found[head][1] is not None
            },
        }


def least_squares_of(rows: Rows, answers: np.ndarray) -> np.ndarray:
    """Least squares from rows that are decomposed already, (H, d)."""
    return (rows.v @ ((rows.u.T @ (answers - answers.mean(0))) / rows.s[:, None])).T


def brief(value: Any) -> Any:
    """The same with four digits."""
    if isinstance(value, dict):
        return {name: brief(part) for name, part in value.items()}
    return round(value, 4) if isinstance(value, float) else value


def main() -> None:
    """Measure every cell and write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("real", type=Path)
    parser.add_argument("updates", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument(
        "--set_aside", action="store_true", help="the other half of the updates"
    )
    parser.add_argument("--only", nargs="+", help="names of updates")
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = divided(options.real / "data", options.updates / "texts.json")
    bench, cells = Bench(options.real, options.updates, texts), []
    chosen = [
        name
        for name, about in SETTINGS["updates"].items()
        if options.set_aside == ("set_aside" in about)
    ]
    for name in options.only or chosen:
        print(name, flush=True)
        cells += bench.cells(name)
    lines = ",\n".join(json.dumps(brief(cell)) for cell in cells)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(
        f'{{"machine": {json.dumps(machine("cpu"))},\n"cells": [\n{lines}\n]}}\n'
    )


if __name__ == "__main__":
    main()
