"""The two kinds of probes: edge probes for labelled spans, and structural probes, whose map lays out a tree."""

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
    Variants,
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
USUAL_RANK = 64  # a higher rank adds nothing (Hewitt and Manning 2019, §4.2 and Figure 5), and takes longer
COUNTS = 4  # labels given correctly, given, and true; targets with all labels correct


class EdgeProbes(Probes):
    """Project states, attend within each span, and classify with a network of two layers.

    Args:
        variants: the A probes.
        width: d, the width of the states.
        labels: K, the number of labels.
        spans: S, the number of spans of each target, 1 or 2.
        several: whether a target may have several labels, or none: each label is then a yes-or-no question.
        projection: width to which states are projected before they are pooled.
        hidden: width of the hidden layer.

    References:
        Tenney et al. 2019, "What do you learn from context? Probing for sentence structure in contextualized word
        representations", ICLR, §3.1 and Figure 1; as used by Merchant et al. 2020, §4.1.
    """

    control: Tensor

    def __init__(
        self,
        variants: Variants,
        width: int,
        labels: int,
        spans: int = 1,
        several: bool = False,
        projection: int = 256,
        hidden: int = 256,
    ) -> None:
        super().__init__(variants, width)
        self.labels = labels
        self.spans = spans
        self.several = several
        self.projection = projection
        self.hidden = hidden

        count = len(variants)
        self.projections = nn.ModuleList()
        self.attention = nn.ModuleList()
        for _ in range(spans):
            project = BankLinear(count, width, projection)
            self.projections.append(project)
        for _ in range(spans):
            attend = BankLinear(count, projection, 1)
            self.attention.append(attend)
        self.first = BankLinear(count, spans * projection, hidden)
        self.last = BankLinear(count, hidden, labels)

        control = [int(variant.control) for variant in variants]
        self.register_buffer("control", torch.tensor(control), persistent=False)

    def forward(self, read: Tensor, part: Targets) -> Tensor:
        """Return the logits of each target: rows of words (A, n, d) -> (A, T, K)."""
        pooled = []
        for span in range(self.spans):
            project = self.projections[span]
            attend = self.attention[span]
            words = part.spans[:, span]
            pooled.append(_pooled(project(read), attend, words))

        spans = torch.cat(pooled, -1)
        hidden = self.first(spans).tanh()
        normed = nn.functional.layer_norm(hidden, (self.hidden,))
        return self.last(normed)

    def true_labels(self, part: Targets) -> Tensor:
        """Return the labels that each variant should give, (A, T, K) bool: those of the task or of its control task."""
        return part.labels[self.control]

    def losses(self, read: Tensor, part: Targets) -> Tensor:
        """Return the negative log-likelihood of the labels of each target, in nats, (A, T)."""
        return self.surprise(self(read, part), part)

    def surprise(self, logits: Tensor, part: Targets) -> Tensor:
        """Return the negative log-likelihood of the labels of each target, in nats.

        Args:
            logits: (A, T, K).
            part: the T targets.

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
        log_likelihood = logits.log_softmax(-1)
        of_the_true = log_likelihood.masked_fill(~labels, -torch.inf)
        return -of_the_true.amax(-1)


def _pooled(states: Tensor, attend: nn.Module, spans: Tensor) -> Tensor:
    """Average the rows of each span, weighted by attention: (A, n, p), (T, 2) -> (A, T, p)."""
    first, end = spans.unbind(1)
    longest = int((end - first).max())
    if longest == 1:
        return states[:, first]
    first, end = first[:, None], end[:, None]
    rows = first + torch.arange(longest, device=states.device)
    real = rows < end
    rows = rows.where(real, first)

    scores = attend(states)[..., 0]
    of_spans = scores[:, rows].masked_fill(~real, -torch.inf)
    weights = of_spans.softmax(-1)
    weighted = weights[..., None] * states[:, rows]
    return weighted.sum(2)


class EdgeScores(NamedTuple):
    """The counts of correct labels of A probes in each of B sentences, over all targets of the sentence.

    Attributes:
        counts: (A, B, 4) labels given correctly, given, and true; targets with all labels correct. Float64 on the CPU.
        targets: the targets of all sentences.
    """

    counts: Tensor
    targets: Targets

    @property
    def sentences(self) -> int:
        """B, the number of sentences."""
        return self.targets.count

    @property
    def about(self) -> Row:
        """What the report says: the measures, and the numbers of sentences and targets."""
        return {
            "probe": "edge",
            "n_sentences": len(self.targets.sentences),
            "n_targets": len(self.targets),
            "n_unknown": int(self.targets.unknown.sum()),
        }

    def measures(self, weights: Tensor) -> dict[str, Tensor]:
        """Return F1, (A, R), where each sentence counts as often as `weights` (R, B) say."""
        counts = weights @ self.counts
        return {"F1": f1(counts)}


@dataclass
class EdgeTask(Task):
    """A task of labelled spans, with its labels on the fitting words."""

    labels: Labels = field(init=False)
    baseline = "majority"

    def __post_init__(self) -> None:
        self.labels = Labels.of(self.name, self.words.sentences)
        super().__post_init__()

    def annotations(self, words: Words) -> Targets:
        """Return the targets of words."""
        return targets_of(self.labels, words, self.seed)

    def validation(self) -> Examples:
        """Return the targets of the validation words whose labels occur in fitting."""
        targets = self.annotations(self.watched)
        known = targets.only(targets.unknown == 0)
        return Examples(self.watched, known)

    def fresh(self, seed: int) -> Bank:
        """Make an untrained bank."""
        options = {**self.labels.shape, **self.sizes}
        return fresh_bank(EdgeProbes, self.variants, self.words, seed, **options)

    def about(self) -> dict[str, Any]:
        """Return what is saved beside a bank, as plain values."""
        return {
            "task": self.name,
            "labels": asdict(self.labels),
            "control_seed": self.seed,
        }

    def scores(self, bank: Bank | None, held: Words) -> EdgeScores:
        """Score as `Task.scores` does; the baseline gives the most frequent labels."""
        targets = self.annotations(held)
        if bank is None:
            counted = majority(self.labels, targets)
        else:
            counted = counts(bank, Examples(held, targets))
        return EdgeScores(counted, targets)

    def columns(
        self, scores: Sequence[EdgeScores], variant: int, weights: Tensor
    ) -> Row:
        """Return F1 and accuracy, over all seeds together."""
        by_seed = [result.counts[variant] for result in scores]
        counts = torch.stack(by_seed)  # (seeds, B, 4)
        score = f1(weights @ counts.sum(0))
        score_by_seed = f1(counts.sum(1))
        row: Row = {**score_columns("score", score, score_by_seed)}

        targets = len(scores[0].targets) * len(scores)
        row["accuracy"] = accuracy(counts.sum((0, 1)), targets)
        return row

    def of_probe(
        self, scores: Sequence[EdgeScores], variant: int, weights: Tensor
    ) -> Row:
        """Return parameters, the layers that a mix reads, and a probe's gain over that of the control task."""
        own = self.variants[variant]
        parameters = 0
        for weight in self.banks[0].probes.parameters():
            parameters += weight.numel()
        row: Row = {"parameters": parameters // len(self.variants)}
        if own == Variant("model", None):
            row["centre_of_gravity"] = centre_of_gravity(self.banks, variant)

        control = own._replace(control=True)
        if control in self.variants:
            both = [variant, self.variants.index(control)]
            counts = torch.stack([result.counts[both] for result in scores])
            score, control_score = f1(weights @ counts.sum(0))
            row["control"] = control_score[0]
            row |= score_columns("selectivity", score - control_score)
        return row


def centre_of_gravity(banks: Sequence[Bank], variant: int) -> float:
    """Return the layer that a mix reads on average, Σ_l l · weight_l, mean over seeds (Tenney et al. 2019b, §3.2)."""
    layers = [float(place.layer) for place in banks[0].places]
    of_seeds = []
    for bank in banks:
        weights = bank.readings.weights()
        of_seeds.append(weights[variant].cpu())
    mean = torch.stack(of_seeds).mean(0)
    return float(mean @ torch.tensor(layers))


def counts(bank: Bank, examples: Examples) -> Tensor:
    """Return `EdgeScores.counts` of a bank, which gives the most probable label, or all with a probability above .5."""
    probes = cast(EdgeProbes, bank.probes)
    targets = cast(Targets, examples.annotations)
    of_the_task = 1 - probes.control.cpu()[:, None]
    sums = _no_counts(len(bank.variants), targets)
    for part, logits in answers(bank, examples):
        if probes.several:
            given = logits > 0
        else:
            best = logits.argmax(-1)
            given = nn.functional.one_hot(best, probes.labels).bool()

        true = probes.true_labels(part)
        unknown = part.unknown * of_the_task
        counted = _of_targets(given, true, unknown)
        sums.index_add_(1, part.sentence, counted)
    return sums


def majority(labels: Labels, targets: Targets) -> Tensor:
    """Return `EdgeScores.counts` of giving every target the most frequent labels of fitting: (1, B, 4)."""
    most_frequent, _ = labels.sets[0]
    given = labels.multi_hot(most_frequent)
    given_to_each = given.expand(1, len(targets), -1)
    own = targets.labels[:1]
    counted = _of_targets(given_to_each, own, targets.unknown[None])
    sums = _no_counts(1, targets)
    return sums.index_add_(1, targets.sentence, counted)


def _no_counts(probes: int, targets: Targets) -> Tensor:
    return torch.zeros(probes, targets.count, COUNTS, dtype=torch.float64)


def _of_targets(given: Tensor, true: Tensor, unknown: Tensor) -> Tensor:
    """Return the counts of each target, (A, T, 4), from (A, T, K) bool; `unknown` (A, T) true labels are added."""
    given, true = given.cpu(), true.cpu()
    right = (given & true).sum(-1)
    exact = (given == true).all(-1)
    counted = [right, given.sum(-1), true.sum(-1) + unknown, exact & (unknown == 0)]
    return torch.stack(counted, -1).double()


def f1(counts: Tensor) -> Tensor:
    """Return micro-averaged F1 of summed counts, (..., 4) -> (...); it is accuracy where each target has one label."""
    right, given, true, _ = counts.unbind(-1)
    return 2 * right / (given + true)


def accuracy(counts: Tensor, targets: int) -> Tensor:
    """Return the share of the targets whose labels are all correct, from summed counts: (..., 4) -> (...)."""
    return counts[..., 3] / targets


def codelengths(bank: Bank, examples: Examples) -> Tensor:
    """Return the bits that each variant needs to send the labels of each target, (A, T) float64 on the CPU.

    They are infinite for a target whose only label does not occur in fitting.
    """
    probes = cast(EdgeProbes, bank.probes)
    nats = []
    for part, logits in answers(bank, examples):
        surprise = probes.surprise(logits.double(), part)
        nats.append(surprise.cpu())
    return torch.cat(nats, 1) / math.log(2)


class StructuralProbes(Probes):
    """Linear maps h ↦ Bᵀh, which differ in rank and in the states that they read.

    Args:
        variants: the probes, each with its rank.
        width: d, the width of the states.
        most: the highest rank; default: that of these variants.
        usual: rank of the variants that name none; default: d.

    Raises:
        ValueError: a rank is not between 1 and d.

    References:
        Hewitt and Manning 2019, "A structural probe for finding syntax in word representations", NAACL.
    """

    kept: Tensor

    def __init__(
        self,
        variants: Variants,
        width: int,
        most: int | None = None,
        usual: int | None = None,
    ) -> None:
        super().__init__(variants, width)
        if usual is None:
            usual = width
        ranks = []
        for variant in variants:
            rank = variant.rank
            if rank is None:
                rank = usual
            if not 1 <= rank <= width:
                raise UserError(
                    f"Expected `ranks` between 1 and {width}, the width of the states, but got {rank}."
                )
            ranks.append(rank)
        if most is None:
            most = max(ranks)
        self.usual = usual
        self.most = most

        start = torch.empty(width, width).uniform_(-START, START)
        # so that |Bᵀh|² has the scale of distances in trees
        sizes = [WIDTH / math.sqrt(width * rank) for rank in ranks]
        scales = torch.tensor(sizes)[:, None, None]
        self.weight = nn.Parameter(start[:, :most] * scales)
        kept = torch.arange(most) < torch.tensor(ranks)[:, None]
        self.register_buffer("kept", kept, persistent=False)

    def matrices(self) -> Tensor:
        """Return B of each variant, (A, d, most), zero beyond its rank."""
        return self.weight * self.kept[:, None]

    def projected(self, read: Tensor, part: TreesPart) -> Tensor:
        """Return padded Bᵀh of each sentence's words: (A, n, d) -> (A, b, T, most), zero beyond a variant's rank."""
        projected = torch.bmm(read, self.matrices())
        return projected[:, part.rows]


class DistanceProbes(StructuralProbes):
    """The squared distance |Bᵀ(h_i − h_j)|² predicts the distance of two words in the tree (§2.2)."""

    def forward(self, read: Tensor, part: TreesPart) -> Tensor:
        """Predict distances: (A, n, d) -> (A, b, T, T)."""
        projected = self.projected(read, part)
        squares = projected.square().sum(-1)
        sums = squares[..., :, None] + squares[..., None, :]
        return sums - 2 * projected @ projected.mT

    def losses(self, read: Tensor, part: TreesPart) -> Tensor:
        """Return the mean absolute error over all pairs of words of each sentence (eq. 3), (A, b)."""
        real = part.real
        pairs = real[:, :, None] & real[:, None]
        distances = self(read, part)
        errors = distances - part.distances
        return _mean_absolute(errors, pairs, (-1, -2))


class DepthProbes(StructuralProbes):
    """The squared length |Bᵀh_i|² predicts the depth of a word in the tree (§2.3); h is not centred."""

    centred = False

    def forward(self, read: Tensor, part: TreesPart) -> Tensor:
        """Predict depths: (A, n, d) -> (A, b, T)."""
        projected = self.projected(read, part)
        return projected.square().sum(-1)

    def losses(self, read: Tensor, part: TreesPart) -> Tensor:
        """Return the mean absolute error over the words of each sentence, (A, b)."""
        depths = self(read, part)
        errors = depths - part.depths
        return _mean_absolute(errors, part.real, (-1,))


def _mean_absolute(errors: Tensor, real: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Return the mean of |errors| over the real entries along some axes."""
    counted = real.to(errors.dtype)
    sums = (errors.abs() * counted).sum(axes)
    return sums / counted.sum(axes)


STRUCTURAL = {"distance": DistanceProbes, "depth": DepthProbes}


@dataclass
class TreeTask(Task):
    """Distances or depths, as the task's name says, in the trees of a model's fitting words.

    A variant that names no rank has rank 64, or the width of narrower states.
    """

    baseline = "word order"

    def annotations(self, words: Words) -> Trees:
        """Return the trees of words."""
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
        usual = self._usual_rank
        return fresh_bank(kind, self.variants, self.words, seed, usual=usual)

    def scores(self, bank: Bank | None, held: Words) -> TreeScores:
        """Score as `Task.scores` does; the baseline is a chain of the words in their order."""
        trees = Trees.of(held)
        if bank is None:
            predicted = chain(trees, self.name)
        else:
            predicted = predictions(bank, Examples(held, trees))
        return tree_scores(self.name, predicted, held.sentences, trees)

    def columns(
        self, scores: Sequence[TreeScores], variant: int, weights: Tensor
    ) -> Row:
        """Return Spearman's correlation, and the share of edges or roots that are found, as means over seeds."""
        lengths = scores[0].lengths
        totals = scores[0].totals
        by_seed = torch.stack([result.spearman[variant] for result in scores])
        mean = by_seed.mean(0, keepdim=True)
        (score,) = by_length(mean, lengths, weights)
        score_by_seed = by_length(by_seed, lengths)

        hits = torch.stack([result.hits[variant] for result in scores])
        (share,) = pooled_ratio(hits.mean(0)[None], totals, weights)
        found = "uuas" if self.name == "distance" else "root_accuracy"
        return {
            **score_columns("score", score, score_by_seed),
            **score_columns(found, share),
        }

    def of_probe(
        self, scores: Sequence[TreeScores], variant: int, weights: Tensor
    ) -> Row:
        """Return the number of parameters."""
        rank = self.variants[variant].rank or self._usual_rank
        return {"parameters": rank * self._width}
