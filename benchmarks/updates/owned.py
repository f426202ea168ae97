"""Heads, directions and a dictionary through `train.py carry` at its defaults, at widths 64 to 768, beside plain code.

    python -m benchmarks.updates.owned REAL UPDATES --json FILE [--seeds 0 1]

Sentiment of SST-2: each artefact is made on 1,000 texts and carried with 1,000 others, whose labels the command uses
for its scores alone; 500 test it. Plain: scikit-learn's head after torch.linalg.lstsq, and the same head trained anew.
"""

import argparse
import csv
import json
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, cast

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # runs from a bare checkout

from aligners.api import Dictionary, Direction, Head, load, states, write_artefact
from aligners.models.loading.model_files import save_model
from benchmarks.harness import machine
from benchmarks.updates.carrying import brief
from benchmarks.updates.heads import auroc, fitted
from benchmarks.updates.texts import _sst2

PAIRS = {  # and OLD's sites
    ("embedded:0", "embedded:1"): [1, 2, 3],
    ("models/minilm", "updates/full_sst2_0"): [2, 4, 6],
    ("models/minilm", "models/mpnet"): [2, 4, 6],
    ("models/smollm2", "models/smollm2_rotated"): [15],
}
CARRY = Path(__file__).resolve().parents[2] / "train.py", "carry"
FEATURES = 1152  # of a random dictionary of SmolLM2


def measured(
    old: Path, new: Path, sites: list[int], texts: dict[str, Any], folder: Path
) -> list[dict[str, Any]]:
    """Rows of the two reports of the command, with what plain code scores."""
    read = {part: states(old, texts[part][0], sites, rows="mean") for part in texts}
    heads = {}
    for place, site in enumerate(sites):
        rows, labels = read["own"][place].double().numpy(), texts["own"][1]
        heads[site], bias = fitted(rows, labels.numpy())
        vector = torch.tensor(
            rows[labels == 1].mean(0) - rows[labels == 0].mean(0)
        ).float()
        about = {"model": str(old), "site": site, "rows": "mean"}
        for name, weight in (
            ("head", torch.tensor(heads[site]).float()),
            ("direction", vector),
        ):
            score = auroc(
                (read["held"][place] @ weight).numpy(), texts["held"][1].numpy()
            )
            told: dict[str, Any] = {**about, "name": f"{name}_{site}"}
            told["score"] = {"metric": "auroc", "value": score, "n": 500}
            told["classes"] = ["0", "1"]
            head = Head.of(weight, [bias], **told) if name == "head" else None
            write_artefact(
                head or Direction({"vector": weight}, told),
                folder / "mine" / told["name"],
            )
    if "smollm2" in str(old):
        width, draw = len(vector), torch.Generator().manual_seed(0)
        encoder = torch.randn(width, FEATURES, generator=draw) / width**0.5
        parts = {
            "W_enc": encoder,
            "b_enc": torch.zeros(FEATURES),
            "W_dec": encoder.T,
            "b_dec": torch.zeros(width),
        }
        cfg = {"architecture": "standard", "d_in": width, "d_sae": FEATURES}
        told = {"name": "dictionary", "model": str(old), "site": sites[0], "cfg": cfg}
        write_artefact(Dictionary(parts, told), folder / "mine" / "dictionary")
    given: dict[str, Path] = {
        "artefacts": folder / "mine",
        "data.model_x": old,
        "data.model_y": new,
    }
    given |= {
        "data.text.source": folder / "given.csv",
        "data.text.held_out": folder / "held.csv",
        "run": folder / "run",
    }
    options = [part for name, value in given.items() for part in (f"--{name}", value)]
    subprocess.run([sys.executable, *CARRY, *options], check=True)
    rows, scores = (
        list(csv.DictReader((folder / "run" / f"{n}.csv").open()))
        for n in ("carrying", "scores")
    )
    found = []
    for row in rows:
        names = ("artefact", "map", "fitted_on", "site_x", "site_y", "verdict")
        cell = {name: row[name] for name in names}
        cell |= {
            name: float(row[name])
            for name in ("predicted", "fidelity", "stale_fidelity")
            if row[name]
        }
        cell |= {
            one["condition"]: float(one["auroc"])
            for one in scores
            if one["artefact"] == row["artefact"]
        }
        if row["kind"] == "head":
            x = read["given"][sites.index(int(row["site_x"]))].double()
            y, z = (
                states(new, texts[part][0], int(row["site_y"]), rows="mean").double()
                for part in ("given", "held")
            )
            y, z = (
                torch.cat([part, part.new_ones(len(part), 1)], 1) for part in (y, z)
            )
            carried = torch.linalg.lstsq(y, x).solution @ torch.tensor(
                heads[int(row["site_x"])]
            )
            truth, again = (
                texts["held"][1].numpy(),
                fitted(y[:, :-1].numpy(), texts["given"][1].numpy())[0],
            )
            cell["plain"] = auroc((z @ carried).numpy(), truth)
            cell["plain, anew"] = auroc(z[:, :-1].numpy() @ again, truth)
        found.append(cell)
    return found


def main() -> None:
    """Carry everything between every pair."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("real", type=Path)
    parser.add_argument("updates", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args()
    torch.set_num_threads(1)
    splits, cells = (
        [
            list(_sst2(options.real / "data" / "sst2" / f"{name}.tsv"))
            for name in ("train", "test")
        ],
        [],
    )
    for seed in options.seeds:
        train, test = (
            random.Random(seed).sample(split, len(split)) for split in splits
        )
        parts = {"own": train[:1000], "given": train[1000:2000], "held": test[:500]}
        for pair, sites in PAIRS.items():
            with tempfile.TemporaryDirectory() as made:
                models, texts = list[Path](), dict[str, Any]()
                for name in pair:
                    models.append(
                        (
                            options.updates.parent
                            if "updates" in name
                            else options.real
                        ).absolute()
                        / name
                    )
                    if ":" in name:
                        models[-1], model = (
                            Path(made, name.replace(":", "_")),
                            cast(Any, load(name)),
                        )
                        save_model(models[-1], model.model, model.tokenizer)
                for name, part in parts.items():
                    labels = [text["labels"]["sentiment"] for text in part]
                    texts[name] = [text["text"] for text in part], torch.tensor(labels)
                    with Path(made, f"{name}.csv").open("w", newline="") as file:
                        csv.writer(file).writerows(
                            [
                                ["text", "label"],
                                *zip(texts[name][0], labels, strict=True),
                            ]
                        )
                found = measured(models[0], models[1], sites, texts, Path(made))
            cells += [{"seed": seed, "pair": list(pair), **cell} for cell in found]
            print(
                *(json.dumps(brief(cell)) for cell in cells[-len(found) :]),
                sep="\n",
                flush=True,
            )
    lines = ",\n".join(json.dumps(brief(cell)) for cell in cells)
    options.json.write_text(
        f'{{"machine": {json.dumps(machine("cpu"))},\n"cells": [\n{lines}\n]}}\n'
    )


if __name__ == "__main__":
    main()
