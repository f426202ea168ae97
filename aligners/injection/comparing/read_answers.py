"""Reads a model's states and answers on batches in several layouts, and determines what two models can be asked."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.rows.policies import RowKind, Rows, rows_of_each
from aligners.datamodules.rows.read_rows import choose_rows, gather_rows
from aligners.datamodules.task_targets import TaskBatch, task_batch
from aligners.injection.scoring.task_scores import chosen, divergence, unit_answers
from aligners.models.model import FrozenModel, Inputs

Run = Callable[[Inputs], list[Tensor]]
PADDED = 7  # columns of additional padding
UNITS = 2**22  # logits that are compared at a time, in float64
KINDS = {
    "classification": "classes",
    "causal": "next tokens",
    "masked": "masked tokens",
}


def in_two(run: Run, inputs: Inputs) -> list[Tensor]:
    """Return the states of a batch run in reverse order and in two parts, each padded to its own longest text."""
    size, out = inputs["input_ids"].shape, list[Tensor]()
    for part in torch.arange(size[0]).flip(0).to(inputs["input_ids"].device).chunk(2):
        columns = inputs["attention_mask"][part].any(0).nonzero()[:, 0]
        states = run({name: value[part][:, columns] for name, value in inputs.items()})
        out = out or [state.new_zeros(*size, state.shape[-1]) for state in states]
        for whole, state in zip(out, states, strict=True):
            whole[part[:, None], columns] = state
    return out


def padded(run: Run, inputs: Inputs, most: int | None = None) -> list[Tensor]:
    """Return the states of a batch with additional padding on the left, limited by the model's `most` positions."""
    room = PADDED if most is None else min(PADDED, most - inputs["input_ids"].shape[1])
    return [
        state[:, room:]
        for state in run(
            {name: pad(value, (room, 0)) for name, value in inputs.items()}
        )
    ]


class Asked:
    """The question put to two models on the same texts, so that their answers can be compared.

    Args:
        old: the first model.
        new: the second model.
        labelled: whether the texts have labels that both classifiers should predict.
        seed: seed of masks.
        alike: whether both models get the same tokens from the texts.

    Attributes:
        what: kind of question: "classes", "next tokens", "masked tokens", "similarities of texts" (neither model has a
            head), or None.
        why: reason why nothing is compared, if so.
        scored: whether the answers have a loss.
    """

    def __init__(
        self,
        old: FrozenModel,
        new: FrozenModel,
        *,
        labelled: bool,
        seed: int,
        alike: bool,
    ) -> None:
        self.model, self.seed, self.labelled, self.why = old, seed, labelled, ""
        self.what: str | None = (
            "similarities of texts" if old.task is None else KINDS[old.task]
        )
        if not alike:
            self.why = "their tokenizers differ, so they answer about different tokens"
        elif old.task != new.task or old.unasked or new.unasked:
            self.why = f"their heads answer different questions: {_answered(old)} and {_answered(new)}"
        elif old.regression or new.regression:
            self.why = "a head predicts numbers, which have no distribution to compare"
        elif old.class_map is None and old.label_names != new.label_names:
            self.why = "their heads name their classes differently"
        self.what = None if self.why else self.what
        self.scored = self.what in ("next tokens", "masked tokens") or (
            self.what == "classes" and labelled
        )

    def of(self, batch: TextBatch) -> TaskBatch | None:
        """Return the question about a batch, on the CPU; None where no head is asked."""
        if self.what is None or self.model.task is None:
            return None
        if not self.labelled and self.model.task == "classification":
            batch = replace(batch, labels=torch.zeros_like(batch.text))
        return task_batch(batch, self.model, seed=self.seed)


def _answered(model: FrozenModel) -> str:
    """Describe in words what a model's head answers."""
    if model.task is not None:
        return f"{model.name} answers {KINDS[model.task]}"
    why = "no head" if model.unasked is None else f"it {model.unasked}"
    return f"{model.name} answers nothing ({why})"


@dataclass
class Reader:
    """Reads one model, or a variant of it.

    Attributes:
        model: the model.
        number: which of the two models' inputs it reads.
        sites: sites at which the model is read.
        kind: kind of the rows.
        layout: layout of a batch.
    """

    model: FrozenModel
    number: int
    sites: Sequence[int]
    kind: RowKind
    layout: Callable[[Run, Inputs], list[Tensor]] = lambda run, inputs: run(
        inputs
    )  # the batch as it is

    def rows_of(self, batch: TextBatch) -> Rows:
        """Return where the rows of a batch are, on the CPU, without those that are marked as far from all others."""
        rows = choose_rows(batch, self.kind, leave_out_far=True).rows
        return rows[self.number]

    def states(self, inputs: Inputs, sites: Collection[int]) -> dict[int, Tensor]:
        """Return the states at each site, (B, T, d), for inputs on any device."""
        placed, wanted = (
            {name: value.to(self.model.device) for name, value in inputs.items()},
            sorted(set(sites)),
        )
        return dict(
            zip(
                wanted,
                self.layout(partial(self.model.front, sites=wanted), placed),
                strict=True,
            )
        )

    def __call__(
        self,
        batch: TextBatch,
        asked: Asked | None = None,
        task: TaskBatch | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Read the rows (S, N, d), float32, and the answers.

        Answers are logits (U, C), float32. Models without a head give mean last states of unit length, (B, d). Answers
        are None if nothing is compared or asked.
        """
        model, last = self.model, self.model.depth
        answers = asked is not None and asked.what is not None
        states = self.states(
            batch.inputs[self.number], [*self.sites, *([last] if answers else [])]
        )
        rows = gather_rows(
            states, self.sites, self.rows_of(batch).to(model.device), model.width
        )
        if not answers:
            return rows, None
        if task is None:
            whole = rows_of_each(batch, RowKind("mean"))[self.number].to(model.device)
            return rows, normalize(gather_rows(states, [last], whole, model.width)[0])
        return rows, self._answers(task.to(model.device), states[last])

    def _answers(self, task: TaskBatch, top: Tensor) -> Tensor:
        """Return the logits (U, C) that answer a task, from last states (B, T, d), or from those of masked texts."""
        model, last = self.model, self.model.depth
        if model.task == "masked":
            top = self.states(task.inputs, [last])[last]
        logits = model.tail(task.inputs, last, top)
        return chosen(logits, task.targets, model.class_map)


def divergences(own: Tensor, other: Tensor) -> Tensor:
    """Return KL(own ‖ other) of logits (U, C), in nats and in float64: (U,)."""
    size = max(1, UNITS // own.shape[-1])
    parts = zip(own.split(size), other.to(own.device).split(size), strict=True)
    return torch.cat(
        [divergence(theirs.double(), mine.double()) for mine, theirs in parts]
    ).clamp(min=0)


def answer_sums(
    asked: Asked, task: TaskBatch, old: Tensor, new: Tensor
) -> dict[str, Tensor]:
    """Return for each unit the divergence, the agreement and, if there is a right answer, both losses, each (U,)."""
    mine, theirs = (
        unit_answers(logits, task.targets.to(old.device))
        for logits in (old, new.to(old.device))
    )
    found = {
        "kl": divergences(old, new),
        "agree": (mine.answer == theirs.answer).double(),
    }
    found["units"] = torch.ones_like(found["kl"])
    return found | (
        {"loss_old": mine.loss, "loss_new": theirs.loss} if asked.scored else {}
    )
