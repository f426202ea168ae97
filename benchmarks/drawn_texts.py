"""What texts save that are drawn once: 1,600 pairs a split of a table of MNLI's size, drawn and taken as kept."""

import os
import random
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from benchmarks.harness import Figures, parser

ROWS = {"train": 392_702, "validation": 9_815}


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
            words = [
                " ".join(str(drawn.randrange(20_000)) for _ in range(30))
                for _ in range(rows)
            ]
            columns = {
                "premise": [w[:110] for w in words],
                "hypothesis": [w[110:] for w in words],
            }
            Dataset.from_dict(
                {**columns, "label": [n % 3 for n in range(rows)]}
            ).to_parquet(f"{folder}/{split}.parquet")
        source = TextSource(
            folder,
            held_out="validation",
            text_columns=["premise", "hypothesis"],
            max_texts=1600,
        )
        for name, seed in (("opened and drawn", 1), ("drawn", 0), ("kept", 0)):
            begun = time.process_time()
            load_texts(replace(source, seed=seed))
            figures.add(f"texts, {name}: CPU s", time.process_time() - begun)


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.set_defaults(rounds=1, device="cpu")
    options = arguments.parse_args()
    figures = Figures(options.device)
    texts(figures)
    figures.write(options.json)


if __name__ == "__main__":
    main()
