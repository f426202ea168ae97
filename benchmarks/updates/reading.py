"""States of a model on the texts of the heads and on the unlabelled ones, read once and kept."""

import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

from aligners.models.loading.model_files import quiet
from benchmarks.updates.texts import SETTINGS, Text

__all__ = ["READ", "kept_states", "last_token"]

READ = (
    "labelled_sst2",
    "labelled_ewt",
    "test_sst2",
    "test_ewt",
    "unlabelled",
    "labelled_planted",
    "test_planted",
)
TOKENS = 1000  # unlabelled texts of which every token is kept
SET_ASIDE = 1000  # unlabelled texts that updates set aside read


def kept_states(
    model: Path, parts: dict[str, list[Text]], kept: Path
) -> dict[str, Tensor]:
    """PART -> (S, texts, d), means over tokens; PART.words, finite verbs; unlabelled.tokens, .counts.

    Args:
        model: a folder.
        parts: see `texts.divided`.
        kept: the safetensors file that remembers them, in float16 but for the means.
    """
    if not kept.is_file():
        started = time.monotonic()
        kept.parent.mkdir(parents=True, exist_ok=True)
        with quiet():
            loaded: Any = AutoModel.from_pretrained(
                model, add_pooling_layer=False
            ).eval()
        tokenizer, found = AutoTokenizer.from_pretrained(model), dict[str, Tensor]()
        fewer = SETTINGS["updates"].get(model.name, {}).get("set_aside", False)
        for part in READ:
            texts = (
                parts[part][:SET_ASIDE]
                if fewer and part == "unlabelled"
                else parts[part]
            )
            found |= {
                part + name: rows
                for name, rows in _read(loaded, tokenizer, texts, part).items()
            }
        save_file(found, kept)
        print(f"{model.name}: states in {time.monotonic() - started:.0f} s", flush=True)
    return load_file(kept)


@torch.no_grad()
def _read(
    model: Any, tokenizer: Any, texts: list[Text], part: str
) -> dict[str, Tensor]:
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]["text"]))
    means, words, tokens = ([torch.empty(0)] * len(texts) for _ in range(3))
    for start in range(0, len(order), 64):
        chosen = order[start : start + 64]
        inputs = tokenizer(
            [texts[i]["text"] for i in chosen],
            padding=True,
            return_tensors="pt",
            return_offsets_mapping=True,
        )
        ends = inputs.pop("offset_mapping")[..., 1]
        hidden = model(**inputs, output_hidden_states=True).hidden_states
        states = torch.stack(
            [hidden[site] for site in SETTINGS["sites"]]
        )  # (S, B, T, d)
        for row, i in enumerate(chosen):
            real = states[:, row, inputs["attention_mask"][row].bool()]
            means[i] = real.mean(1)
            if part == "unlabelled" and i < TOKENS:
                tokens[i] = real.half()
            places = [
                last_token(texts[i]["text"], int(word), ends[row])
                for word in texts[i].get("tense", {})
            ]
            words[i] = states[:, row, places]
    verbs = [rows for rows in words if rows.numel()]
    read = {"": torch.stack(means, 1)}
    if verbs:
        read[".words"] = torch.cat(verbs, 1).contiguous()
    if part == "unlabelled":
        read[".tokens"] = torch.cat(tokens[:TOKENS], 1).contiguous()
        read[".counts"] = torch.tensor([rows.shape[1] for rows in tokens[:TOKENS]])
    return read


def last_token(text: str, word: int, ends: Tensor) -> int:
    """The place of a word's last token: the one that ends where the word ends."""
    end = len(" ".join(text.split(" ")[: word + 1]))
    return int((ends == end).nonzero()[0])
