"""Injection of mapped states, from models (by name, folder or loaded), a map and texts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from aligners.api.array_maps import ArrayMap
from aligners.api.model_states import Model, _batches, _on, load, states, tokenised
from aligners.datamodules.batches import TextBatch
from aligners.datamodules.rows.far import SAMPLE_TEXTS, FarRows, Reach
from aligners.datamodules.rows.read_rows import read_rows
from aligners.datamodules.task_targets import TaskBatch, check_mask, task_batch
from aligners.errors import UserError, check_known
from aligners.injection.behaviour import stitched_logits
from aligners.injection.comparing.read_answers import divergences
from aligners.injection.routes import gives_answers
from aligners.injection.scoring.task_scores import (
    agreement,
    check_labels,
    chosen,
    unit_answers,
)
from aligners.models.model import FrozenModel

__all__ = ["Injected", "inject", "logit_lens"]

# What is known of an answer only where the right one is.
SCORED = ("loss", "native_loss", "penalty", "accuracy", "native_accuracy")
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
        kl: KL(own ‖ injected) of the distributions over classes or tokens, in nats per answer.
    """

    loss: float | None
    native_loss: float | None
    penalty: float | None
    accuracy: float | None
    native_accuracy: float | None
    agreement: float
    n: int
    kl: float


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

    read = partial(
        states, batch_size=batch_size, max_length=max_length, far_rows=far_rows
    )
    reaches = []
    for frozen, place in ((source, of_x), (target, of_y)):
        sample = read(frozen, texts[:SAMPLE_TEXTS], [place])  # it says which are far
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


def logit_lens(model: Model, states: Tensor, *, site: int | None = None) -> Tensor:
    """Return the logits that a language model's final norm and head give for any states, such as mapped ones.

    Of a model's own states below its last site this is the logit lens (nostalgebraist 2020, "interpreting GPT"); of
    states that a map takes there, it is a tuned lens (Belrose et al. 2023, arXiv 2303.08112, equation 3).

    Args:
        model: a causal or masked language model, as in `load`.
        states: (N, d).
        site: where they stand: L, the output of the last block, or L + 1, that of the final norm. Default: L.

    Returns:
        (N, V). Gradients flow to the states.

    Raises:
        ValueError: the model predicts no tokens, has no such site, or the states have another shape.
    """
    frozen = load(model)
    place = frozen.depth if site is None else site
    frozen.check_site(place, "site")
    if place < frozen.depth:
        raise UserError(
            f"Expected `site` L = {frozen.depth} or above, where norm and head alone follow, but got {place}. "
            "`inject` runs the blocks above a site."
        )
    if frozen.task not in ("causal", "masked"):
        raise UserError(
            f"Expected a `model` that predicts tokens, but {frozen.name} is a {type(frozen.model).__name__}."
        )
    if states.ndim != 2 or states.shape[1] != frozen.width:
        raise UserError(
            f"Expected `states` of shape (N, d = {frozen.width}), but got {tuple(states.shape)}."
        )
    # Each is the only token of a text: no block reads the tokens.
    tokens = torch.zeros(len(states), 1, dtype=torch.long)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    return frozen.tail(inputs, place, states[:, None])[:, 0]


def _means(sums: Mapping[str, Tensor], n: int, *, scored: bool) -> Injected:
    """Return means over `n` answers; only the agreement, where no truth is known."""
    if not n:
        raise UserError(
            "Expected `texts` of two tokens or more, but all have only one. Give longer texts."
        )

    means = {name: float(total) / n for name, total in sums.items()}
    if not scored:
        unknown: dict[str, None] = dict.fromkeys(SCORED)
        return Injected(**unknown, agreement=means["agreement"], n=n, kl=means["kl"])
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
    injected_logits = chosen(logits, task.targets)
    injected = unit_answers(injected_logits, task.targets)
    return {
        "loss": injected.loss,
        "native_loss": native.loss,
        "accuracy": injected.correct,
        "native_accuracy": native.correct,
        "agreement": agreement(injected.answer, own_logits.argmax(-1)),
        "kl": divergences(own_logits, injected_logits),
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
