"""The plan of a study against what its cells take, kind by kind, in processor time of one thread and by the clock.

The rates of the plan are measured as `study.py` does; in processor time they are scaled to it, so that whatever else
the machine does counts for neither side. Cells run in this process, one after the other.
"""

import json
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a bare checkout

from aligners.cli.cells.cell_options import CellOptions, model_sizes
from aligners.cli.cells.costs import Costs, choose_banks, plan_study
from aligners.cli.cells.running import run_cell
from aligners.studies.cells import expand
from aligners.studies.spec import read_study
from aligners.studies.study_folder import StudyFolder
from aligners.studies.study_plan import measured_rates
from benchmarks.harness import Figures, parser

STUDIES = Path(__file__).resolve().parents[1] / "aligners" / "configs" / "study"


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.set_defaults(threads=1, device="cpu")
    arguments.add_argument("study", help="name of a study, or the path of a study file")
    arguments.add_argument(
        "--models", nargs="*", help="models in place of the study's: folders, or names on the Hub"
    )
    arguments.add_argument(
        "--changes",
        type=json.loads,
        default={},
        help="keys that replace those of the study file, as JSON",
    )
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    named = STUDIES / f"{options.study}.yaml"
    spec = yaml.safe_load(
        (named if named.is_file() else Path(options.study)).read_text(encoding="utf-8")
    )
    models = {"models": {"names": options.models}} if options.models else {}
    study, commands = read_study(spec | models | options.changes), CellOptions()
    sizes = model_sizes(study, assume=False)
    study, _ = choose_banks(study, commands, sizes)
    cells, costs = expand(study, commands), Costs(study, commands, sizes)
    wall, used = time.perf_counter(), time.process_time()
    measured_rates(max(size.width for size in sizes.values()), study.assume.tokens, 1, "cpu")
    busy = (time.perf_counter() - wall) / (time.process_time() - used)
    by_clock = plan_study(costs, cells, None, 1)
    plan = replace(by_clock, rate=by_clock.rate * busy, solving=by_clock.solving * busy)
    figures = Figures("cpu")
    figures.add("FLOP a second", plan.rate)
    figures.add("FLOP a second in decompositions", plan.solving)
    planned, taken = (defaultdict[str, list[float]](lambda: [0.0, 0.0]) for _ in range(2))
    with tempfile.TemporaryDirectory() as path:
        folder = StudyFolder(Path(path) / study.name)
        folder.begin(study, cells, changed=False)
        for cell, cost in plan.costs:
            began = time.process_time(), time.perf_counter()
            state = run_cell(str(folder.path), cell.id)
            if state != "done":
                raise SystemExit((folder.cell(cell.id) / "error.txt").read_text(encoding="utf-8"))
            ended = time.process_time(), time.perf_counter()
            for name in (cell.kind, "all"):
                for k, how in enumerate((plan, by_clock)):
                    taken[name][k] += ended[k] - began[k]
                    planned[name][k] += how.alone(cost)
            print(
                f"{cell.said()}: {ended[0] - began[0]:.1f} s of {plan.alone(cost):.1f} s planned",
                flush=True,
            )
    for name, (seconds, clock) in taken.items():
        expected, expected_clock = planned[name]
        figures.add(f"{name}: taken, seconds", seconds)
        figures.add(f"{name}: taken, seconds by the clock", clock)
        figures.add(f"{name}: planned / taken", expected / seconds, bar=2)
        figures.add(f"{name}: planned / taken by the clock", expected_clock / clock)
        if name == "all":
            figures.add("all: taken / planned", seconds / expected, bar=2)
    figures.write(options.json)


if __name__ == "__main__":
    main()
