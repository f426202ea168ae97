"""Two frozen models on a batch of texts: their states, a dictionary's codes, their answers, also with states moved."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from aligners.datamodules.batches import TextBatch
from aligners.datamodules.rows.policies import RowKind, Rows
from aligners.datamodules.rows.read_rows import choose_rows, gather_rows
from aligners.datamodules.task_targets import Targets, TaskBatch, check_mask
from aligners.errors import UserError
from aligners.injection.comparing.read_answers import Asked, divergences
from aligners.injection.scoring.task_scores import chosen, divergence
from aligners.models.architectures import Component
from aligners.models.model import FrozenModel
from aligners.similarity.latents.dictionary import Firing, PairedDictionary, firing

MEANS = ("mean", "words_mean")  # rows that are no states
X, Y = 0, 1

# Codes (S, N, m) of paired rows (S, N, d_x) and (S, N, d_y).
Codes = Callable[[Tensor, Tensor], Tensor]


class Moved(NamedTuple):
    """A model's answers where states of some texts were moved.

    Attributes:
        units: (U',) numbers of those texts' units among the U of the batch.
        logits: (U', C) float32.
    """

    units: Tensor
    logits: Tensor


@dataclass(frozen=True, eq=False)
class ReadBatch:
    """What two models compute on a batch of B texts with T tokens, at S site pairs, on N rows and U units.

    Attributes:
        task: the question about the texts, which decides what both models read.
        rows: where the rows are.
        states: of X and of Y, (B, T, d) at each site pair.
        vectors: their rows, (S, N, d) float32.
        entries: the codes above 0 at each site pair.
        answers: of X and of Y, (U, C) float32 logits.
    """

    task: TaskBatch
    rows: Rows
    states: tuple[list[Tensor], list[Tensor]]
    vectors: tuple[Tensor, Tensor]
    entries: list[Firing]
    answers: tuple[Tensor, Tensor]

    def divergences(self) -> Tensor:
        """Return KL(Y's answer ‖ X's answer) of each unit in nats, (U,) float64."""
        return divergences(self.answers[Y], self.answers[X])

    def texts_of(self, entries: Firing) -> Tensor:
        """Return the numbers in the batch, ascending, of the texts that have some of these entries."""
        return self.rows.owner[entries.row].unique()


class ModelPair:
    """Two frozen models of one tokenizer and task, and a dictionary of their states.

    Args:
        models: X and Y.
        sites: site pairs (of X, of Y), in the dictionary's order.
        dictionary: of both models, in the units of their states.
        codes: gives the dictionary's codes of paired rows, each row's for itself.
        asked: what both models are asked.
        kind: kind of the rows. Other positions keep their states, but those behind them follow.
        component: what a state is: the residual stream, or what a sub-layer adds to it.
        leave_out_far: whether rows that are far from all others keep their states, too.

    Raises:
        ValueError: see `why_unasked`; or the dictionary has other sites or widths than the models.
    """

    def __init__(
        self,
        models: tuple[FrozenModel, FrozenModel],
        sites: Sequence[tuple[int, int]],
        dictionary: PairedDictionary,
        codes: Codes,
        asked: Asked,
        kind: RowKind,
        component: Component = "residual",
        *,
        leave_out_far: bool = True,
    ) -> None:
        why = why_unasked(asked, kind)
        if why is not None:
            raise UserError(
                f"Expected two models whose answers can be compared when states of theirs are moved, but {why}."
            )
        check_mask(models[X])
        _check_sizes(models, sites, dictionary)
        self.models = models
        sites_x, sites_y = zip(*sites, strict=True)
        self.sites = list(sites_x), list(sites_y)
        self.device = models[X].device
        self.dictionary = dictionary.to(self.device)
        self.codes = codes
        self.asked = asked
        self.kind = kind
        self.component = component
        self.leave_out_far = leave_out_far

    @property
    def sizes(self) -> tuple[int, int]:
        """S and m of the dictionary."""
        sites, latents, _ = self.dictionary.decoder_x.shape
        return sites, latents

    def apart(self, place: int) -> Tensor:
        """Return what latents add to Y more than to X for each unit of their codes at a site, (m, d)."""
        decoder_x = self.dictionary.decoder_x[place]
        return self.dictionary.decoder_y[place] - decoder_x

    def read(self, batch: TextBatch) -> ReadBatch:
        """Run both models on a batch that is on the CPU.

        Raises:
            ValueError: the heads of the two models have different sizes.
        """
        task = cast(TaskBatch, self.asked.of(batch))
        chosen_rows = choose_rows(batch, self.kind, leave_out_far=self.leave_out_far)
        task = task.to(self.device)
        rows = chosen_rows.rows[0].to(self.device)
        states, vectors, answers = [], [], []
        for model, sites in zip(self.models, self.sites, strict=True):
            read = model.front(task.inputs, sites, self.component)
            by_site = dict(zip(sites, read, strict=True))
            states.append(read)
            vectors.append(gather_rows(by_site, sites, rows, model.width))
            logits = model.logits(task.inputs)
            answers.append(chosen(logits, task.targets, model.class_map))
        self._check_heads(answers)

        with torch.autocast(self.device.type, enabled=False):
            codes = self.codes(vectors[X], vectors[Y])
        entries = [firing(of_site) for of_site in codes]
        return ReadBatch(
            task,
            rows,
            (states[X], states[Y]),
            (vectors[X], vectors[Y]),
            entries,
            (answers[X], answers[Y]),
        )

    def _check_heads(self, answers: Sequence[Tensor]) -> None:
        """Raise unless both models choose among equally many answers."""
        of_x, of_y = (logits.shape[-1] for logits in answers)
        if of_x != of_y:
            raise UserError(
                f"Expected heads of one size, whose answers can be compared, but {self.models[X].name} has {of_x} "
                f"answers and {self.models[Y].name} {of_y}."
            )

    def moved(
        self, read: ReadBatch, side: int, place: int, added: Tensor, texts: Tensor
    ) -> Moved:
        """Run a model on some texts, with something added to its states at a site.

        Args:
            read: the batch.
            side: 0 for X, 1 for Y.
            place: number of the site pair.
            added: (N, d) for the rows of all texts.
            texts: (B',) numbers of the texts to run, ascending.
        """
        units, targets = self._targets_of(read.task, texts)
        if not added.any():  # not even rounding may differ
            return Moved(units, read.answers[side][units])
        model = self.models[side]
        site = self.sites[side][place]
        vectors = read.vectors[side][place] + added
        states = read.rows.scatter(vectors, read.states[side][place])
        inputs = {name: value[texts] for name, value in read.task.inputs.items()}
        logits = model.tail(inputs, site, states[texts], self.component)
        return Moved(units, chosen(logits, targets, model.class_map))

    def _targets_of(self, task: TaskBatch, texts: Tensor) -> tuple[Tensor, Targets]:
        """Return the numbers of some texts' units, ascending, and the targets of a batch of these texts alone."""
        targets = task.targets
        logits = 1  # of each text
        if self.asked.what != "classes":
            logits = task.inputs["input_ids"].shape[1]
        units = torch.isin(targets.owner, texts).nonzero()[:, 0]
        before = targets.owner[units]
        owner = torch.searchsorted(texts, before)
        index = targets.index[units] + (owner - before) * logits
        return units, Targets(index, targets.answer[units], owner, len(texts))

    def slopes(self, read: ReadBatch, place: int, added: Tensor) -> Tensor:
        """Return the gradient of Σ KL(Y ‖ X) over the units with respect to X's rows at a site: (N, d_x).

        Args:
            read: the batch.
            place: number of the site pair.
            added: (N, d_x) what is added to the rows first.
        """
        model = self.models[X]
        site = self.sites[X][place]
        inputs = read.task.inputs
        vectors = read.vectors[X][place] + added
        states = read.rows.scatter(vectors, read.states[X][place])
        states.requires_grad_()
        with torch.enable_grad():
            logits = model.tail(inputs, site, states, self.component)
            answers = chosen(logits, read.task.targets, model.class_map)
            loss = divergence(answers, read.answers[Y]).sum()
            (gradient,) = torch.autograd.grad(loss, states)
        return gather_rows({site: gradient}, [site], read.rows, model.width)[0]


def why_unasked(asked: Asked, kind: RowKind) -> str | None:
    """Say why latents cannot be removed or moved while two models answer, as a clause; None: they can."""
    if asked.what is None:
        return asked.why
    if asked.model.task is None:
        return f"{asked.model.name} {asked.model.no_task}"
    if kind.policy in MEANS:
        return (
            f"rows {kind.policy!r} are means, and no token of a model has such a state"
        )
    return None


def why_not_carried(pair: ModelPair, *, one_space: bool) -> str | None:
    """Say why states of X cannot be moved to Y's along decoders, as a clause; None: they can.

    Args:
        pair: the models.
        one_space: whether the states of both are in one space, as those of a model and its fine-tuning.
    """
    x, y = pair.models
    if x.width != y.width:
        return (
            f"{x.name} has states of width {x.width} and {y.name} of {y.width}, so that a direction of one is none of "
            "the other"
        )
    if not one_space:
        return f"a direction of {y.name} is none of {x.name} where neither was trained from the other"
    if x.quantised is not None:
        return f"gradients do not pass through {x.name}, which is quantised ({x.quantised})"
    return None


def _check_sizes(
    models: Sequence[FrozenModel],
    sites: Sequence[tuple[int, int]],
    dictionary: PairedDictionary,
) -> None:
    """Raise unless a dictionary has the site pairs and widths of two models."""
    expected = len(sites), *(model.width for model in models)
    given = (
        len(dictionary.decoder_x),
        *(decoder.shape[2] for decoder in dictionary.decoders),
    )
    if given != expected:
        raise UserError(
            f"Expected a `dictionary` with as many site pairs and the widths of {models[X].name} and {models[Y].name}, "
            f"{expected}, but got {given}."
        )
