"""What several cells in a job save, and texts that are drawn once: processor time of all processes, in turns.

`jobs`: fits and injections of the embedded study's first models, by submitit on this machine, each cell a job of its
own and all cells in one. `texts`: a table of MNLI's size, of which 1,600 pairs a split are drawn, and taken as kept.
"""

import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from a bare checkout

from benchmarks.harness import Figures, interleaved, parser

ROOT = Path(__file__).resolve().parents[1]
FIT = '{"trainer": {"max_epochs": 1, "limit_train_batches": 20}, "model": {"aligners": {"linear": "Linear"}}}'
STUDY = ["--fit.options", FIT, "--similarity", "null", "--stages", "[pretrained]", "--rate", "1e10"]
TEXT = '{"t": {"text": {"source": "rotten_tomatoes", "max_held_out": 100}}}'
LOCAL = ["--executor", "slurm", "--executor_options", '{"cluster": "local", "timeout_min": 30}']
ROWS = {"train": 392_702, "validation": 9_815}


def of_children() -> float:
    """Processor time of all processes that this one has started, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def jobs(figures: Figures, rounds: int, models: int) -> None:
    """Compare the study in one job and in as many as there are cells."""

    def run(minutes: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            words = [
                "run",
                "embedded",
                "--models.seeds",
                str(models),
                "--tasks",
                TEXT,
                *STUDY,
                *LOCAL,
                "--folder",
                folder,
            ]
            command = [
                sys.executable,
                str(ROOT / "study.py"),
                *words,
                "--minutes_a_job",
                str(minutes),
            ]
            subprocess.run(
                command,
                env=os.environ | {"WANDB_MODE": "disabled"},
                check=True,
                capture_output=True,
            )

    alternatives = {"a cell a job": lambda: run(0), "all cells in a job": lambda: run(600)}
    seconds = interleaved(alternatives, rounds=rounds, device="cpu", warmup=0, clock=of_children)
    cells, (alone, together) = models * (models - 1), (min(times) for times in seconds.values())
    for name, least in zip(alternatives, (alone, together), strict=True):
        figures.add(f"{cells} cells, {name}: CPU s", least)
    figures.add("saved for each job less: CPU s", (alone - together) / (cells - 1))


def texts(figures: Figures) -> None:
    """Draw texts from a table of MNLI's size, and take them as they were kept."""
    from aligners.datamodules.text.loading import load_texts
    from aligners.datamodules.text.sources import TextSource

    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "ALIGNERS_CACHE": f"{folder}/cache",
            "HF_DATASETS_CACHE": f"{folder}/datasets",
        }
        from datasets import Dataset

        drawn = random.Random(0)
        for split, rows in ROWS.items():
            words = [" ".join(str(drawn.randrange(20_000)) for _ in range(30)) for _ in range(rows)]
            columns = {"premise": [w[:110] for w in words], "hypothesis": [w[110:] for w in words]}
            Dataset.from_dict({**columns, "label": [n % 3 for n in range(rows)]}).to_parquet(
                f"{folder}/{split}.parquet"
            )
        source = TextSource(
            folder, held_out="validation", text_columns=["premise", "hypothesis"], max_texts=1600
        )
        for name, seed in (("opened and drawn", 1), ("drawn", 0), ("kept", 0)):
            begun = time.process_time()
            load_texts(replace(source, seed=seed))
            figures.add(f"texts, {name}: CPU s", time.process_time() - begun)


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.set_defaults(rounds=1, device="cpu")
    arguments.add_argument("what", nargs="*", default=["jobs", "texts"], choices=["jobs", "texts"])
    arguments.add_argument("--models", type=int, default=3)
    options = arguments.parse_args()
    figures = Figures(options.device)
    if "jobs" in options.what:
        jobs(figures, options.rounds, options.models)
    if "texts" in options.what:
        texts(figures)
    figures.write(options.json)


if __name__ == "__main__":
    main()
