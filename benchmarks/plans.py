"""The plan of a study against what its cells take, kind by kind, in processor time of one thread.

The rates of the plan are measured as `study.py` does, and scaled to processor time as well, so that whatever else the
machine does counts for neither side. Cells run in this process, one after the other.
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

from aligners.cli.cells.checks import model_sizes
from aligners.cli.cells.costs import Costs, choose_banks, plan_study
from aligners.cli.cells.options import CellOptions
from aligners.cli.cells.running import run_cell
from aligners.studies.cells import expand
from aligners.studies.folder import StudyFolder
from aligners.studies.plan import measured_rates
from aligners.studies.spec import read_study
from benchmarks.harness import Figures, parser

STUDIES = Path(__file__).resolve().parents[1] / "aligners" / "configs" / "study"


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.set_defaults(threads=1, device="cpu")
    arguments.add_argument("study", help="name of a study")
    arguments.add_argument(
        "--changes", type=json.loads, default={}, help="keys that replace those of the study file, as JSON"
    )
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    spec = yaml.safe_load((STUDIES / f"{options.study}.yaml").read_text(encoding="utf-8"))
    study, commands = read_study(spec | options.changes), CellOptions()
    sizes = model_sizes(study, assume=False)
    study, _ = choose_banks(study, commands, sizes)
    cells, costs = expand(study, commands), Costs(study, commands, sizes)
    wall, used = time.perf_counter(), time.process_time()
    measured_rates(max(size.width for size in sizes.values()), study.assume.tokens, 1, "cpu")
    busy = (time.perf_counter() - wall) / (time.process_time() - used)
    plan = plan_study(costs, cells, None, 1)
    plan = replace(plan, rate=plan.rate * busy, solving=plan.solving * busy)
    figures = Figures("cpu")
    figures.add("FLOP a second", plan.rate)
    figures.add("FLOP a second in decompositions", plan.solving)
    planned, taken = defaultdict[str, float](float), defaultdict[str, float](float)
    with tempfile.TemporaryDirectory() as path:
        folder = StudyFolder(Path(path) / study.name)
        folder.begin(study, cells, changed=False)
        for cell, cost in plan.costs:
            used = time.process_time()
            state = run_cell(str(folder.path), cell.id)
            if state != "done":
                raise SystemExit((folder.cell(cell.id) / "error.txt").read_text(encoding="utf-8"))
            for name in (cell.kind, "all"):
                taken[name] += time.process_time() - used
                planned[name] += plan.alone(cost)
    for name, seconds in taken.items():
        figures.add(f"{name}: taken, seconds", seconds)
        figures.add(f"{name}: planned / taken", planned[name] / seconds, bar=2 if name == "all" else None)
        if name == "all":
            figures.add("all: taken / planned", seconds / planned[name], bar=2)
    figures.write(options.json)


if __name__ == "__main__":
    main()
