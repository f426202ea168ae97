"""Memory and time of `study.py collect` where a study has millions of similarities.

The study is that of Ren et al. with its comparisons alone, whose results are made up: 300 pairs of 25 models, 13 x 13
layers and 8 measures in every cell, in the format of `evaluate.py similarity`. "Peak" is the largest resident size of
the command, imports included.
"""

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import TextIO

import yaml

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.cli.cells.cell_options import CellOptions
from aligners.studies.expansion import expand
from aligners.studies.spec import read_study
from aligners.studies.study_folder import MORE, RESULT, StudyFolder
from benchmarks.harness import Figures, parser

ROOT = Path(__file__).resolve().parents[1]
LAYERS, PAIRS, MODELS = 13, 300, 25
MEASURES = ("cka", "unbiased_cka", "r2", "cca", "r2_cca", "svcca", "r2_svcca", "pwcca")
EMPTY = dict.fromkeys(
    ("low", "high", "held_out", "null", "null_high", "untrained", "ceiling", "chance")
)


def write_result(file: TextIO, models: list[str], draw: random.Random) -> int:
    """Write the result of a comparison, as a cell of a study leaves it; its rows."""
    meta = {"models": [{"name": name} for name in models], "rows": "mean"}
    file.write(
        json.dumps(
            {"kind": "similarity", "seconds": 1.0, "versions": {}, "meta": meta}
        )[:-1]
        + ',\n"rows": [\n'
    )
    count = 0
    for x, y in list(combinations_with_replacement(models, 2))[:PAIRS]:
        about = {"model_x": x, "model_y": y, "n_rows": 1600}
        for measure in MEASURES:
            begins = json.dumps(
                {
                    **about,
                    "measure": measure,
                    "direction": "both",
                    "label": measure,
                    "features": "raw",
                }
            )
            for a, b in product(range(LAYERS), repeat=2):
                row = json.dumps(
                    {"layer_x": a, "layer_y": b, "value": draw.random(), **EMPTY}
                )
                file.write(f"{MORE if count else ''}{begins[:-1]}, {row[1:]}")
                count += 1
    file.write("\n]\n}\n")
    return count


def make_study(folder: Path, cells: int) -> int:
    """Begin a study whose first comparisons are done; the rows that they have found."""
    spec = yaml.safe_load(
        (ROOT / "papers" / "ren2023" / "study.yaml").read_text(encoding="utf-8")
    )
    study = replace(
        read_study(spec),
        data={"rows": "mean"},
        fit=None,
        inject=None,
        attention=None,
        recover=None,
    )
    study_folder, draw, rows = StudyFolder(folder), random.Random(0), 0
    planned = expand(study, CellOptions())
    study_folder.begin(study, planned, changed=False)
    for cell in [cell for cell in planned if cell.kind == "similarity"][:cells]:
        models = [model["path"] for model in study_folder.described(cell.id)["models"]]
        with (study_folder.cell(cell.id) / RESULT).open("w", encoding="utf-8") as file:
            rows += write_result(file, models, draw)
    return rows


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument(
        "--cells", type=int, default=20, help="comparisons, of 405,600 rows each"
    )
    options = arguments.parse_args()
    figures = Figures("cpu")
    with tempfile.TemporaryDirectory() as place:
        figures.add("rows", make_study(Path(place), options.cells))
        results = sum(
            file.stat().st_size for file in Path(place).glob(f"cells/*/{RESULT}")
        )
        figures.add("results, GB", results / 1e9)
        script, began = (
            Path(__file__).resolve().parents[1] / "study.py",
            time.perf_counter(),
        )
        subprocess.run(
            [sys.executable, str(script), "collect", place],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        figures.add("collect: seconds", time.perf_counter() - began)
        figures.add("collect: seconds of processors", used.ru_utime + used.ru_stime)
        figures.add("collect: peak, GB", used.ru_maxrss * 1024 / 1e9, bar=2)
    figures.write(options.json)


if __name__ == "__main__":
    main()
