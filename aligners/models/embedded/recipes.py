"""Models that need no model hub: trained from a seed and text on first use, then cached."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from aligners.models.embedded.classifier import Recipe, classifier
from aligners.models.embedded.language import GPTRecipe, MaskedRecipe, causal_model, masked_model
from aligners.models.embedded.making import cache_folder
from aligners.models.embedded.sentences import SentenceRecipe, sentence_model

__all__ = [
    "EMBEDDED",
    "AnyRecipe",
    "GPTRecipe",
    "MaskedRecipe",
    "Recipe",
    "SentenceRecipe",
    "cache_folder",
    "embedded_model",
    "embedded_recipe",
]

AnyRecipe = Recipe | GPTRecipe | MaskedRecipe | SentenceRecipe
# From the prefix of a name to the recipe of such models.
_KINDS: dict[str, type[AnyRecipe]] = {
    "embedded": Recipe,
    "embedded-gpt": GPTRecipe,
    "embedded-mlm": MaskedRecipe,
    "embedded-sentences": SentenceRecipe,
}
_UNLABELLED: dict[type[AnyRecipe], Callable[..., Path]] = {
    GPTRecipe: causal_model,
    MaskedRecipe: masked_model,
    SentenceRecipe: sentence_model,
}
EMBEDDED = tuple(f"{kind}:" for kind in _KINDS)  # for `startswith`


def embedded_recipe(name: str, recipe: Recipe) -> tuple[int, AnyRecipe]:
    """Seed and recipe of an embedded model, from its name.

    `embedded:SEED` is a classifier, `embedded-gpt:SEED` a causal language model, `embedded-mlm:SEED` a masked one,
    `embedded-sentences:SEED` a masked one that reads text by text; `embedded:SEED:layers=6,width=96` is one that
    departs from the recipe.

    Args:
        name: the model's name; what it does not mention is as in `recipe`, or for a language model as in its recipe's
            defaults. Models of one kind and vocabulary, made from the same texts, share their tokenizer whatever
            their size.
        recipe: of all embedded classifiers.

    Raises:
        ValueError: the name is written in another way, or a field is unknown or named twice.
    """
    prefix, _, rest = name.partition(":")
    seed, colon, written = rest.partition(":")
    kind = _KINDS.get(prefix, Recipe)
    default: AnyRecipe = recipe if kind is Recipe else kind()
    kinds = {field: type(value) for field, value in asdict(default).items()}
    entries = [tuple(entry.strip().split("=")) for entry in written.split(",")] if colon else []
    try:
        changes: dict[str, Any] | None = {field: kinds[field](value) for field, value in entries}
    except (ValueError, KeyError):
        changes = None
    if changes is None or len(changes) < len(entries) or not seed.isdigit() or prefix not in _KINDS:
        raise ValueError(
            f"Expected an embedded model to be named `{prefix}:SEED`, or `{prefix}:SEED:layers=6,width=96` with any "
            f"of {', '.join(kinds)}, each once, but got {name!r}."
        )
    return int(seed), replace(default, **changes)


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
        ValueError: no texts, or too few; for a classifier not one label for each, or fewer than two classes; for a
            GPT an unknown activation.
    """
    recipe = recipe or Recipe()
    if isinstance(recipe, Recipe):
        return classifier(seed, texts, labels or [], recipe, cache, progress)
    return _UNLABELLED[type(recipe)](seed, texts, recipe, cache, progress)
