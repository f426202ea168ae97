"""Heads of one sentence model carried to one of another family, width and tokenizer, from unlabelled texts.

    python -m benchmarks.updates.across REAL UPDATES --json FILE

From MiniLM (384 × 6) to MPNet (768 × 12): heads on words by a map between words, heads on texts by one between means.
Which site of MPNet a head goes to is chosen by its agreement with itself, without labels.
"""

import argparse
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

sys.path.insert(
    0, str(Path(__file__).resolve().parents[2])
)  # runs from a bare checkout

from aligners.models.loading.model_files import quiet
from benchmarks.harness import machine
from benchmarks.updates.carrying import Bench, brief
from benchmarks.updates.fits import Rows, ridge
from benchmarks.updates.heads import auroc
from benchmarks.updates.reading import last_token
from benchmarks.updates.texts import SETTINGS, Text, divided

NEW_SITES = (4, 6, 8)
PARTS = {"unlabelled": 1000, "test_sst2": 500, "test_ewt": 700, "test_planted": 400}
TEXTS = (100, 300, 1000)


@torch.no_grad()
def states(
    model: Path, sites: tuple[int, ...], texts: dict[str, list[Text]], kept: Path
) -> dict[str, Tensor]:
    """PART -> means (S, texts, d), PART.words -> every word (S, words, d)."""
    if not kept.is_file():
        with quiet():
            loaded: Any = AutoModel.from_pretrained(
                model, add_pooling_layer=False
            ).eval()
        loaded.encoder.layer = loaded.encoder.layer[: max(sites)]
        tokenizer, found = AutoTokenizer.from_pretrained(model), dict[str, Tensor]()
        for part, most in PARTS.items():
            means, words = [], []
            for start in range(0, most, 32):
                chosen = [
                    text["text"] for text in texts[part][:most][start : start + 32]
                ]
                inputs = tokenizer(
                    chosen,
                    padding=True,
                    return_tensors="pt",
                    return_offsets_mapping=True,
                )
                ends = inputs.pop("offset_mapping")[..., 1]
                hidden = loaded(**inputs, output_hidden_states=True).hidden_states
                read = torch.stack([hidden[site] for site in sites])
                for row, text in enumerate(chosen):
                    means.append(
                        read[:, row, inputs["attention_mask"][row].bool()].mean(1)
                    )
                    places = [
                        last_token(text, word, ends[row])
                        for word in range(len(text.split(" ")))
                    ]
                    words.append(read[:, row, places])
            found |= {
                part: torch.stack(means, 1),
                f"{part}.words": torch.cat(words, 1).contiguous(),
            }
        save_file(found, kept)
    return load_file(kept)


def rows(
    read: dict[str, Tensor],
    site: int,
    part: str,
    words: bool,
    texts: list[Text],
    n: int,
) -> np.ndarray:
    """Rows of the first n texts."""
    if not words:
        return read[part][site, :n].double().numpy()
    count = sum(len(text["text"].split(" ")) for text in texts[:n])
    return read[f"{part}.words"][site, :count].double().numpy()


def main() -> None:
    """Carry every head from every site."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("real", type=Path)
    parser.add_argument("updates", type=Path)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    texts = divided(options.real / "data", options.updates / "texts.json")
    bench, sites = Bench(options.real, options.updates, texts), tuple(SETTINGS["sites"])
    models = options.real / "models"
    old = states(
        models / "minilm",
        sites,
        texts,
        options.updates / "states" / "across-minilm.safetensors",
    )
    new = states(
        models / "mpnet",
        NEW_SITES,
        texts,
        options.updates / "states" / "across-mpnet.safetensors",
    )
    cells: list[dict[str, Any]] = []
    nothing = np.zeros((1, new["unlabelled"].shape[-1]))

    @cache
    def there(words: bool, place: int, n: int) -> Rows:
        return Rows(rows(new, place, "unlabelled", words, texts["unlabelled"], n))

    for (head, site), (weight, _) in bench.heads.items():
        about = SETTINGS["heads"][head]
        words = about["rows"] == "words"
        kinds = {"both": ["sst2", "ewt"]}.get(about["texts"], [about["texts"]])
        held, labels = [], []
        for part in (f"test_{kind}" for kind in kinds):
            for at, text in enumerate(texts[part][: PARTS[part]]):
                if words:
                    start = sum(
                        len(before["text"].split(" ")) for before in texts[part][:at]
                    )
                    held += [(part, start + int(place)) for place in text["tense"]]
                    labels += list(text["tense"].values())
                else:
                    held.append((part, at))
                    labels.append(text["labels"][head])
        suffix, truth = ".words" if words else "", np.array(labels)

        def tested(
            read: dict[str, Tensor], place: int, held: list = held, suffix: str = suffix
        ) -> np.ndarray:
            return (
                torch.stack([read[part + suffix][place, row] for part, row in held])
                .double()
                .numpy()
            )

        cell = {
            "head": head,
            "site": sites[site],
            "native": auroc(tested(old, site) @ weight, truth),
            "carried": {},
        }
        for n in TEXTS:
            answers = (
                rows(old, site, "unlabelled", words, texts["unlabelled"], n)
                @ weight[:, None]
            )
            tried = []
            for place in range(len(NEW_SITES)):
                found = ridge(there(words, place, n), answers, nothing)
                tried.append((float(found.agreement[0]), place, found.weights[0]))
            agreement, place, carried = max(tried, key=lambda one: one[0])
            score = auroc(tested(new, place) @ carried, truth)
            cell["carried"][n] = {
                "site": NEW_SITES[place],
                "agreement": agreement,
                "auroc": score,
            }
        order = np.random.default_rng(0).permutation(len(answers))
        shuffled = ridge(
            there(words, place, TEXTS[-1]), answers[order], nothing
        ).weights[0]
        cell["shuffled"] = auroc(tested(new, place) @ shuffled, truth)
        print(json.dumps(brief(cell)), flush=True)
        cells.append(cell)
    lines = ",\n".join(json.dumps(brief(cell)) for cell in cells)
    options.json.write_text(
        f'{{"machine": {json.dumps(machine("cpu"))},\n"cells": [\n{lines}\n]}}\n'
    )


if __name__ == "__main__":
    main()
