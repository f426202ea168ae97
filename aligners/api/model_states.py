"""States of models as arrays, and injection, from models (by name, folder or loaded) and texts."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import datasets
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from aligners.api.array_maps import ArrayMap
from aligners.datamodules.batches import TextBatch
from aligners.datamodules.frozen_models import FrozenModels
from aligners.datamodules.rows.far import SAMPLE_TEXTS, FarRows, FarSample, Reach
from aligners.datamodules.rows.policies import (
    PAIRS_TOKENS,
    RowKind,
    policy_of,
    rows_of_each,
)
from aligners.datamodules.rows.read_rows import read_rows
from aligners.datamodules.task_targets import TaskBatch, check_mask, task_batch
from aligners.datamodules.text.loading import load_texts
from aligners.datamodules.text.sources import TextSource
from aligners.datamodules.tokens.tokenised import TokenisedTexts
from aligners.datamodules.tokens.tokenising import same_tokens, tokenise
from aligners.errors import UserError, check_known, check_range
from aligners.injection.behaviour import stitched_logits
from aligners.injection.routes import gives_answers
from aligners.injection.scoring.task_scores import (
    agreement,
    check_labels,
    chosen,
    unit_answers,
)
from aligners.models.model import FrozenModel

__all__ = ["Injected", "TextSource", "inject", "load", "load_texts", "states"]

Model = str | Path | FrozenModel | tuple[PreTrainedModel, PreTrainedTokenizerBase]

logger = logging.getLogger(__name__)

SELF_TEST = 8  # texts on which injecting a model's own states must change nothing


class Injected(NamedTuple):
    """The response of a model to mapped states in place of its own.

    Attributes:
        loss: loss in nats per text or token; None for a classifier without labels.
        native_loss: the model's own.
        penalty: loss − native_loss.
        accuracy: share of right answers; None in the same case.
        native_accuracy: the model's own.
        agreement: share of answers that equal the model's own.
        n: number of answers: texts of a classifier, tokens of a language model.
    """

    loss: float | None
    native_loss: float | None
    penalty: float | None
    accuracy: float | None
    native_accuracy: float | None
    agreement: float
    n: int


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
        site: 0 is the embedding output, l the output of block l, before any final norm; or a list of them.
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


@torch.no_grad()
def inject(
    model_x: Model,
    model_y: Model,
    map: ArrayMap | Callable[[Tensor], Tensor],
    texts: Sequence[str],
    *,
    site: int | tuple[int, int],
    labels: Sequence[int] | None = None,
    batch_size: int = 32,
    max_length: int = 128,
    masked_share: float = 0.15,
    seed: int = 0,
    far_rows: FarRows = "keep",
) -> Injected:
    """Put mapped states of X into Y in place of its own, for every token, and measure Y's answers.

    Args:
        model_x: see `load`.
        model_y: a classifier, or a causal or masked language model, with X's tokenizer, as in `load`. Its logits must
            stay bit-identical when its own states are injected.
        map: maps X's rows (N, d_x) to Y's (N, d_y): a fitted map of this package, or any function of a tensor.
        texts: texts that both read, and that nothing was fitted on.
        site: site of both models, or (X's site, Y's site).
        labels: for a classifier: the class of each text, 0, 1, ... as its head numbers them.
        batch_size: see `states`.
        max_length: see `states`.
        masked_share: share of the tokens that a masked language model must predict.
        seed: seed of the masks.
        far_rows: leave_out: tokens whose states are far from all others in X or Y, as a text's first token often is in
            language models, keep Y's own states: a map that was fitted without such rows does not know them.

    Raises:
        ValueError: Y has no head, or predicts the next token, which X sees already; the tokenizers differ, a site does
            not exist, the map returns rows of another shape, or the numbers of labels and texts differ.
    """
    of_x, of_y = site if isinstance(site, tuple) else (site, site)
    source, target = load(model_x), load(model_y)
    source.check_site(of_x, "site")
    target.check_site(of_y, "site")
    _check(source, target, texts, max_length, labelled=labels is not None)
    check_mask(target)
    check_known(get_args(FarRows), far_rows=far_rows)
    scored = labels is not None or target.task != "classification"
    mapped = map.transform if isinstance(map, ArrayMap) else map

    reaches = []
    for frozen, place in ((source, of_x), (target, of_y)):
        sample = states(
            frozen,
            texts[:SAMPLE_TEXTS],
            [place],
            batch_size=batch_size,
            max_length=max_length,
            far_rows=far_rows,
        )  # it says which rows are far
        if far_rows == "leave_out":
            reaches.append((frozen, place, Reach.of(sample)))

    n = 0
    sums: dict[str, Any] = {}
    for batch in _batches([target], texts, labels, batch_size, max_length):
        if not sums:
            _self_test(target, batch)
        if labels is not None:
            check_labels(target, batch.labels, "labels")
        elif not scored:  # their accuracy is not reported
            batch = replace(batch, labels=torch.zeros_like(batch.text))
        task = task_batch(batch, target, masked_share=masked_share, seed=seed)
        task = task.to(target.device)
        scores = _scores(source, target, (of_x, of_y), mapped, task, reaches)
        for name, values in scores.items():
            sums[name] = sums.get(name, 0) + values.double().sum()
        n += len(task.targets)
    return _means(sums, n, scored=scored)


def _means(sums: Mapping[str, Tensor], n: int, *, scored: bool) -> Injected:
    """Return means over `n` answers; only the agreement, where no truth is known."""
    if not n:
        raise UserError(
            "Expected `texts` of two tokens or more, but all have only one. Give longer texts."
        )

    means = {name: float(total) / n for name, total in sums.items()}
    if not scored:
        return Injected(None, None, None, None, None, means["agreement"], n)
    penalty = means["loss"] - means["native_loss"]
    return Injected(**means, penalty=penalty, n=n)


def _self_test(model: FrozenModel, batch: TextBatch) -> None:
    """Raise unless injecting a model's own states changes nothing on a few texts."""
    few = {name: part[:SELF_TEST] for name, part in batch.inputs_x.items()}
    model.self_test(_on(model.device, few))


Reaches = Sequence[
    tuple[FrozenModel, int, Reach]
]  # which rows are far, for a model at a site


def _scores(
    source: FrozenModel,
    target: FrozenModel,
    site: tuple[int, int],
    mapped: Callable[[Tensor], Tensor],
    task: TaskBatch,
    reaches: Reaches,
) -> dict[str, Tensor]:
    """Score each unit of a batch, a text or a token, in the fields of `Injected`."""
    rows = read_rows(source, task.inputs, [site[0]], task.rows)[0]
    states = mapped(rows.to(source.device)).to(target.device)
    _check_shape(states, len(rows), target)
    for model, at, reach in reaches:
        read = read_rows(model, task.inputs, [at], task.rows)
        far = reach.beyond(read).to(states.device)
        own = read_rows(target, task.inputs, [site[1]], task.rows)[0]
        states = own.where(far[:, None], states)

    own_logits = chosen(target.logits(task.inputs), task.targets)
    native = unit_answers(own_logits, task.targets)
    logits = stitched_logits(target, task.inputs, site[1], task.rows, states)
    injected = unit_answers(chosen(logits, task.targets), task.targets)
    return {
        "loss": injected.loss,
        "native_loss": native.loss,
        "accuracy": injected.correct,
        "native_accuracy": native.correct,
        "agreement": agreement(injected.answer, own_logits.argmax(-1)),
    }


def _check_shape(states: Tensor, rows: int, target: FrozenModel) -> None:
    """Raise unless a map gave one row of the target's width for each of `rows`."""
    if states.shape != (rows, target.width):
        raise UserError(
            f"Expected `map` to give rows of shape {(rows, target.width)}, those of {target.name}, but got "
            f"{tuple(states.shape)}."
        )


def _check(
    source: FrozenModel,
    target: FrozenModel,
    texts: Sequence[str],
    longest: int,
    *,
    labelled: bool,
) -> None:
    if target.task is None or target.regression:
        why = target.no_task
        if target.regression:
            why = "predicts a number"
        raise UserError(
            f"Expected `model_y` to be a classifier or a language model, but {target.name} {why}. Name another "
            "model; maps can still be fitted to its states."
        )
    if labelled and target.task != "classification":
        raise UserError(
            f"Expected no `labels` for the language model {target.name}: it predicts tokens."
        )
    tokens, _ = tokenised([source, target], texts, None, longest)
    if not tokens.alike:
        raise UserError(
            f"Expected models of one tokenizer, since every token's state is replaced, but those of {source.name} and "
            f"{target.name} differ on these texts. Compare them by `rows` 'words', with `train.py fit`."
        )
    leak = gives_answers(source, target)
    if leak is not None:
        raise UserError(
            f"{leak}: a low loss would mean nothing. Name models of one kind; states can still be mapped."
        )


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
