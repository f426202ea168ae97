"""States of models as arrays, from models (by name, folder or loaded) and texts."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, get_args

import datasets
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.frozen_models import FrozenModels
from aligners.datamodules.rows.far import FarRows, FarSample
from aligners.datamodules.rows.policies import (
    PAIRS_TOKENS,
    RowKind,
    policy_of,
    rows_of_each,
)
from aligners.datamodules.rows.read_rows import read_rows
from aligners.datamodules.text.loading import load_texts
from aligners.datamodules.text.sources import TextSource
from aligners.datamodules.tokens.tokenised import TokenisedTexts
from aligners.datamodules.tokens.tokenising import same_tokens, tokenise
from aligners.errors import UserError, check_known, check_range
from aligners.models.model import FrozenModel

__all__ = ["TextSource", "load", "load_texts", "states"]

Model = str | Path | FrozenModel | tuple[PreTrainedModel, PreTrainedTokenizerBase]

logger = logging.getLogger(__name__)


def load(
    model: Model,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    text: TextSource | None = None,
) -> FrozenModel:
    """Load a model once, for many calls of `states` and `inject`.

    Args:
        model: a Hub id, a folder, an embedded model such as `embedded-gpt:0`, or a model of `transformers` with its
            tokenizer, (model, tokenizer), which is frozen in place and stays where it is. A `TransformerBridge` of
            TransformerLens is read through the model of `transformers` in it, processed as its weights are.
        device: where the weights go.
        dtype: data type of the weights: float32, bfloat16 or float16.
        text: what embedded models are trained on. Default: the Rotten Tomatoes sentences.

    Raises:
        ValueError: there is no such model, it is given without its tokenizer, or it is not one of `transformers`.
    """
    if isinstance(model, FrozenModel):
        return model
    if isinstance(model, tuple) and len(model) == 2:
        return _frozen(*model)
    if isinstance(getattr(model, "original_model", None), PreTrainedModel):
        return _in_bridge(model)
    if not isinstance(model, (str, Path)):
        raise UserError(
            f"Expected a model's name, its folder, or (model, tokenizer), but got a {type(model).__name__}. A loaded "
            "model needs its tokenizer beside it. A HookedTransformer holds no model of `transformers`: load it as a "
            "TransformerBridge."
        )
    texts = partial(load_texts, text or TextSource())
    models = FrozenModels([(str(model), None)], None, texts, max_length=2, dtype=dtype)
    return models.loaded[0].to(device)


PROCESSED = (
    "Caution: the weights of {name} are processed by TransformerLens (`enable_compatibility_mode`), so that its states "
    "are not those of the model in its files."
)


def _in_bridge(bridge: Any) -> FrozenModel:
    """Freeze the model that a `TransformerBridge` of TransformerLens holds; its blocks are the bridge's own."""
    frozen = _frozen(bridge.original_model, bridge.tokenizer)
    if getattr(bridge, "compatibility_mode", False):
        caution = PROCESSED.format(name=frozen.name)
        frozen.cautions.append(caution)
        logger.warning(caution)
    return frozen


def _frozen(model: Any, tokenizer: PreTrainedTokenizerBase) -> FrozenModel:
    """Freeze a loaded model with its tokenizer, in place, and log its cautions."""
    if not isinstance(model, PreTrainedModel):
        kind = type(model)
        raise UserError(
            f"Expected (model, tokenizer) with a model of `transformers`, but got a {kind.__name__} of "
            f"{kind.__module__.split('.')[0]}: its blocks are other modules. Give the model of `transformers` that "
            "it was made of, or its name."
        )
    name = getattr(model, "name_or_path", "") or type(model).__name__
    frozen = FrozenModel(model, tokenizer, name=name)
    for caution in frozen.cautions:
        logger.warning(caution)
    return frozen


@torch.no_grad()
def states(
    model: Model | list[Model],
    texts: Sequence[str],
    site: int | Sequence[int],
    *,
    rows: str = "tokens",
    batch_size: int = 32,
    max_length: int = 128,
    far_rows: FarRows = "keep",
) -> Any:
    """Return states of a model at one or several sites: a row for each real token, word or text, in the texts' order.

    Models with the same tokenizer give their tokens in the same order. Others can be compared word by word: read them
    in one call, as a list, which leaves out words that some model does not have in full.

    Args:
        model: see `load`; or a list of models.
        texts: texts that it reads.
        site: 0 is the embedding output, l the output of block l, before any final norm, L + 1 the output of the final
            norm; or a list of them.
        rows: `tokens`; `mean`, the mean over a text's tokens; `cls`, its first; `last`, its last; or `words`, the last
            token of each word, between white space, `words_first`, or `words_mean`.
        batch_size: texts that are read together.
        max_length: most tokens of a text, or fewer where a model has fewer positions; longer texts are cut, and the log
            says how many.
        far_rows: leave_out: leave out the rows that are far from all others at one of the sites for one of the models,
            as a text's first token often is in language models. The log says how many there are, either way: a few of
            them dominate every error and every similarity.

    Returns:
        (N, d) float32, or (S, N, d) at several sites, on the model's device. For a list of models, a list; equal row
        numbers are the same token, word or text.

    Raises:
        ValueError: a model has no such site, there are no texts, `rows` is something else, a text has no token, or
            tokens are asked for of models with different tokenizers.
        RuntimeError: a model gives states that are not finite.
    """
    sites = [site] if isinstance(site, int) else list(site)
    given = model if isinstance(model, list) else [model]
    models = [load(one) for one in given]
    words = policy_of(rows).types == "words"
    for frozen in models:
        for place in sites:
            frozen.check_site(place, "site")
    check_known(get_args(FarRows), far_rows=far_rows)

    batches = _batches(models, texts, None, batch_size, max_length, words=words)
    every, first = _read_batches(models, batches, sites, rows)
    far = _far(models, every, first, sites, far_rows)
    if far_rows == "leave_out":
        every = [read[:, ~far.to(read.device)] for read in every]
    if isinstance(site, int):
        every = [read[0] for read in every]
    if isinstance(model, list):
        return every
    return every[0]


def _read_batches(
    models: Sequence[FrozenModel],
    batches: Iterator[TextBatch],
    sites: Sequence[int],
    rows: str,
) -> tuple[list[Tensor], Tensor]:
    """Return the rows (S, N, d) of each model, and which of them, (N,), are the first of their texts."""
    parts: list[list[Tensor]] = [[] for _ in models]
    first = []
    for batch in batches:
        tokenizers = {id(inputs) for inputs in batch.inputs}
        if rows == "tokens" and len(tokenizers) > 1:
            raise UserError(
                f"{PAIRS_TOKENS[0]}, but these models have different tokenizers. {PAIRS_TOKENS[1]}."
            )
        selected = rows_of_each(batch, RowKind(rows))
        first.append(selected[0].place == 0)
        for number, frozen in enumerate(models):
            inputs = _on(frozen.device, batch.inputs[number])
            places = selected[number].to(frozen.device)
            read = read_rows(frozen, inputs, sites, places)
            _check_finite(frozen, sites, read)
            parts[number].append(read)
    return [torch.cat(part, 1) for part in parts], torch.cat(first)


def _on(device: Any, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Move a batch's tensors to a device."""
    return {name: value.to(device) for name, value in inputs.items()}


def _far(
    models: Sequence[FrozenModel],
    every: Sequence[Tensor],
    first: Tensor,
    sites: Sequence[int],
    far_rows: FarRows,
) -> Tensor:
    """Return which rows are far from all others for one of the models, (N,) on the CPU, and log it.

    Args:
        models: models that were read.
        every: (S, N, d) rows of each.
        first: (N,) which rows are the first of their texts.
        sites: sites at which they were read.
        far_rows: what happens to far rows.
    """
    far = torch.zeros(len(first), dtype=torch.bool)
    if not len(first):
        return far
    where = []
    for model, states in zip(models, every, strict=True):
        sample = FarSample.of(states, first.to(states.device), sites, "residual")
        if sample.far.any():
            far |= sample.far.cpu()
            where.append(sample.words(model.name))

    if where:
        become = "count like any other; `far_rows` 'leave_out' drops them"
        if far_rows == "leave_out":
            become = "are left out"
        among = f"{int(far.sum())} of {len(far)} rows"
        known = "; ".join(dict.fromkeys(where))
        logger.warning(
            "Caution: %s are far from all others: %s. They %s.", among, known, become
        )
    return far


def _batches(
    models: Sequence[FrozenModel],
    texts: Sequence[str],
    labels: Sequence[int] | None,
    size: int,
    longest: int,
    *,
    words: bool = False,
) -> Iterator[TextBatch]:
    """Yield the texts in their order, tokenised and padded, `size` at a time; see `tokenised`."""
    check_range(least=1, batch_size=size)
    tokens, _ = tokenised(models, texts, labels, longest, words=words)
    for first in range(0, len(tokens), size):
        yield tokens[range(first, min(first + size, len(tokens)))]


def _check_finite(model: FrozenModel, sites: Sequence[int], rows: Tensor) -> None:
    """Raise, as `self_test` does, if rows (S, N, d) of a model hold NaN or infinity."""
    for site, values in zip(sites, rows, strict=True):
        if not bool(values.isfinite().all()):
            raise RuntimeError(
                f"{model.name} gives non-finite states at site {site}: nothing read from it can be trusted. Look at "
                "its weights, or load it in float32."
            )


def tokenised(
    models: Sequence[FrozenModel],
    texts: Sequence[str],
    labels: Sequence[int] | None,
    longest: int,
    *,
    words: bool = False,
) -> tuple[TokenisedTexts, datasets.Dataset]:
    """Tokenise the texts, in their order, for every model; also return them as a table.

    Args:
        models: models that read them.
        texts: one or more texts.
        labels: class of each text, if known.
        longest: most tokens of a text, or fewer where a model has fewer positions.
        words: whether words are numbered.

    Raises:
        ValueError: there are no texts or a string instead, no tokenizer, or not one label for each.
    """
    _check_texts(texts)
    if labels is not None and len(labels) != len(texts):
        raise UserError(
            f"Expected one of `labels` for each of {len(texts)} texts, but got {len(labels)}."
        )
    split = _table(texts, labels)
    length = longest
    for model in models:
        length = min(length, model.max_length or length)
    tokenizers = _tokenizers(models, split, length)

    tables: dict[int, Any] = {}
    with _without_bars():
        for tokenizer in tokenizers:
            if id(tokenizer) not in tables:
                table = tokenise(split, tokenizer, length, words=words)
                tables[id(tokenizer)] = table
    of_each = [tables[id(tokenizer)] for tokenizer in tokenizers]
    tokens = TokenisedTexts(of_each, tokenizers)
    tokens.check_vocabulary(models, "given")
    return tokens, split


def _table(texts: Sequence[str], labels: Sequence[int] | None) -> datasets.Dataset:
    """Make a table of texts, with their labels if they are known."""
    columns: dict[str, list[Any]] = {"text": list(texts), "id": list(range(len(texts)))}
    if labels is not None:
        columns["label"] = [int(label) for label in labels]
    return datasets.Dataset.from_dict(columns)


def _tokenizers(
    models: Sequence[FrozenModel], split: datasets.Dataset, length: int
) -> list[PreTrainedTokenizerBase]:
    """Return the tokenizer of each model, one and the same for those that make the same tokens of the texts."""
    tokenizers: list[PreTrainedTokenizerBase] = []
    for model in models:
        if model.tokenizer is None:
            raise UserError(
                f"Expected a model with its tokenizer, but {model.name} has none. Give (model, tokenizer)."
            )
        tokenizers.append(_one_for_all(model.tokenizer, tokenizers, split, length))
    return tokenizers


def _one_for_all(
    tokenizer: PreTrainedTokenizerBase,
    known: Sequence[PreTrainedTokenizerBase],
    split: datasets.Dataset,
    length: int,
) -> PreTrainedTokenizerBase:
    """Return the first known tokenizer that makes the same tokens of the texts, or else this one."""
    for other in known:
        if same_tokens(other, tokenizer, [split], length):
            return other
    return tokenizer


def _check_texts(texts: Any) -> None:
    """Raise unless texts are a list of one or more strings."""
    got = ""
    if isinstance(texts, str):
        got = "a single string"
    elif not len(texts):
        got = "none"
    for text in texts:
        if not isinstance(text, str):
            got = f"a list with a {type(text).__name__}"
    if got:
        raise UserError(
            f"Expected `texts` as a list of one or more strings, but got {got}."
        )


@contextmanager
def _without_bars() -> Iterator[None]:
    """Hide the bars of `datasets`."""
    shown = not datasets.utils.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
