"""Models that need no model hub: trained from a seed and text on first use, always to the same weights, then cached.

A model is an ordinary folder of `transformers`, loaded like any other.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from lightning.pytorch.utilities.seed import isolate_rng
from rich.progress import track
from torch.nn.utils import clip_grad_norm_
from transformers import AutoTokenizer, get_linear_schedule_with_warmup

from aligners.errors import UserError
from aligners.files.whole import check_folder, whole_folder
from aligners.models.loading.files import save_model
from aligners.models.recipes import AnyRecipe, Plan, Recipe


def cache_folder(cache: Path | None = None) -> Path:
    """The folder of embedded models: `cache`, else $ALIGNERS_CACHE, else ~/.cache/aligners."""
    return Path(cache or os.environ.get("ALIGNERS_CACHE") or "~/.cache/aligners").expanduser()


def embedded_model(
    seed: int,
    texts: list[str],
    labels: list[int] | None = None,
    *,
    recipe: AnyRecipe | None = None,
    cache: Path | None = None,
    progress: bool = True,
) -> Path:
    """The folder of the model with this seed, trained now if it is not in the cache.

    The weights follow from the arguments and the machine; the global random state is left alone. Seeds share
    the tokenizer, which is trained on the same texts. Several processes may ask at once: one trains, the
    others wait.

    Args:
        seed: of the initial weights, dropout, masks, and the order of the texts.
        texts: to train on; no text that anything is evaluated on.
        labels: class of each text, 0, 1, ...; language models ignore them.
        recipe: how to train, which also determines the kind of model; default: `Recipe()`, a classifier.
        cache: folder to keep models in; see `cache_folder`.
        progress: whether to announce what is being made, and show a progress bar.

    Raises:
        ValueError: no texts, or too few; for a classifier not one label for each, or fewer than two classes; the cache
            cannot be written to.
    """
    recipe, labels = recipe or Recipe(), labels or []
    if not texts:
        raise UserError("Expected `texts` to train on, but got none.")
    if isinstance(recipe, Recipe):
        _check_labels(texts, labels)
    family = _family_folder(recipe, [texts, labels] if isinstance(recipe, Recipe) else [texts], cache)
    folder = family / f"seed-{seed}"
    if folder.is_dir():
        return folder
    check_folder(family, "cache")
    with FileLock(family / ".lock"):
        if not (family / "tokenizer").is_dir():
            with whole_folder(family / "tokenizer") as unfinished:
                recipe.tokenizer(texts).save_pretrained(unfinished)
        if not folder.is_dir():
            if progress:
                size = f"{recipe.folder}, {recipe.layers} blocks, {recipe.width} wide, {recipe.length(texts)}"
                print(f"Training the embedded model of seed {seed} ({size}), new in the cache: {folder}", flush=True)
            tokenizer = AutoTokenizer.from_pretrained(family / "tokenizer")
            with whole_folder(folder) as unfinished, alone(seed):
                plan = recipe.plan(seed, texts, labels, tokenizer)
                train(plan, recipe, f"Seed {seed}" if progress else None)
                # Not earlier: transformers would take a GPT's end-of-text tokens for padding, and warn.
                plan.model.config.pad_token_id = tokenizer.pad_token_id
                save_model(unfinished, plan.model, tokenizer)
    return folder


def _family_folder(recipe: AnyRecipe, data: list[Any], cache: Path | None) -> Path:
    """The folder of all seeds of a recipe, named after everything that determines them."""
    made_from = json.dumps([asdict(recipe), *data]).encode()
    digest = hashlib.blake2b(made_from, digest_size=6).hexdigest()
    return cache_folder(cache) / "embedded" / f"{recipe.folder}-{recipe.layers}x{recipe.width}-{digest}"


def _check_labels(texts: list[str], labels: list[int]) -> None:
    if len(texts) != len(labels):
        raise UserError(f"Expected one of `labels` for each of `texts`, but got {len(labels)} for {len(texts)}.")
    if min(labels) < 0 or len(set(labels)) < 2:
        raise UserError(
            f"Expected `labels` of at least two classes, counted from 0, but got {sorted(set(labels))}. "
            "Choose labelled text."
        )


@contextmanager
def alone(seed: int) -> Iterator[None]:
    """Within it, training is seeded and on one thread, and leaves the surrounding run as it was.

    One thread, because more would hardly speed up so small a model, and the weights would depend on their number.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with isolate_rng(), torch.enable_grad():
            torch.manual_seed(seed)
            yield
    finally:
        torch.set_num_threads(threads)


def train(plan: Plan, recipe: AnyRecipe, bar: str | None) -> None:
    """Train a model on the CPU with AdamW, warm-up and linear decay; inside `alone`.

    Args:
        plan: its model is changed in place.
        recipe: learning rate, warm-up and weight decay.
        bar: how the progress bar begins; None for no bar.
    """
    model, steps = plan.model.train(), plan.epochs * len(plan.batches)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    schedule = get_linear_schedule_with_warmup(optimizer, int(recipe.warm_up * steps), steps)
    for epoch in range(plan.epochs):
        named = f"{bar}, epoch {epoch}/{plan.epochs - 1}"
        for batch in track(plan.batches, named, transient=True, disable=bar is None):
            optimizer.zero_grad()
            plan.loss(model, batch).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
