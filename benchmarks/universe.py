"""A universe against pairwise fits of equal size, steps and rows: FVU and injection of every direction, CPU seconds.

    python -m benchmarks.universe --steps 300 --json universe.json

CPU seconds are those of the process (`time.process_time`): reading moments and taking steps, without validation. The
pairs are fitted together, each model read once a batch; `--apart` also times a run for each, one after the other.
Injection is that of `evaluate.py inject`, on all held-out texts: means over all directions with their intervals over
models, and how often the universe's figure lies within the pair's own interval over texts.
"""

import argparse
import json
import shutil
import tempfile
import time
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np

from aligners.callbacks.checkpoint import SaveAligners
from aligners.cli.table import quiet
from aligners.datamodules.module import TextModule
from aligners.datamodules.pairings import pair_states, pairs_states, universe_states
from aligners.files.atomic import whole_file
from aligners.fitting.alignment import Alignment
from aligners.fitting.saved_bank import load_bank
from aligners.fitting.universe.universe import NETWORK, load_universe
from aligners.fitting.universe.universe_alignment import UniverseAlignment
from aligners.fitting.universe.universe_evaluation import UniverseEvaluation
from aligners.injection.injecting import InjectionEvaluation
from aligners.injection.scoring.pair_intervals import over_pairs
from aligners.maps.inn import INN
from benchmarks.parts import bare_trainer

FIGURES = ("accuracy", "penalty")  # of injection


def main() -> None:
    """Fit both, measure both on the same held-out rows, print, and write a JSON file if asked to."""
    options = _options()
    quiet()
    pl.seed_everything(options.seed)
    given: dict[str, Any] = {"sites": options.sites, "batch_size": options.batch_size}
    with tempfile.TemporaryDirectory() as kept:
        folder = Path(kept)
        if options.store:
            given["store"] = folder / "store"
        seconds = _fitted(options, folder, given)
        found = {
            **vars(options),
            "json": None,
            "cpu_seconds": seconds,
            "ratios": _ratios(seconds),
        }
        evaluation = UniverseEvaluation(
            load_universe(folder / "universe" / "universe.safetensors"),
            [load_bank(folder / file) for file in _files(folder)],
        )
        trainer = bare_trainer(
            use_distributed_sampler=False, limit_test_batches=options.held_out
        )
        trainer.test(
            evaluation,
            datamodule=universe_states(options.models, **given),
            verbose=False,
        )
        found["means"] = _means(evaluation.rows)
        _write(
            {**found, "directions": evaluation.report_tables["directions"]},
            options.json,
        )
        injected = [
            row
            for file in _files(folder)[: options.injected]
            for row in _injected(file, folder, given)
        ]
    if injected:
        found["injection"] = _compared(injected)
    print(json.dumps(found, indent=1, default=str))
    _write(
        {**found, "directions": evaluation.report_tables["directions"]}, options.json
    )


def _fitted(
    options: argparse.Namespace, folder: Path, given: dict[str, Any]
) -> dict[str, float]:
    """CPU seconds of each way of fitting, of which all but `apart` leave their maps in the folder."""
    models = options.models
    if options.store:
        for split in ("fit", "validation"):
            universe_states(models, **given).loader(split)  # writes their states
    alignment = partial(Alignment, {"inn": INN}, seed=options.seed)
    found = {
        "pairs": _seconds(
            alignment(), pairs_states(models, **given), SaveAligners(folder), options
        )
    }
    network: dict[str, Any] = (
        {"network": partial(INN, couplings=options.couplings, start="procrustes")}
        if options.couplings
        else {}
    )
    universe = UniverseAlignment(seed=options.seed, **network)
    found["universe"] = _seconds(
        universe,
        universe_states(models, **given),
        SaveAligners(folder / "universe"),
        options,
    )
    if options.apart:
        found["apart"] = sum(
            _seconds(
                alignment(),
                pair_states(x, y, **given),
                SaveAligners(folder / x / y),
                options,
            )
            for x, y in combinations(models, 2)
        )
    return found


def _ratios(seconds: dict[str, float]) -> dict[str, float]:
    return {
        name: seconds["universe"] / seconds[name]
        for name in seconds
        if name != "universe"
    }


def _write(found: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        with whole_file(path) as unfinished:
            unfinished.write_text(json.dumps(found, indent=1, default=str))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", default=[f"embedded:{seed}" for seed in range(5)]
    )
    parser.add_argument("--sites", default="1,4")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch_size", type=int, default=16, help="Texts a step.")
    parser.add_argument(
        "--moments",
        type=int,
        default=100,
        help="Batches a pass: of moments, and of an epoch.",
    )
    parser.add_argument(
        "--held_out", type=int, default=20, help="Batches to measure on."
    )
    parser.add_argument(
        "--injected",
        type=int,
        default=None,
        help="Pairs to inject between. Default: all.",
    )
    parser.add_argument(
        "--store",
        action="store_true",
        help="Read states from a store, written before both fits.",
    )
    parser.add_argument(
        "--apart", action="store_true", help="Also time a run for every pair."
    )
    parser.add_argument(
        "--couplings",
        type=int,
        default=None,
        help="Of each model's INN. Default: the universe's, 4.",
    )
    parser.add_argument("--seed", type=int, default=0, help="Of the maps.")
    parser.add_argument("--json", type=Path, default=None)
    return parser.parse_args()


def _seconds(
    module: Alignment,
    data: TextModule,
    saving: SaveAligners,
    options: argparse.Namespace,
) -> float:
    """CPU seconds of a fit, which finds no moments of another's beside the store."""
    if data.store:
        shutil.rmtree(data.store / "moments", ignore_errors=True)
    limits = {
        "max_steps": options.steps,
        "limit_train_batches": options.moments,
        "limit_val_batches": 0,
    }
    trainer = bare_trainer(use_distributed_sampler=False, callbacks=[saving], **limits)
    data.prepare_data()
    before = time.process_time()
    trainer.fit(module, datamodule=data)
    return time.process_time() - before


def _files(folder: Path) -> list[Path]:
    return sorted(
        path.relative_to(folder) for path in folder.glob("pairs/*/aligners.safetensors")
    )


def _injected(file: Path, folder: Path, given: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of injection in both directions, of a pair's own maps and of the universe's."""
    banks = [load_bank(folder / file), load_bank(folder / "universe" / file)]
    names = {f"model_{side}": banks[0].data_config[f"model_{side}"] for side in "xy"}
    evaluation = InjectionEvaluation(banks, closed_form=(), both_directions=True)
    bare_trainer(use_distributed_sampler=False).test(
        evaluation,
        datamodule=pair_states(**names, **{**given, "batch_size": 128}),
        verbose=False,
    )
    return [row for row in evaluation.rows if row["role"] == "method"]


def _compared(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over all directions, and how many of the universe's figures lie within the intervals of the pair's."""
    figures = [name for name in FIGURES if all(row[name] is not None for row in rows)]
    pairs = {_place(row): row for row in rows if row["method"] == "inn"}
    own = [(row, pairs[_place(row)]) for row in rows if row["method"] == NETWORK]
    within = {
        name: sum(b[f"{name}_low"] <= a[name] <= b[f"{name}_high"] for a, b in own)
        for name in figures
    }
    return {
        "means": over_pairs(rows, quantities=figures),
        "within": within,
        "of": len(own),
    }


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("model_x", "model_y", "site_x"))


def _means(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Method -> site -> mean FVU over all directions; and the largest errors of cycles."""
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == name]
        for site in dict.fromkeys(row["site_x"] for row in own):
            at_site = [row for row in own if row["site_x"] == site]
            for column in ("fvu", "fvu_unseen"):
                values = [row[column] for row in at_site if row[column] is not None]
                found.setdefault(name, {})[f"{column} at site {site}"] = float(
                    np.mean(values)
                )
        worst = [row["cycle"] for row in own if row["cycle"] is not None]
        if worst:
            found[name]["largest cycle error"] = max(worst)
    return found


if __name__ == "__main__":
    main()
