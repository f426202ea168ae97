"""The two kinds of probes: of labelled spans of words, and structural ones, whose map lays out a sentence's tree."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from aligners.errors import UserError
from aligners.maps.base import BankLinear
from aligners.probing.probe_bank import (
    Bank,
    Examples,
    Probes,
    Variant,
    Words,
    answers,
    fresh_bank,
)
from aligners.probing.probing_tasks import Row, Task, pooled_ratio, score_columns
from aligners.probing.targets import Labels, Targets, targets_of
from aligners.probing.trees import (
    Trees,
    TreeScores,
    TreesPart,
    by_length,
    chain,
    predictions,
    tree_scores,
)

START = 0.05  # entries of a B of 64 x 64 are drawn from -START..START, as in the paper's code
WIDTH = 64
USUAL_RANK = 64  # more adds nothing (Hewitt and Manning 2019, §4.2 and Figure 5), and takes longer


class EdgeProbes(Probes):
    """Projection, attention within each span, and a network of two layers.

    Args:
        variants: A, the number of probes.
        width: d, of the states.
        labels: K, the number of labels.
        spans: S, 1 or 2 for each target.
        several: whether a target may have several labels, or none: each is then a question of its own.
        projection: width to which states are projected before they are pooled.
        hidden: width of the hidden layer.

    References:
        Tenney et al. 2019, "What do you learn from context? Probing for sentence structure in contextualized word
        representations", ICLR, §3.1 and Figure 1; as used by Merchant et al. 2020, §4.1.
    """

    control: Tensor

    def __init__(
        self,
        variants: Sequence[Variant],
        width: int,
        labels: int,
        spans: int = 1,
        several: bool = False,
        projection: int = 256,
        hidden: int = 256,
    ) -> None:
        super().__init__(variants, width)
        self.labels, self.spans, self.several = labels, spans, several
        self.projection, self.hidden = projection, hidden
        count = len(variants)
        self.projections = nn.ModuleList()
        self.attention = nn.ModuleList()
        for _ in range(spans):
            self.projections.append(BankLinear(count, width, projection))
        for _ in range(spans):
            self.attention.append(BankLinear(count, projection, 1))
        self.first = BankLinear(count, spans * projection, hidden)
        self.last = BankLinear(count, hidden, labels)
        control = torch.tensor([int(variant.control) for variant in variants])
        self.register_buffer("control", control, persistent=False)

    def forward(self, read: Tensor, part: Targets) -> Tensor:
        """Logits of each target: rows of words (A, n, d) -> (A, T, K)."""
        pooled = []
        layers = zip(self.projections, self.attention, strict=True)
        for span, (project, attend) in enumerate(layers):
            pooled.append(_pooled(project(read), attend, part.spans[:, span]))
        hidden = self.first(torch.cat(pooled, -1)).tanh()
        return self.last(nn.functional.layer_norm(hidden, (self.hidden,)))

    def true_labels(self, part: Targets) -> Tensor:
        """The labels that each variant is to give, (A, T, K) bool: those of the task, or of its control task."""
        return part.labels[self.control]

    def losses(self, read: Tensor, part: Targets) -> Tensor:
        """Negative log-likelihood of the labels of each target, in nats, (A, T)."""
        return self.surprise(self(read, part), part)

    def surprise(self, logits: Tensor, part: Targets) -> Tensor:
        """Negative log-likelihood of the labels of each target, in nats.

        Args:
            logits: (A, T, K).
            part: of T targets.

        Returns:
            (A, T); infinite for a target whose only label is not among the K.
        """
        labels = self.true_labels(part)
        if self.several:
            truth = labels.to(logits.dtype)
            loss = nn.functional.binary_cross_entropy_with_logits(
                logits, truth, reduction="none"
            )
            return loss.sum(-1)
        log_likelihood = logits.log_softmax(-1).masked_fill(~labels, -torch.inf)
        return -log_likelihood.amax(-1)


def _pooled(states: Tensor, attend: nn.Module, spans: Tensor) -> Tensor:
    """Average the rows of each span, weighted by attention: (A, n, p), (T, 2) -> (A, T, p)."""
    first, end = spans.unbind(1)
    longest = int((end - first).max())
    if longest == 1:
        return states[:, first]
    rows = first[:, None] + torch.arange(longest, device=states.device)
    real = rows < end[:, None]
    rows = rows.where(real, first[:, None])
    scores = attend(states)[..., 0][:, rows].masked_fill(~real, -torch.inf)
    weights = scores.softmax(-1)[..., None]
    return (weights * states[:, rows]).sum(2)


class EdgeScores(NamedTuple):
    """Of each of A probes and each of B sentences, over its targets, float64 on the CPU.

    Attributes:
        counts: (A, B, 4) labels given rightly, given, and true; targets whose labels are all right.
        targets: of all sentences.
    """

    counts: Tensor
    targets: Targets

    @property
    def sentences(self) -> int:
        """B."""
        return self.targets.count

    @property
    def about(self) -> Row:
        """The probe, and numbers of sentences and targets, for the report."""
        return {
            "probe": "edge",
            "n_sentences": len(self.targets.sentences),
            "n_targets": len(self.targets),
            "n_unknown": int(self.targets.unknown.sum()),
        }

    def measures(self, weights: Tensor) -> dict[str, Tensor]:
        """The measure, (A, R), where a sentence counts as often as `weights` (R, B) say."""
        return {"F1": f1(weights @ self.counts)}


@dataclass
class EdgeTask(Task):
    """A task of labelled spans, with its labels on the fitting words."""

    labels: Labels = field(init=False)
    baseline = "majority"

    def __post_init__(self) -> None:
        self.labels = Labels.of(self.name, self.words.sentences)
        super().__post_init__()

    def annotations(self, words: Words) -> Targets:
        """The targets of words."""
        return targets_of(self.labels, words, self.seed)

    def validation(self) -> Examples:
        """The targets of the validation words whose labels occur in fitting."""
        targets = self.annotations(self.watched)
        return Examples(self.watched, targets.only(targets.unknown == 0))

    def fresh(self, seed: int) -> Bank:
        """Make an untrained bank."""
        options = {**self.labels.shape, **self.sizes}
        return fresh_bank(EdgeProbes, self.variants, self.words, seed, **options)

    def about(self) -> dict[str, Any]:
        """What is kept beside a bank, as plain values."""
        return {
            "task": self.name,
            "labels": asdict(self.labels),
            "control_seed": self.seed,
        }

    def scores(self, bank: Bank | None, held: Words) -> EdgeScores:
        """As `Task.scores`; the baseline gives the most frequent labels."""
        targets = self.annotations(held)
        if bank is None:
            counted = majority(self.labels, targets)
        else:
            counted = counts(bank, Examples(held, targets))
        return EdgeScores(counted, targets)

    def columns(
        self, scores: Sequence[EdgeScores], variant: int, weights: Tensor
    ) -> Row:
        """F1 and accuracy, of all seeds together."""
        sums = torch.stack(
            [result.counts[variant] for result in scores]
        )  # (seeds, B, 4)
        targets = len(scores[0].targets) * len(scores)
        row = dict(score_columns("score", f1(weights @ sums.sum(0)), f1(sums.sum(1))))
        row["accuracy"] = accuracy(sums.sum((0, 1)), targets)
        return row

    def of_probe(
        self, scores: Sequence[EdgeScores], variant: int, weights: Tensor
    ) -> Row:
        """Parameters, which layers a mix reads, and how much better a probe is than that of the control task."""
        own = self.variants[variant]
        parameters = sum(weight.numel() for weight in self.banks[0].probes.parameters())
        row: Row = {"parameters": parameters // len(self.variants)}
        if own == Variant("model", None):
            row["centre_of_gravity"] = centre_of_gravity(self.banks, variant)

        control = own._replace(control=True)
        if control in self.variants:
            both = [variant, self.variants.index(control)]
            sums = torch.stack([result.counts for result in scores]).sum(0)[both]
            score, control_score = f1(weights @ sums)
            row["control"] = control_score[0]
            row |= score_columns("selectivity", score - control_score)
        return row


def centre_of_gravity(banks: Sequence[Bank], variant: int) -> float:
    """The layer that a mix reads on average, Σ_l l · weight_l, mean over seeds (Tenney et al. 2019b, §3.2)."""
    layers = torch.tensor([float(place.layer) for place in banks[0].places])
    weights = torch.stack([bank.readings.weights()[variant].cpu() for bank in banks])
    return float(weights.mean(0) @ layers)


def counts(bank: Bank, examples: Examples) -> Tensor:
    """`EdgeScores.counts` of a bank: it gives the most likely label, or all that are more likely than not."""
    probes = cast(EdgeProbes, bank.probes)
    targets = cast(Targets, examples.annotations)
    sums = torch.zeros(len(bank.variants), targets.count, 4, dtype=torch.float64)
    of_the_task = 1 - probes.control.cpu()[:, None]
    for part, logits in answers(bank, examples):
        if probes.several:
            given = logits > 0
        else:
            best = logits.argmax(-1)
            given = nn.functional.one_hot(best, logits.shape[-1]).bool()
        counted = _of_targets(
            given, probes.true_labels(part), part.unknown * of_the_task
        )
        sums.index_add_(1, part.sentence, counted)
    return sums


def majority(labels: Labels, targets: Targets) -> Tensor:
    """`EdgeScores.counts` of the most frequent labels of fitting, given to every target: (1, B, 4)."""
    most_frequent = labels.sets[0][0]
    given = labels.multi_hot(most_frequent).expand(1, len(targets), -1)
    counted = _of_targets(given, targets.labels[:1], targets.unknown[None])
    sums = torch.zeros(1, targets.count, 4, dtype=torch.float64)
    return sums.index_add_(1, targets.sentence, counted)


def _of_targets(given: Tensor, true: Tensor, unknown: Tensor) -> Tensor:
    """Counts of each target, (A, T, 4), from (A, T, K) bool; `unknown` (A, T) true labels come on top."""
    right = (given & true).sum(-1).cpu()
    exact = (given == true).all(-1).cpu() & (unknown == 0)
    counted = [right, given.sum(-1).cpu(), true.sum(-1).cpu() + unknown, exact]
    return torch.stack(counted, -1).double()


def f1(counts: Tensor) -> Tensor:
    """Micro-averaged F1 of summed counts, (..., 4) -> (...); accuracy where each target has one label."""
    right, given, true, _ = counts.unbind(-1)
    return 2 * right / (given + true)


def accuracy(counts: Tensor, targets: int) -> Tensor:
    """Share of the targets whose labels are all right, of summed counts: (..., 4) -> (...)."""
    return counts[..., 3] / targets


def codelengths(bank: Bank, examples: Examples) -> Tensor:
    """Bits that each variant needs to send the labels of each target, (A, T) float64 on the CPU.

    Infinite for a label that does not occur in fitting, where a target has one label.
    """
    probes = cast(EdgeProbes, bank.probes)
    nats = []
    for part, logits in answers(bank, examples):
        nats.append(probes.surprise(logits.double(), part).cpu())
    return torch.cat(nats, 1) / math.log(2)


class StructuralProbes(Probes):
    """Maps h ↦ Bᵀh, which differ in the states that they read and in rank.

    Args:
        variants: with the rank of each.
        width: d, of the states.
        most: the highest rank; default: of these variants.
        usual: rank of the variants that name none; default: d.

    Raises:
        ValueError: a rank is not between 1 and d.

    References:
        Hewitt and Manning 2019, "A structural probe for finding syntax in word representations", NAACL.
    """

    kept: Tensor

    def __init__(
        self,
        variants: Sequence[Variant],
        width: int,
        most: int | None = None,
        usual: int | None = None,
    ) -> None:
        super().__init__(variants, width)
        self.usual = width if usual is None else usual
        ranks = []
        for variant in variants:
            rank = self.usual if variant.rank is None else variant.rank
            if not 1 <= rank <= width:
                raise UserError(
                    f"Expected `ranks` between 1 and {width}, the width of the states, but got {rank}."
                )
            ranks.append(rank)
        self.most = max(ranks) if most is None else most

        start = torch.empty(width, width).uniform_(-START, START)[:, : self.most]
        # |Bᵀh|² is then of the size of distances in trees
        sizes = torch.tensor([WIDTH / math.sqrt(width * rank) for rank in ranks])
        self.weight = nn.Parameter(start * sizes[:, None, None])
        kept = torch.arange(self.most) < torch.tensor(ranks)[:, None]
        self.register_buffer("kept", kept, persistent=False)

    def projected(self, read: Tensor, part: TreesPart) -> Tensor:
        """Bᵀh of the words of each sentence, padded: (A, n, d) -> (A, b, T, most), zero beyond a variant's rank."""
        projected = torch.bmm(read, self.weight * self.kept[:, None])
        return projected[:, part.rows]


class DistanceProbes(StructuralProbes):
    """The squared distance |Bᵀ(h_i − h_j)|² stands for the distance of two words in the tree (§2.2)."""

    def forward(self, read: Tensor, part: TreesPart) -> Tensor:
        """Predict distances: (A, n, d) -> (A, b, T, T)."""
        projected = self.projected(read, part)
        squares = projected.square().sum(-1)
        return (
            squares[..., :, None] + squares[..., None, :] - 2 * projected @ projected.mT
        )

    def losses(self, read: Tensor, part: TreesPart) -> Tensor:
        """Mean absolute error over all pairs of words of each sentence (eq. 3), (A, b)."""
        pairs = (part.real[:, :, None] & part.real[:, None]).to(read.dtype)
        errors = (self(read, part) - part.distances).abs() * pairs
        return errors.sum((-1, -2)) / pairs.sum((-1, -2))


class DepthProbes(StructuralProbes):
    """The squared length |Bᵀh_i|² stands for the depth of a word in the tree (§2.3): of h itself, not of h − mean."""

    centred = False

    def forward(self, read: Tensor, part: TreesPart) -> Tensor:
        """Predict depths: (A, n, d) -> (A, b, T)."""
        return self.projected(read, part).square().sum(-1)

    def losses(self, read: Tensor, part: TreesPart) -> Tensor:
        """Mean absolute error over the words of each sentence, (A, b)."""
        real = part.real.to(read.dtype)
        errors = (self(read, part) - part.depths).abs() * real
        return errors.sum(-1) / real.sum(-1)


STRUCTURAL = {"distance": DistanceProbes, "depth": DepthProbes}


@dataclass
class TreeTask(Task):
    """Distances or depths in the trees of a model's fitting words, as its name says.

    A variant without a rank has that of 64, or the width of narrower states.
    """

    baseline = "word order"

    def annotations(self, words: Words) -> Trees:
        """The trees of words."""
        return Trees.of(words)

    @property
    def _width(self) -> int:
        return self.words.states.shape[-1]

    @property
    def _usual_rank(self) -> int:
        return min(USUAL_RANK, self._width)

    def fresh(self, seed: int) -> Bank:
        """Make an untrained bank."""
        kind = STRUCTURAL[self.name]
        return fresh_bank(kind, self.variants, self.words, seed, usual=self._usual_rank)

    def scores(self, bank: Bank | None, held: Words) -> TreeScores:
        """As `Task.scores`; the baseline is a chain of the words in their order."""
        trees = Trees.of(held)
        if bank is None:
            predicted = chain(trees, self.name)
        else:
            predicted = predictions(bank, Examples(held, trees))
        return tree_scores(self.name, predicted, held.sentences, trees)

    def columns(
        self, scores: Sequence[TreeScores], variant: int, weights: Tensor
    ) -> Row:
        """Spearman's correlation, and the share of edges or roots that are found: means over seeds."""
        first = scores[0]
        spearman = torch.stack([result.spearman[variant] for result in scores])
        mean = by_length(spearman.mean(0, keepdim=True), first.lengths, weights)[0]
        row = dict(score_columns("score", mean, by_length(spearman, first.lengths)))

        hits = torch.stack([result.hits[variant] for result in scores]).mean(0)
        share = pooled_ratio(hits[None], first.totals, weights)[0]
        if self.name == "distance":
            return row | score_columns("uuas", share)
        return row | score_columns("root_accuracy", share)

    def of_probe(
        self, scores: Sequence[TreeScores], variant: int, weights: Tensor
    ) -> Row:
        """Parameters."""
        rank = self.variants[variant].rank or self._usual_rank
        return {"parameters": rank * self._width}
