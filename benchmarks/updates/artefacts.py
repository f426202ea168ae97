"""Writes the heads on the old model as artefacts, 8 at each of 5 sites, for `train.py carry` and the study `updates`.

    python -m benchmarks.updates.artefacts REAL UPDATES

REAL is what benchmarks/real/models.py made; UPDATES/artefacts is made, and UPDATES/states as by carrying.py.
"""

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # runs from a bare checkout

from aligners.probing.artefacts.artefact_files import write_artefact
from aligners.probing.artefacts.kinds import Head
from benchmarks.updates.carrying import Bench
from benchmarks.updates.heads import auroc, rows_of
from benchmarks.updates.texts import SETTINGS, divided

CLASSES = {
    "sentiment": ["0", "1"],  # as the labels of SST-2
    "length": ["short", "long"],
    "topic": ["mail and news", "reviews and answers"],
    "question": ["other", "question"],
    "tense": ["present", "past"],
    "marker": ["without", "with"],
    "order": ["second first", "first first"],
    "nothing": ["one", "other"],
}


def main() -> None:
    """Write what is missing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("real", type=Path)
    parser.add_argument("updates", type=Path)
    options = parser.parse_args()
    texts = divided(options.real / "data", options.updates / "texts.json")
    bench = Bench(options.real, options.updates, texts)
    for (name, place), (weight, bias) in bench.heads.items():
        site, tested = SETTINGS["sites"][place], bench.tested[name]
        score = auroc(rows_of(bench.old, tested, place) @ weight, tested.labels)
        head = Head.of(
            torch.tensor(weight).float(),
            torch.tensor([bias]).float(),
            name=f"{name}_{site}",
            model="models/minilm",
            site=site,
            component="residual",
            rows=SETTINGS["heads"][name]["rows"],
            classes=CLASSES[name],
            score={
                "metric": "auroc",
                "value": round(score, 4),
                "n": len(tested.labels),
            },
        )
        folder = options.updates / "artefacts" / f"{name}_{site}"
        if not folder.is_dir():
            write_artefact(head, folder)


if __name__ == "__main__":
    main()
