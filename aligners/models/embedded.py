"""Models that need no model hub: trained from a seed and text on first use, always to the same weights, then cached.

A model is an ordinary folder of `transformers`, loaded like any other. Those of the demo come with the package, trained
by `.ci/ship` and rounded to half precision: they are the same on every machine.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from lightning.pytorch.utilities.seed import isolate_rng
from torch.nn.utils import clip_grad_norm_
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from aligners.errors import UserError
from aligners.files.atomic import check_folder, whole_folder
from aligners.models.loading.model_files import quiet, save_model
from aligners.models.recipes import AnyRecipe, Plan, Recipe
from aligners.progress import tell, track

# models that come with the package, in folders named like the cache's
SHIPPED = Path(__file__).with_name("shipped")


def cache_folder(cache: Path | None = None) -> Path:
    """Return the folder of embedded models: `cache`, else $ALIGNERS_CACHE, else ~/.cache/aligners."""
    chosen = cache or os.environ.get("ALIGNERS_CACHE") or "~/.cache/aligners"
    return Path(chosen).expanduser()


def embedded_model(
    seed: int,
    texts: list[str],
    labels: list[int] | None = None,
    *,
    recipe: AnyRecipe | None = None,
    cache: Path | None = None,
    progress: bool = True,
) -> Path:
    """Return the folder of the model with this seed; train it now if neither the cache nor the package has it.

    The weights follow from the arguments and the machine, or come with the package and are the same everywhere; the
    global random state is left alone. Seeds share the tokenizer, which is trained on the same texts. Several processes
    may ask at once: one trains, the others wait.

    Args:
        seed: seed of the initial weights, dropout, masks, and the order of the texts.
        texts: to train on; no text that anything is evaluated on.
        labels: class of each text, 0, 1, ...; language models ignore them.
        recipe: how to train, which also determines the kind of model; default: `Recipe()`, a classifier.
        cache: folder to keep models in; see `cache_folder`.
        progress: whether to announce what is being made, and show a progress bar.

    Raises:
        ValueError: no texts, or too few; for a classifier not one label for each, or fewer than two classes; the cache
            cannot be written to.
    """
    recipe = recipe or Recipe()
    labels = labels or []
    if not texts:
        raise UserError("Expected `texts` to train on, but got none.")
    if isinstance(recipe, Recipe):
        _check_labels(texts, labels)
    family = _family(recipe, texts, labels)
    folder = cache_folder(cache) / "embedded" / family
    shipped = SHIPPED / family
    # By a name of its own: an earlier version has trained the same model here, and did not round it.
    is_shipped = (shipped / f"seed-{seed}").is_dir()
    made = folder / f"{'shipped' if is_shipped else 'seed'}-{seed}"
    if made.is_dir():
        return made

    check_folder(folder, "cache")
    with FileLock(folder / ".lock"):
        tokenizer = _tokenizer(
            folder / "tokenizer", shipped / "tokenizer", recipe, texts
        )
        if made.is_dir():
            return made
        if is_shipped:
            model = _shipped_model(shipped / f"seed-{seed}", seed)
        else:
            bar = _announce(seed, recipe, texts) if progress else None
            with alone(seed):
                plan = recipe.plan(seed, texts, labels, tokenizer)
                train(plan, recipe, bar)
            model = plan.model
            # Not earlier: transformers would take a GPT's end-of-text tokens for padding, and warn.
            model.config.pad_token_id = tokenizer.pad_token_id
        with whole_folder(made) as unfinished:
            save_model(unfinished, model, tokenizer)
    return made


def _family(recipe: AnyRecipe, texts: list[str], labels: list[int]) -> str:
    """Return the name of the folder of all seeds, made from what decides their weights."""
    decides: list[Any] = [asdict(recipe), texts]
    if isinstance(recipe, Recipe):
        decides.append(labels)
    written = json.dumps(decides).encode()
    digest = hashlib.blake2b(written, digest_size=6).hexdigest()
    return f"{recipe.folder}-{recipe.layers}x{recipe.width}-{digest}"


def _tokenizer(
    folder: Path, shipped: Path, recipe: AnyRecipe, texts: list[str]
) -> PreTrainedTokenizerBase:
    """Make the tokenizer of a folder: a copy of the package's, or one learned from the texts."""
    if not folder.is_dir():
        with whole_folder(folder) as unfinished:
            tokenizer: PreTrainedTokenizerBase
            if shipped.is_dir():
                tokenizer = AutoTokenizer.from_pretrained(shipped)
            else:
                tokenizer = recipe.tokenizer(texts)
            tokenizer.save_pretrained(unfinished)
    return AutoTokenizer.from_pretrained(folder)


def _shipped_model(folder: Path, seed: int) -> PreTrainedModel:
    """Load a model that comes with the package, in full precision."""
    with quiet(), alone(seed):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def _announce(seed: int, recipe: AnyRecipe, texts: list[str]) -> str:
    """Announce that a model is trained, and return the name of the progress bar."""
    size = f"{recipe.folder}, {recipe.layers} blocks, {recipe.width} wide, {recipe.length(texts)}"
    tell(f"Training the embedded model of seed {seed} ({size}), once: it is kept.")
    return f"Training seed {seed}"


def _check_labels(texts: list[str], labels: list[int]) -> None:
    """Raise unless every text has a label, of two classes or more."""
    if len(texts) != len(labels):
        raise UserError(
            f"Expected one of `labels` for each of `texts`, but got {len(labels)} for {len(texts)}."
        )
    if min(labels) < 0 or len(set(labels)) < 2:
        raise UserError(
            f"Expected `labels` of at least two classes, counted from 0, but got {sorted(set(labels))}. "
            "Choose labelled text."
        )


@contextmanager
def alone(seed: int) -> Iterator[None]:
    """Context in which training is seeded and on one thread, and the surrounding run is not affected.

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
        bar: what is said to be trained; None: nothing is shown.
    """
    from transformers import get_linear_schedule_with_warmup  # which imports peft

    model = plan.model.train()
    steps = plan.epochs * len(plan.batches)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
    )
    schedule = get_linear_schedule_with_warmup(
        optimizer, int(recipe.warm_up * steps), steps
    )
    every = chain.from_iterable(plan.batches for _ in range(plan.epochs))
    for batch in track(every, bar or "", steps, disable=bar is None):
        optimizer.zero_grad()
        plan.loss(model, batch).backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
