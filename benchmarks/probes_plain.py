r"""The probes of `train.py probe` beside plain ones: a network at a time, as a user would write it, on the same states.

The plain probes share nothing with ours but the words and their states: structural probes |B(h_i - h_j)|² and |Bh_i|²
of rank 64, an edge probe of a word (a projection, a hidden layer with tanh, a layer norm), Adam at 1e-3, 24 sentences a
step, the rate halved whenever the loss on the validation sentences does not fall, the end after five such epochs in a
row, and the weights of the lowest loss. Each number is a mean over seeds. The bars: ours is at most a point
below (UPOS accuracy, Spearman, UUAS, roots), its online code at most 2 % longer.

    python benchmarks/probes_plain.py --models embedded-sentences:0 FOLDER FOLDER \
        --train en_ewt-ud-train.conllu --held_out en_ewt-ud-test.conllu --json FILE
"""

import copy
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import torch
from scipy.sparse.csgraph import minimum_spanning_tree, shortest_path
from scipy.stats import rankdata
from torch import Tensor, nn

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.datamodules.layers import LayerActivations
from aligners.datamodules.text.sources import TextSource
from aligners.datamodules.tokens.splits import Split
from aligners.probing.codes import portion_ends
from aligners.probing.probe_bank import Words
from aligners.probing.probing_evaluation import ProbeExperiment
from benchmarks.harness import Figures, parser

RANK, BATCH, RATE, PATIENCE, MOST = 64, 24, 1e-3, 5, 100
SIZE = 128  # of the projection and the hidden layer, the default of `train.py probe`
TASKS = ("pos", "distance", "depth")
Loss = Callable[[Any, Sequence["Sentence"]], Tensor]
Splits = tuple[
    list["Sentence"], list["Sentence"], list["Sentence"]
]  # fitting, validation, held-out


class Sentence(NamedTuple):
    """A sentence of n words: states (n, d), tags (n,), -1 for an unknown one, its tree's distances (n, n)."""

    states: Tensor
    tags: Tensor
    distances: Tensor
    root: int
    punctuation: np.ndarray


def sentences_of(words: Words, place: int, tags: dict[str, int]) -> list[Sentence]:
    """The sentences of a split at one layer; new tags are added where `tags` is empty."""
    fresh, found = not tags, []
    scale = words.states[place].std()
    for b, sentence in enumerate(words.sentences):
        own = [next(t.labels[0] for t in sentence.targets if t.task == "pos" and t.span1[0] == w)
               for w in range(len(sentence.words))]  # fmt: skip
        if fresh:
            for tag in own:
                tags.setdefault(tag, len(tags))
        edges = np.zeros((len(own), len(own)))
        for word, head in enumerate(sentence.heads):
            if head:
                edges[word, head - 1] = 1
        paths = shortest_path(edges, directed=False, unweighted=True)
        states = (
            words.states[place, int(words.first[b]) : int(words.first[b + 1])] / scale
        )
        numbers = torch.tensor([tags.get(tag, -1) for tag in own])
        root = sentence.heads.index(0)
        punctuation = np.array([tag == "PUNCT" for tag in own])
        found.append(
            Sentence(states, numbers, torch.tensor(paths).float(), root, punctuation)
        )
    return found


# ---------------------------------------------------------------------- plain probes


class Edge(nn.Sequential):
    """A word's state to logits of its tags."""

    def __init__(self, width: int, tags: int) -> None:
        norm = nn.LayerNorm(SIZE, elementwise_affine=False)
        super().__init__(
            nn.Linear(width, SIZE), nn.Linear(SIZE, SIZE), nn.Tanh(), norm, nn.Linear(SIZE, tags)
        )  # fmt: skip


class Structural(nn.Module):
    """|B(h_i - h_j)|², or |Bh_i|²."""

    def __init__(self, width: int, depth: bool) -> None:
        super().__init__()
        self.b, self.depth = (
            nn.Parameter(torch.empty(width, min(RANK, width)).uniform_(-0.05, 0.05)),
            depth,
        )

    def forward(self, states: Tensor) -> Tensor:
        """(n, d) -> (n, n), or (n,)."""
        found = states @ self.b
        return (found if self.depth else found[:, None] - found).square().sum(-1)


def edge_loss(probe: nn.Module, batch: Sequence[Sentence]) -> Tensor:
    """Mean over words, in nats."""
    logits, tags = (
        probe(torch.cat([s.states for s in batch])),
        torch.cat([s.tags for s in batch]),
    )
    return nn.functional.cross_entropy(logits, tags, ignore_index=-1)


def tree_loss(probe: Structural, batch: Sequence[Sentence]) -> Tensor:
    """Mean over sentences of the mean absolute error."""
    each = [
        (probe(s.states) - (s.distances[s.root] if probe.depth else s.distances))
        .abs()
        .mean()
        for s in batch
    ]
    return torch.stack(each).mean()


def train(
    probe: nn.Module, loss_of: Loss, fit: list[Sentence], dev: list[Sentence], seed: int
) -> None:
    """Adam, the rate halved on a plateau, stopped on dev."""
    draw = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(probe.parameters(), RATE)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
        optimizer, factor=0.5, patience=0, threshold=0
    )
    best, kept, waited = math.inf, copy.deepcopy(probe.state_dict()), 0
    for _ in range(MOST):
        order = torch.randperm(len(fit), generator=draw).tolist()
        for _ in range(
            max(1, 500 // len(fit))
        ):  # few sentences are read several times between two looks
            for first in range(0, len(fit), BATCH):
                optimizer.zero_grad()
                loss_of(
                    probe, [fit[b] for b in order[first : first + BATCH]]
                ).backward()
                optimizer.step()
        with torch.no_grad():
            loss = float(loss_of(probe, dev))
        plateau.step(loss)
        waited = 0 if loss < best else waited + 1
        if loss < best:
            best, kept = loss, copy.deepcopy(probe.state_dict())
        if waited == PATIENCE:
            break
    probe.load_state_dict(kept)


# ---------------------------------------------------------------------- plain scores, each in hundredths


def accuracy(given: Sequence[np.ndarray], held: Sequence[Sentence]) -> dict[str, float]:
    """Share of the words whose tag is right."""
    right = np.concatenate(
        [own == s.tags.numpy() for own, s in zip(given, held, strict=True)]
    )
    return {"UPOS accuracy": 100 * float(right.mean())}


def of_distances(
    given: Sequence[np.ndarray], held: Sequence[Sentence]
) -> dict[str, float]:
    """Spearman's correlation by word, sentence and length (5 to 50), and UUAS without punctuation."""
    spearman, hits, asked = defaultdict(list), 0, 0
    for own, s in zip(given, held, strict=True):
        n, true = len(own), s.distances.numpy()
        if 5 <= n <= 50:
            spearman[n].append(
                float(np.mean([correlation(own[w], true[w]) for w in range(n)]))
            )
        kept = (~s.punctuation).nonzero()[0]
        if len(kept) > 1:
            few = own[np.ix_(kept, kept)]
            spanning = minimum_spanning_tree(np.triu(few + 1e-9, 1)).toarray() > 0
            edges = true[np.ix_(kept, kept)] == 1
            hits, asked = hits + (spanning & edges).sum(), asked + np.triu(edges).sum()
    return {
        "distance Spearman": 100 * mean_of_means(spearman),
        "UUAS": 100 * hits / asked,
    }


def of_depths(
    given: Sequence[np.ndarray], held: Sequence[Sentence]
) -> dict[str, float]:
    """Spearman's correlation by sentence and length (5 to 50), and the share of sentences whose root is found."""
    spearman, roots = defaultdict(list), []
    for own, s in zip(given, held, strict=True):
        if 5 <= len(own) <= 50:
            spearman[len(own)].append(correlation(own, s.distances[s.root].numpy()))
        if len(own) > 1:
            roots.append(
                np.where(s.punctuation & ~s.punctuation.all(), np.inf, own).argmin()
                == s.root
            )
    return {
        "depth Spearman": 100 * mean_of_means(spearman),
        "roots": 100 * float(np.mean(roots)),
    }


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's."""
    return float(np.corrcoef(rankdata(a), rankdata(b))[0, 1])


def mean_of_means(by_length: dict[int, list[float]]) -> float:
    """Over sentences of equal length, then over lengths."""
    return float(np.mean([np.mean(own) for own in by_length.values()]))


SCORES: dict[str, Callable[..., dict[str, float]]] = {
    "pos": accuracy,
    "distance": of_distances,
    "depth": of_depths,
}


def asked(task: str, probe: nn.Module, held: Sequence[Sentence]) -> dict[str, float]:
    """The scores of a trained probe."""
    with torch.no_grad():
        given = [probe(s.states) for s in held]
    return SCORES[task](
        [(own.argmax(-1) if task == "pos" else own).numpy() for own in given], held
    )


# ---------------------------------------------------------------------- all of one model and layer


def plain(task: str, splits: Splits, tags: int, seed: int) -> dict[str, float]:
    """Train one plain probe, and score it."""
    fit, dev, held = splits
    torch.manual_seed(seed)
    width = fit[0].states.shape[1]
    probe = Edge(width, tags) if task == "pos" else Structural(width, task == "depth")
    fit, dev = (
        [s for s in own if task == "pos" or len(s.tags) > 1] for own in (fit, dev)
    )
    train(probe, edge_loss if task == "pos" else tree_loss, fit, dev, seed)
    return asked(task, probe, held)


def plain_code(
    fit: list[Sentence],
    dev: list[Sentence],
    tags: int,
    seed: int,
    portions: Sequence[float],
) -> float:
    """Bits of the online code of all tags, sentence by sentence in the order that our code sends them in."""
    order = torch.randperm(
        len(fit), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    ends = portion_ends(len(fit), portions)
    bits = sum(len(fit[b].tags) for b in order[: ends[0]]) * math.log2(tags)
    for first, end in pairwise(ends):
        torch.manual_seed(seed)
        probe = Edge(fit[0].states.shape[1], tags)
        train(probe, edge_loss, [fit[b] for b in order[:first]], dev, seed)
        with torch.no_grad():
            sent = [fit[b] for b in order[first:end]]
            bits += (
                float(edge_loss(probe, sent))
                * sum(len(s.tags) for s in sent)
                / math.log(2)
            )
    return bits


def trivial(held: list[Sentence], fit: list[Sentence]) -> dict[str, float]:
    """The most frequent tag, and a chain of the words in their order."""
    most = torch.cat([s.tags for s in fit]).mode().values.item()
    places = [np.arange(len(s.tags), dtype=float) for s in held]
    return {
        **accuracy([np.full(len(own), most) for own in places], held),
        **of_distances([np.abs(own[:, None] - own) for own in places], held),
        **of_depths(places, held),
    }


def ours(experiment: ProbeExperiment, layer: int) -> dict[str, float]:
    """The same scores, as the report has them."""
    rows = {
        row["task"]: row
        for row in experiment.rows
        if row["source"] == "model" and row["site"] == layer
    }
    distance, depth = rows["distance"], rows["depth"]
    found = {
        "UPOS accuracy": rows["pos"]["accuracy"], "distance Spearman": distance["score"], "UUAS": distance["uuas"],
        "depth Spearman": depth["score"], "roots": depth["root_accuracy"],
    }  # fmt: skip
    codes = {
        row["site"]: row["bits"]
        for row in experiment.report_tables.get("codelengths", ())
    }
    return {
        **{name: 100 * value for name, value in found.items()},
        **({"code, bits": codes[layer]} if codes else {}),
    }


def compared(
    experiment: ProbeExperiment, place: int
) -> Iterator[tuple[str, float, float, float]]:
    """Score by score: ours, the mean of the plain probes over seeds, and the trivial baseline's."""
    tags: dict[str, int] = {}
    words: dict[Split, Words] = {
        split: own for (_, split), own in experiment.words.items()
    }
    fit, dev, held = (
        sentences_of(words[split], place, tags)
        for split in ("fit", "validation", "test")
    )
    by_seed: dict[str, list[float]] = defaultdict(list)
    for seed in range(experiment.seeds):
        for task in TASKS:
            for name, value in plain(task, (fit, dev, held), len(tags), seed).items():
                by_seed[name].append(value)
        if experiment.portions:
            by_seed["code, bits"].append(
                plain_code(fit, dev, len(tags), seed, experiment.portions)
            )
    least = {
        **trivial(held, fit),
        "code, bits": sum(len(s.tags) for s in fit) * math.log2(len(tags)),
    }
    own = ours(experiment, words["fit"].places[place].layer)
    for name, values in by_seed.items():
        yield name, own[name], float(np.mean(values)), least[name]


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="+", default=["embedded-sentences:0"])
    arguments.add_argument(
        "--layer",
        type=int,
        help="that is probed; default: half of the blocks, rounded up",
    )
    arguments.add_argument(
        "--train",
        default="grammar",
        help="CoNLL-U; a share of it are the validation sentences",
    )
    arguments.add_argument("--held_out", help="CoNLL-U; default: a share of `--train`")
    arguments.add_argument(
        "--sentences", type=int, default=3000, help="fitting sentences at most"
    )
    arguments.add_argument(
        "--held_sentences",
        type=int,
        default=1000,
        help="validation and held-out ones at most",
    )
    arguments.add_argument("--seeds", type=int, default=2)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    figures = Figures("cpu")
    for model in options.models:
        limits = {
            "max_texts": options.sentences,
            "max_held_out": options.held_sentences,
        }
        text = TextSource(options.train, held_out=options.held_out, **limits)
        made: dict[str, Any] = {"text": text, "rows": "words_mean", "batch_size": 64}
        layers: Any = "all" if options.layer is None else [options.layer]
        data = LayerActivations([model], layers=layers, **made)
        if options.layer is None:
            data = LayerActivations(
                [model], layers=[math.ceil(data.reader.models[0].depth / 2)], **made
            )
        experiment = ProbeExperiment(
            list(TASKS), mix=False, controls=False, seeds=options.seeds, drawn=0
        )
        trainer = pl.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            inference_mode=False,
            enable_progress_bar=False,
        )
        trainer.test(experiment, datamodule=data, verbose=False)
        experiment.train_probes()
        add(
            figures,
            f"{Path(model).name}, width {data.reader.models[0].width}",
            experiment,
        )
    figures.write(options.json)


def add(figures: Figures, said: str, experiment: ProbeExperiment) -> None:
    """Record the scores of a model, and how far ours are from the plain ones."""
    for name, own, other, least in compared(experiment, 0):
        for whose, value in {"ours": own, "plain": other, "trivial": least}.items():
            figures.add(f"{said}: {name}, {whose}", value)
        if name == "code, bits":
            figures.add(f"{said}: {name}, ours / plain", own / other, bar=1.02)
        else:
            figures.add(
                f"{said}: {name}, ours - plain", own - other, bar=-1, sense=">="
            )


if __name__ == "__main__":
    main()
