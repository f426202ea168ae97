"""Sparse dictionaries beside SAELens' and dictionary_learning's trainers: rows a second, and the error that is reached.

All have the same rows in memory, numbers of latents, active latents and rows a step, select by batch top-k, and run in
turns, whose clock is the time of processors. SAELens and dictionary_learning are compared where they are installed;
`BatchTopKCrossCoderTrainer` is in the fork https://github.com/science-of-finetuning/dictionary_learning. Each has its
own course of the learning rate, theirs a rise over at most a hundred steps to the rate of `--rate`. FVU is that of
held-out rows after `--steps` steps; theirs selects from the held-out batch, ours by its threshold.
"""

import importlib.metadata
import importlib.util
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # runs from a bare checkout

from aligners.fitting.alignment import Alignment
from aligners.maps.sparse.sparse_aligner import SparseAligner
from aligners.similarity.algebra.moments import moments_of
from benchmarks.harness import Figures, interleaved, parser, ratio
from benchmarks.planted import RATE, planted

BLOCK = 5  # steps of a turn
RISE = 100


class Task(NamedTuple):
    """Rows (1, N, d) of both models and held-out ones, and what all dictionaries have alike."""

    x: Tensor
    y: Tensor
    held_x: Tensor
    held_y: Tensor
    latents: int
    active: int
    a_step: int
    rate: float

    def drawn(self, steps: int, *, pair: bool) -> list[Tensor]:
        """Batches of X, (n, d), or of the pair, (n, 2, d)."""
        draw = torch.Generator().manual_seed(0)
        rows = beside(self.x, self.y) if pair else self.x[0]
        batches = []
        for _ in range(steps):
            chosen = torch.randint(len(rows), (self.a_step,), generator=draw)
            batches.append(rows[chosen])
        return batches


def beside(x: Tensor, y: Tensor) -> Tensor:
    """Put rows of both beside each other, (n, 2, d)."""
    return torch.stack([x[0], y[0]], 1)


def standard(x: Tensor) -> Tensor:
    """States of mean 0 and mean variance 1, as every trainer likes them."""
    centred = x - x.mean(1, keepdim=True)
    return centred / centred.square().mean().sqrt()


def fvu(x: Tensor, again: Tensor) -> float:
    """The mean of the models' shares of variance that are not explained; (n, d) or (n, 2, d)."""
    left = (x - again).square().sum(-1).mean(0)
    total = (x - x.mean(0)).square().sum(-1).mean(0)
    return float((left / total).mean())


class Ours:
    """`SparseAligner`, by `Alignment.train_on_rows`."""

    def __init__(self, task: Task, steps: int, *, pair: bool) -> None:
        self.task = task
        torch.manual_seed(0)
        d = task.x.shape[2]
        of: Any = "both" if pair else "x"
        self.aligner = SparseAligner(
            1, d, d, of=of, latents=task.latents, active=task.active
        )
        self.aligner.fit(moments_of(task.x, task.y))

    def train(self, steps: int) -> None:
        """Take so many steps."""
        adam: Any = partial(torch.optim.AdamW, lr=RATE, weight_decay=0.0, fused=True)
        task = self.task
        module = Alignment(optimizer=adam)
        module.train_on_rows(self.aligner, task.x, task.y, steps, task.a_step, 0)

    def fvu(self) -> float:
        """On held-out rows."""
        self.aligner.eval().requires_grad_(False)
        task = self.task
        errors = self.aligner.reconstruction_errors(task.held_x, task.held_y)
        return float(errors.mean())


class Theirs:
    """A trainer of dictionary_learning's."""

    def __init__(self, task: Task, steps: int, *, pair: bool) -> None:
        module, name = "batch_top_k", "BatchTopKTrainer"
        if pair:
            module, name = "crosscoder", "BatchTopKCrossCoderTrainer"
        trainers_of = import_module(f"dictionary_learning.trainers.{module}")
        kind = getattr(trainers_of, name)
        self.task = task
        self.pair = pair
        self.steps = 0
        self.trainer = kind(
            steps=steps,
            activation_dim=task.x.shape[2],
            dict_size=task.latents,
            k=task.active,
            layer=0,
            lm_name="planted",
            lr=task.rate,
            warmup_steps=min(RISE, steps - 1),
            threshold_start_step=0,
            seed=0,
            device="cpu",
        )

    def train(self, steps: int) -> None:
        """Take so many steps."""
        for batch in self.task.drawn(steps, pair=self.pair):
            self.trainer.update(self.steps, batch)
            self.steps += 1

    @torch.no_grad()
    def fvu(self) -> float:
        """On held-out rows."""
        x = self.task.held_x[0]
        if self.pair:
            x = beside(self.task.held_x, self.task.held_y)
        dictionary = self.trainer.ae
        codes = dictionary.encode(x, use_threshold=False)
        return fvu(x, dictionary.decode(codes))


class OfSAELens:
    """SAELens' trainer of a BatchTopK autoencoder."""

    def __init__(self, task: Task, steps: int) -> None:
        sae_lens = import_module("sae_lens")
        configs = import_module("sae_lens.config")
        trainer = import_module("sae_lens.training.sae_trainer")
        torch.manual_seed(0)
        self.task = task
        shape: Any = {"d_in": task.x.shape[2], "d_sae": task.latents, "k": task.active}
        options = sae_lens.BatchTopKTrainingSAEConfig(**shape)
        self.sae = sae_lens.BatchTopKTrainingSAE(options)
        config = configs.SAETrainerConfig(
            total_training_samples=steps * task.a_step,
            train_batch_size_samples=task.a_step,
            lr=task.rate,
            lr_end=task.rate,
            lr_warm_up_steps=min(RISE, steps - 1),
        )
        self.trainer = trainer.SAETrainer(config, self.sae, iter([]))

    def train(self, steps: int) -> None:
        """Take so many steps."""
        for batch in self.task.drawn(steps, pair=False):
            self.trainer.step(batch)
            self.trainer.n_training_steps += 1

    @torch.no_grad()
    def fvu(self) -> float:
        """On held-out rows."""
        x = self.task.held_x[0]
        return fvu(x, self.sae(x))


def trainers(*, pair: bool) -> dict[str, Callable[[Task, int], Any]]:
    """What can be compared here, by name and version."""
    found: dict[str, Callable[[Task, int], Any]] = {"ours": partial(Ours, pair=pair)}
    if importlib.util.find_spec("sae_lens") and not pair:
        version = importlib.metadata.version("sae-lens")
        found[f"SAELens {version}"] = OfSAELens
    if importlib.util.find_spec("dictionary_learning"):
        found["dictionary_learning"] = partial(Theirs, pair=pair)
    return found


def main() -> None:
    """Run the benchmark."""
    arguments = parser(__doc__)
    arguments.add_argument("--width", type=int, default=64)
    arguments.add_argument("--expansion", type=int, default=16)
    arguments.add_argument("--active", type=int, default=32)
    arguments.add_argument("--a_step", type=int, default=512, help="rows a step")
    arguments.add_argument("--rows", type=int, default=20_000)
    arguments.add_argument("--steps", type=int, default=300)
    arguments.add_argument("--rate", type=float, default=1e-3, help="theirs")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    figures = Figures(options.device)
    width = options.width
    features = planted(width, width, 4 * width, 8, 0.2, 0)
    x, y = features.rows(options.rows, 100)
    held_x, held_y = features.rows(4096, 200)
    task = Task(
        standard(x),
        standard(y),
        standard(held_x),
        standard(held_y),
        options.expansion * width,
        options.active,
        options.a_step,
        options.rate,
    )
    for pair in (False, True):
        of = "crosscoder" if pair else "autoencoder"
        made = trainers(pair=pair)
        turns = {}
        for name, make in made.items():
            turns[name] = partial(make(task, 1000).train, BLOCK)
        seconds = interleaved(
            turns,
            rounds=options.rounds,
            device=options.device,
            warmup=1,
            clock=time.process_time,
        )
        for name, make in made.items():
            faster = ratio(seconds, name, "ours")
            figures.add(f"{of}, {name}: time of a step, by ours", faster)
            trained = make(task, options.steps)
            trained.train(options.steps)
            figures.add(f"{of}, {name}: FVU after the steps", trained.fvu())
    figures.write(options.json)


if __name__ == "__main__":
    main()
