"""A direction of one model carried to a language model of another family: how much it steers, at equal KL.

    python -m benchmarks.updates.steering REAL --json FILE [--seeds 0 1]

REAL is what benchmarks/real/models.py made. The direction is the difference of the means of the two classes of SST-2,
between words, at a middle site of OLD. It is carried to SmolLM2 by the maps of `train.py carry`, from texts without
labels, and compared with the difference of means of SmolLM2 itself on the same labelled texts.
"""

import argparse
import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # runs from a bare checkout

from aligners.api import Direction, load, steer
from aligners.api.model_states import tokenised
from aligners.datamodules.rows.policies import RowKind, rows_of_each
from aligners.datamodules.rows.read_rows import read_rows
from aligners.probing.artefacts.carrying_maps import PairedRows, fit_maps, forward_map
from benchmarks.harness import machine
from benchmarks.updates.carrying import brief
from benchmarks.updates.texts import _sst2

OLD = {
    "embedded-gpt:0": 2,
    "embedded-gpt:1": 2,
    "models/minilm": 4,
    "models/e5": 8,
    "models/mpnet": 8,
}  # and its site
NEW, NEW_SITES = "models/smollm2", (10, 15, 20)
LABELLED, HELD_OUT, ALPHAS = 1000, 32, (0.1, 0.2, 0.4, 0.8)
WORDS = (["good", "great", "wonderful"], ["bad", "terrible", "awful"])


@torch.no_grad()
def words(
    models: list, sites: list[list[int]], texts: list[str]
) -> tuple[list[Tensor], Tensor]:
    """States (S, N, d) of every model at the words that all have, and the text of each row."""
    tokens, parts = (
        tokenised(models, texts, None, 64, words=True)[0],
        [list[Tensor]() for _ in models],
    )
    owners = []
    for first in range(0, len(texts), 32):
        batch = tokens[range(first, min(first + 32, len(texts)))]
        places = rows_of_each(batch, RowKind("words"))
        owners.append(first + places[0].owner)
        for part, model, inputs, at, rows in zip(
            parts, models, batch.inputs, sites, places, strict=True
        ):
            part.append(read_rows(model, inputs, at, rows))
    return [torch.cat(part, 1) for part in parts], torch.cat(owners)


def difference(rows: PairedRows, of_text: Tensor) -> Tensor:
    """The mean of NEW's states in texts of the second class, minus that in texts of the first."""
    positive = of_text[rows.text] > 0
    return rows.new[positive].mean(0) - rows.new[~positive].mean(0)


def directions(
    old: dict[str, Tensor], new: Tensor, owner: Tensor, labels: Tensor, seed: int
) -> dict[str, Direction]:
    """NEW's own direction, without and with its huge states, and those of all old models carried."""
    known, own = owner < LABELLED, PairedRows(new, new, owner)
    of_text = labels.new_zeros(int(owner.max()) + 1)
    of_text[owner] = labels
    found = {
        "native": Direction({"vector": difference(own.at(known).typical, of_text)})
    }
    found["native, with huge states"] = Direction(
        {"vector": difference(own.at(known), of_text)}
    )
    for name, states in old.items():
        vector = difference(replace(own, new=states).at(known), of_text)
        theirs, rows = Direction({"vector": vector}), replace(own, old=states)
        for n, shuffled in ((100, False), (1000, False), (1000, True)):
            place = (owner - LABELLED) / n
            fitting, chosen = (
                rows.at((place >= 0) & (place < 0.8)),
                rows.at((place >= 0.8) & (place < 1)),
            )
            if shuffled:
                draw = torch.Generator().manual_seed(seed)
                mixed = [
                    part.old[torch.randperm(len(part.old), generator=draw)]
                    for part in (fitting, chosen)
                ]
                fitting, chosen = (
                    replace(fitting, old=mixed[0]),
                    replace(chosen, old=mixed[1]),
                )
            best = fit_maps(theirs, fitting, chosen)[0].refitted(fitting, chosen)
            moved = theirs.carried(
                best.back, forward_map(best.name, fitting, chosen), map=best.name
            )
            found[f"{name}, shuffled" if shuffled else f"{name}, {n}"] = moved
    return found


def main() -> None:
    """Carry every direction to every site."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("real", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    options = parser.parse_args()
    torch.set_num_threads(1)
    models = [
        load(name if ":" in name else options.real / name) for name in (*OLD, NEW)
    ]
    sites, found = [*([site] for site in OLD.values()), list(NEW_SITES)], []
    splits = [
        list(_sst2(options.real / "data" / "sst2" / f"{split}.tsv"))
        for split in ("train", "test")
    ]
    for seed in options.seeds:
        train, held = (
            random.Random(seed).sample(split, len(split)) for split in splits
        )
        read, owner = words(
            models, sites, [text["text"] for text in train[: 2 * LABELLED]]
        )
        labels, old = (
            torch.tensor([text["labels"]["sentiment"] for text in train])[owner],
            [part[0] for part in read],
        )
        for place, site in enumerate(NEW_SITES):
            given = directions(
                dict(zip(OLD, old, strict=False)), read[-1][place], owner, labels, seed
            )
            given = {
                name: replace(one, about={**one.about, "site": site})
                for name, one in given.items()
            }
            texts = [text["text"] for text in held[:HELD_OUT]]
            for row in steer(
                models[-1], given, texts, words=WORDS, alphas=ALPHAS, seed=seed
            ).equal:
                about = given[row["method"]].about if row["method"] in given else {}
                found.append(brief({"seed": seed, **row, "map": about.get("map")}))
                if row["kl"] == 0.1:
                    print(json.dumps(found[-1]), flush=True)
    lines = ",\n".join(json.dumps(row) for row in found)
    options.json.write_text(
        f'{{"machine": {json.dumps(machine("cpu"))},\n"rows": [\n{lines}\n]}}\n'
    )


if __name__ == "__main__":
    main()
