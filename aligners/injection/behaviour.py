"""Y's response to states that are put into it: the stitched forward pass, its answers, and the columns of a report."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from aligners.datamodules.rows.policies import Rows
from aligners.datamodules.rows.read_rows import read_rows
from aligners.datamodules.task_targets import TaskBatch
from aligners.injection.routes import Route
from aligners.injection.scoring.scores import (
    ScoredTask,
    Sums,
    interval,
    named,
    per_text_sums,
    score_interval,
    task_score,
)
from aligners.injection.scoring.task_scores import (
    UnitAnswers,
    agreement,
    batch_answers,
    batch_divergences,
    chosen,
    one_after_another,
)
from aligners.models.architectures import Component
from aligners.models.classifiers import pooler_of, with_head
from aligners.models.model import FrozenModel, Inputs


def mapped_rows(layer: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Map rows (S, N, d_x) by φ in full precision, whatever precision the models run in: (S, N, d_y)."""
    with torch.autocast(rows.device.type, enabled=False):
        return layer(rows)


def stitched_logits(
    target: FrozenModel,
    inputs: Inputs,
    site: int,
    rows: Rows,
    mapped: Tensor,
    component: Component = "residual",
) -> Tensor:
    """Return the target's logits when its real tokens have these states at a site.

    Args:
        target: the frozen model; no block up to `site` is run.
        inputs: inputs of the batch, (B, T).
        site: m, the site of the target.
        rows: positions where the states belong.
        mapped: (N, d) states. Gradients flow to them. Padding gets zeros, which no token attends to.
        component: what the states are. For a sub-layer, only its own output is replaced; all else runs as usual.
    """
    blank = mapped.new_zeros(*inputs["input_ids"].shape, target.width)
    states = rows.scatter(mapped, blank)
    return target.tail(inputs, site, states, component)


def pair_logits(route: Route, pair: int, batch: TaskBatch, mapped: Tensor) -> Tensor:
    """Return the target's logits with mapped rows (N, d_y) at the site pair of this number: (U, C)."""
    logits = _stitched(route, pair, batch, mapped)
    return chosen(logits, batch.targets, route.target.class_map)


def bank_answers(
    route: Route, batch: TaskBatch, mapped: Tensor
) -> Iterator[UnitAnswers]:
    """Return the target's answers with mapped rows (S, N, d_y), holding only one site's logits at a time."""
    groups = route.target.class_map
    for pair, rows in enumerate(mapped):
        logits = _stitched(route, pair, batch, rows)
        yield batch_answers(logits, batch.targets, groups)


def _compared_answers(
    route: Route, batch: TaskBatch, mapped: Tensor, divergences: list[Tensor]
) -> Iterator[UnitAnswers]:
    """Yield what `bank_answers` does, and add KL(own ‖ injected) of each site, summed over texts, to `divergences`."""
    targets = batch.targets
    groups = route.target.class_map
    own = route.target.logits(batch.inputs)
    for pair, rows in enumerate(mapped):
        logits = _stitched(route, pair, batch, rows)
        kl = batch_divergences(logits, own, targets, groups)
        divergences.append(per_text_sums(kl, targets))
        yield batch_answers(logits, targets, groups)


def _stitched(route: Route, pair: int, batch: TaskBatch, mapped: Tensor) -> Tensor:
    """Return the logits of a whole batch with mapped rows at a site pair."""
    site = route.put_at[pair]
    return stitched_logits(
        route.target, batch.inputs, site, batch.rows, mapped, route.component
    )


class ReadStates:
    """The rows of several models, at the sites that some routes need.

    Args:
        rows: model -> (its sites, their rows (S, N, d) float32).
    """

    def __init__(self, rows: Mapping[FrozenModel, tuple[list[int], Tensor]]) -> None:
        self._rows = rows

    def sources(self, route: Route) -> Tensor:
        """Return the rows (S, N, d_x) that the route reads."""
        return self._at(route.source, route.read_at)

    def targets(self, route: Route) -> Tensor:
        """Return the target's own states (S, N, d_y) at the sites where the route puts others."""
        return self._at(route.target, route.put_at)

    def _at(self, model: FrozenModel, sites: list[int]) -> Tensor:
        held, rows = self._rows[model]
        if sites == held:
            return rows
        # one by one: a list index would first be copied to the device, which has to be waited for
        return torch.stack([rows[held.index(site)] for site in sites])


def read_all(
    routes: Sequence[Route], batch: TaskBatch, *, targets: bool = False
) -> ReadStates:
    """Run each model's front once, as far as any route needs it.

    Args:
        routes: routes of the run, all of one component.
        batch: a batch on the run's device.
        targets: whether to read also the targets' own states at the sites where others are put.
    """
    wanted: dict[FrozenModel, set[int]] = defaultdict(set)
    for route in routes:
        wanted[route.source].update(route.read_at)
        if targets:
            wanted[route.target].update(route.put_at)
    component = routes[0].component
    read: dict[FrozenModel, tuple[list[int], Tensor]] = {}
    for model, at in wanted.items():
        sites = sorted(at)
        stored = batch.texts.stored.get(model)
        rows = read_rows(model, batch.inputs, sites, batch.rows, component, stored)
        read[model] = sites, rows
    return ReadStates(read)


@torch.no_grad()
def own_logits(target: FrozenModel, batch: TaskBatch) -> Tensor:
    """Return the target's own logits, with nothing replaced, (U, C), without gradients."""
    return chosen(target.logits(batch.inputs), batch.targets, target.class_map)


@torch.no_grad()
def own_answers(target: FrozenModel, batch: TaskBatch) -> UnitAnswers:
    """Return the target's own answers, with nothing replaced."""
    return batch_answers(target.logits(batch.inputs), batch.targets, target.class_map)


BEHAVIOUR = ["correct", "loss", "agree", "answer", "units"]
BEHAVIOUR_COLUMNS = (
    *("accuracy", "accuracy_low", "accuracy_high"),
    *("score", "score_low", "score_high"),
    *("loss", "penalty", "penalty_low", "penalty_high"),
    *("accuracy_penalty", "score_penalty", "perplexity", "bits_per_byte", "agreement"),
    *("kl", "kl_low", "kl_high", "accuracy_source_pooler"),
)
# Methods that need no site, for classes and for tokens: ceilings, then floors.
OF_LABELS = (
    "native_x",
    "native_y",
    "random_classifier",
    "random_label",
    "constant_label",
)
OF_TOKENS = ("native_x", "native_y", "unigram")
# A random head of two classes agrees with Y's own or contradicts it, by chance, so several heads are drawn.
DRAWS = {"random_classifier": 20}
BIT = math.log(2)  # nats

# The answers of each model that knows the task, with nothing replaced.
Natives = dict[FrozenModel, UnitAnswers]


class Behaviour:
    """Runs Y's tail on mapped states, and scores the methods that need no site.

    Args:
        route: from X into Y.
        asked: the task of the held-out texts.
        whole: methods that need no site, out of `OF_LABELS` or `OF_TOKENS`; `native` is Y itself.
        seed: seed of the random floors.
        token_counts: (V,) number of times each token occurs in the fitting texts, for `unigram`.
        source_pooler: whether to score Y's classifier on the output of X's pooler too, at Y's last site.
        kl: whether to compare the distributions of Y's answers with its own too. Numbers have none.
    """

    def __init__(
        self,
        route: Route,
        asked: ScoredTask,
        whole: Sequence[str],
        seed: int,
        token_counts: Tensor | None = None,
        *,
        source_pooler: bool = False,
        kl: bool = False,
    ) -> None:
        self.route = route
        self.asked = asked
        self.whole = tuple(whole)
        self.seed = seed
        self.source_pooler: dict[str, Any] = {}
        self.scored = list(BEHAVIOUR)
        if source_pooler:
            self.source_pooler = self._fitting_pooler()
        if self.source_pooler:
            self.scored.append("pooled")
        self._compares = kl and not asked.regression
        if self._compares:
            self.scored.append("kl")
        self._random = asked.random
        self._unigrams: Tensor | None = None
        if token_counts is not None:
            counts = token_counts + 1  # so that no token has probability zero
            self._unigrams = (counts / counts.sum()).log()

    def _fitting_pooler(self) -> dict[str, Any]:
        """Return X's pooler, found by its path in the model, if Y is as wide and has one there; else None."""
        source, target = self.route.source, self.route.target
        pooler = pooler_of(source.model)
        same_path = pooler.keys() == pooler_of(target.model).keys()
        if same_path and source.width == target.width:
            return pooler
        return {}

    def injected(
        self, batch: TaskBatch, mapped: Tensor, own: UnitAnswers
    ) -> dict[str, Tensor]:
        """Score Y with the mapped rows (S, N, d_y) at each site: quantity -> (S, B).

        Args:
            batch: the targets of the task on a batch.
            mapped: states that are put into Y.
            own: Y's own answers.
        """
        divergences: list[Tensor] = []
        if self._compares:
            answers = _compared_answers(self.route, batch, mapped, divergences)
        else:
            answers = bank_answers(self.route, batch, mapped)
        sums = self._sums(answers, batch, own)
        if divergences:
            sums["kl"] = torch.stack(divergences)
        if self.source_pooler:
            sums["pooled"] = self._through_source_pooler(batch, mapped)
        return sums

    def _through_source_pooler(self, batch: TaskBatch, mapped: Tensor) -> Tensor:
        """Score Y's classifier where X's pooler reads the mapped rows: 1 if right, (S, B); NaN below the top site."""
        target = self.route.target
        right = mapped.new_full((len(mapped), batch.targets.texts), torch.nan)
        with with_head(target.model, self.source_pooler):
            for place, site in enumerate(self.route.put_at):
                if site != target.depth:
                    continue
                rows = mapped[place]
                logits = stitched_logits(target, batch.inputs, site, batch.rows, rows)
                answers = batch_answers(logits, batch.targets, target.class_map)
                right[place] = per_text_sums(answers.correct, batch.targets)
        return right

    def without_sites(self, batch: TaskBatch, natives: Natives) -> dict[str, Tensor]:
        """Score a method that uses no map: quantity -> (answers, 1, B); `DRAWS` answers if it is drawn."""
        answers = self._without_sites(batch, natives)
        sums = self._sums(answers, batch, natives[self.route.target])
        return {name: values[:, None] for name, values in sums.items()}

    def _without_sites(
        self, batch: TaskBatch, natives: Natives
    ) -> Iterator[UnitAnswers]:
        for name in self.whole:
            if name in DRAWS:
                yield from self._fresh_heads(batch)
            else:
                yield self._answers(name, batch, natives)

    def _sums(
        self, each: Iterable[UnitAnswers], batch: TaskBatch, own: UnitAnswers
    ) -> dict[str, Tensor]:
        """Sum over the units of each text, for several answers made one at a time: quantity -> (answers, B)."""
        targets = batch.targets
        results: list[dict[str, Tensor]] = []
        for given in each:
            agree = given.correct
            if not self.asked.regression:
                agree = agreement(given.answer, own.answer)
            sums = {
                "correct": per_text_sums(given.correct, targets),
                "loss": per_text_sums(given.loss, targets),
                "units": per_text_sums(torch.ones_like(given.loss), targets),
                "agree": per_text_sums(agree, targets),
            }
            sums["answer"] = torch.full_like(sums["loss"], torch.nan)
            if self.asked.unit == "text":  # a text of many tokens has no single answer
                sums["answer"] = given.answer
            results.append(sums)
        table = {}
        for name in BEHAVIOUR:
            table[name] = torch.stack([sums[name] for sums in results])
        return table

    def _fresh_heads(self, batch: TaskBatch) -> Iterator[UnitAnswers]:
        """Return the answers of freshly drawn heads to Y's own last states."""
        target = self.route.target
        (states,) = target.front(batch.inputs, [target.depth])
        draws = DRAWS["random_classifier"]
        class_map = one_after_another(target.class_map)
        for draw in range(draws):
            with target.fresh_head(draws * self.seed + draw):  # differ for every seed
                logits = target.tail(batch.inputs, target.depth, states)
            yield batch_answers(logits, batch.targets, class_map)

    def _answers(self, name: str, batch: TaskBatch, natives: Natives) -> UnitAnswers:
        """Return the answers of a method that needs no site."""
        right = batch.targets.answer
        if name in ("native", "native_y"):
            return natives[self.route.target]
        if name == "native_x":
            if self.route.source in natives:
                return natives[self.route.source]
            nothing = _nothing(right)  # the source need not know the task
            return UnitAnswers(nothing, nothing, nothing)
        if name == "unigram":
            return self._by_frequency(right)
        if name == "constant_label":
            return self._unread(torch.full_like(right, self.asked.constant), right)
        # copied once: a copy to the device has to be waited for
        self._random = cast(Tensor, self._random).to(right)
        return self._unread(self._random[batch.texts.text], right)

    def _by_frequency(self, right: Tensor) -> UnitAnswers:
        """Answer by the frequencies of tokens in the fitting texts."""
        unigrams = cast(Tensor, self._unigrams).to(right.device)
        self._unigrams = (
            unigrams  # copied once: a copy to the device has to be waited for
        )
        answer = unigrams.argmax().expand_as(right)
        correct = (answer == right).float()
        return UnitAnswers(-unigrams[right], correct, answer.double())

    def _unread(self, answer: Tensor, right: Tensor) -> UnitAnswers:
        """Give answers that ignore the texts: classes, which have no loss, or numbers."""
        if self.asked.regression:
            loss = (answer - right).square()
            return UnitAnswers(loss, _nothing(right), answer.double())
        correct = (answer == right).float()
        return UnitAnswers(_nothing(right), correct, answer.double())


def _nothing(right: Tensor) -> Tensor:
    """Return NaN for each unit, where there is no answer."""
    return torch.full_like(right, torch.nan, dtype=torch.float32)


def behaviour_columns(
    table: Sums, native: Sums, asked: ScoredTask, seed: int
) -> dict[str, Tensor]:
    """Return each of `BEHAVIOUR_COLUMNS` as (methods, S), over all texts; NaN where it does not apply.

    Where numbers are predicted, there is no accuracy and no penalty in nats; agreement is Pearson's correlation with
    Y's own answers.

    Args:
        table: quantity -> (methods, S, texts).
        native: quantity -> (texts,), scores of Y itself.
        asked: the task of the texts.
        seed: seed of the resampling of texts.
    """
    total = native["units"].sum()
    loss = table["loss"].sum(-1) / total
    columns = dict.fromkeys(BEHAVIOUR_COLUMNS, torch.full_like(loss, torch.nan))
    columns["loss"] = loss
    columns |= _score_columns(table, native, asked, seed)
    if asked.regression:
        agree = task_score("pearson", table["answer"], native["answer"])
    else:
        agree = table["agree"].sum(-1) / total
        columns |= _penalty_columns(table, native, seed)
    columns["agreement"] = agree
    if asked.unit == "token":
        columns["perplexity"] = loss.exp()
    if asked.bytes_per_token:
        columns["bits_per_byte"] = loss / BIT / asked.bytes_per_token
    if "kl" in table:
        units = native["units"].expand_as(table["kl"])
        columns |= named("kl", interval(table["kl"], units, seed=seed))
    if "pooled" in table:
        columns["accuracy_source_pooler"] = table["pooled"].mean(-1)
    return columns


def _penalty_columns(table: Sums, native: Sums, seed: int) -> dict[str, Tensor]:
    """Return the loss minus Y's own, with its interval."""
    units = native["units"].expand_as(table["loss"])
    penalty = interval(table["loss"] - native["loss"], units, seed=seed)
    return named("penalty", penalty)


def _score_columns(
    table: Sums, native: Sums, asked: ScoredTask, seed: int
) -> dict[str, Tensor]:
    """Return accuracy and the task's score, and what each loses against Y's own."""
    units = native["units"].expand_as(table["correct"])
    accuracy = interval(table["correct"], units, seed=seed)
    own_accuracy = native["correct"].sum() / native["units"].sum()
    score, own_score = accuracy, own_accuracy
    if asked.labels is not None and asked.score != "accuracy":
        score = score_interval(asked.score, table["answer"], asked.labels, seed=seed)
        own_score = task_score(asked.score, native["answer"], asked.labels)
    columns = named("accuracy", accuracy) | named("score", score)
    columns["accuracy_penalty"] = own_accuracy - accuracy[0]
    columns["score_penalty"] = own_score - score[0]
    return columns
