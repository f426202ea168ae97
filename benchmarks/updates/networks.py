"""Heads carried through a network, the MLP, beside ridges, at the last block of two of the updates decided on.

    python -m benchmarks.updates.networks REAL UPDATES --json FILE

The network maps new states to old ones, as fitted by `aligners.api` with its defaults, on 1,000 pooled texts or 5,000.
INNs are fitted likewise with `--maps inn`, and take far longer.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # runs from a bare checkout

from aligners import api
from benchmarks.harness import machine, write_whole
from benchmarks.updates.carrying import Bench, brief
from benchmarks.updates.fits import Rows, ridge
from benchmarks.updates.heads import auroc, rows_of
from benchmarks.updates.texts import SETTINGS, divided

PLACE = 4  # the last block
MAPS: dict[str, Any] = {"mlp": api.MLP, "inn": api.INN}


def main() -> None:
    """Carry every head on texts at the last block."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("real", type=Path)
    parser.add_argument("updates", type=Path)
    parser.add_argument(
        "--only",
        nargs="+",
        default=["full_sst2_0", "full_genre_0"],
        help="names of updates",
    )
    parser.add_argument("--maps", nargs="+", default=["mlp"], choices=list(MAPS))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000, help="of a network")
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = divided(options.real / "data", options.updates / "texts.json")
    bench, cells = Bench(options.real, options.updates, texts), []
    heads = [
        head
        for head, about in SETTINGS["heads"].items()
        if about["rows"] == "mean" and head != "nothing"
    ]
    weights = np.stack([bench.heads[head, PLACE][0] for head in heads])
    for update in options.only:
        new = bench.states(options.updates / update)
        fitting = {
            n: [model["unlabelled"][PLACE, :n].float() for model in (new, bench.old)]
            for n in (1000, 5000)
        }
        for n, (y, x) in fitting.items():
            answers = x.double().numpy() @ weights.T
            carried = ridge(Rows(y.double().numpy()), answers, weights).weights
            networks = {
                name: kind(steps=options.steps).fit(y, x)
                for name, kind in MAPS.items()
                if name in options.maps
            }
            for i, head in enumerate(heads):
                tested, labels = (
                    rows_of(new, bench.tested[head], PLACE),
                    bench.tested[head].labels,
                )
                cell: dict[str, Any] = {"update": update, "head": head, "texts": n}
                cell["native"] = auroc(
                    rows_of(bench.old, bench.tested[head], PLACE) @ weights[i], labels
                )
                cell["stale"] = auroc(tested @ weights[i], labels)
                cell["ridge to identity"] = auroc(tested @ carried[i], labels)
                for name, network in networks.items():
                    mapped = (
                        network.transform(torch.from_numpy(tested).float())
                        .double()
                        .numpy()
                    )
                    cell[name] = auroc(mapped @ weights[i], labels)
                print(json.dumps(brief(cell)), flush=True)
                cells.append(brief(cell))
    write_whole(
        options.json,
        {"machine": machine("cpu"), "steps": options.steps, "cells": cells},
    )


if __name__ == "__main__":
    main()
