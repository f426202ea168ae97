"""Steering: add α·v to the states at a site, and measure the effect on a model's answers and what it costs them."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from aligners.datamodules.model_texts import ModelTexts
from aligners.datamodules.rows.read_rows import read_rows
from aligners.datamodules.task_targets import Targets, TaskBatch
from aligners.errors import UserError, check_range, finite
from aligners.injection.generation.continuing import (
    Added,
    Continuing,
    Way,
    check_causal,
    continuations,
)
from aligners.injection.injecting import Evaluation
from aligners.injection.scoring import scores
from aligners.injection.scoring.scores import (
    Row,
    Sums,
    mean_columns,
    named,
    per_text_sums,
)
from aligners.injection.scoring.task_scores import chosen, divergence, unit_losses
from aligners.models.loading.load_models import check_precision
from aligners.models.model import FrozenModel

ALPHAS = (0.05, 0.1, 0.2, 0.4, 0.8)  # see `Steering`
LEVELS = (0.03, 0.1, 0.3)  # see `at_equal_cost`
QUANTITIES = ["units", "kl", "loss", "words", "reading"]
FOR_UNITS = 64  # fitting texts that measure typical deviations


class Direction(NamedTuple):
    """A direction in the states of a model.

    Attributes:
        name: name in the report.
        site: site where it is added.
        vector: (d,) vector; its length does not matter.
        role: native: found on this model; carried: taken over from another; random: drawn.
    """

    name: str
    site: int
    vector: Tensor
    role: str = "native"


class Reading(Protocol):
    """A probe of the model, such as an artefact: maps rows (N, d) of its site to answers (N, C).

    If there are several answers, the reading is the last minus the first.
    """

    site: int
    answers: Callable[[Tensor], Tensor]


def random_directions(
    directions: Sequence[Direction], draws: int, seed: int
) -> list[Direction]:
    """Draw so many directions for each site of the others, the same for equal seeds."""
    draw = torch.Generator().manual_seed(seed)
    widths = {one.site: len(one.vector) for one in directions}
    drawn = []
    for site, width in widths.items():
        for n in range(1, draws + 1):
            vector = torch.randn(width, generator=draw)
            drawn.append(Direction(f"random {n}", site, vector, "random"))
    return drawn


def first_tokens(
    model: FrozenModel, words: Sequence[str]
) -> tuple[list[int], list[str]]:
    """Return the token with which each word begins inside a text, and a caution for each word of several tokens.

    Raises:
        ValueError: the model does not know a word.
    """
    tokenizer: Any = model.tokenizer
    before = len(tokenizer("the", add_special_tokens=False)["input_ids"])
    ids, cautions = [], []
    for word in words:
        parts = tokenizer(f"the {word}", add_special_tokens=False)["input_ids"][before:]
        if not parts or parts[0] == tokenizer.unk_token_id:
            raise UserError(
                f"Expected words that {model.name} knows, but its tokenizer has no token for {word!r}."
            )
        ids.append(parts[0])
        if len(parts) > 1:
            first = tokenizer.decode(parts[:1])
            cautions.append(
                f"{word!r} is {len(parts)} tokens of {model.name}: the first, {first!r}, stands for it."
            )
    return ids, cautions


class Unsteered(NamedTuple):
    """What a model does on a batch with nothing added.

    Attributes:
        states: site -> states (B, T, d).
        logits: (U, C).
        measured: (3, U) loss, log-odds of the words, and reading.
    """

    states: dict[int, Tensor]
    logits: Tensor
    measured: Tensor


class Steering:
    """Adds directions to the states at their sites, and measures the model's answers, text by text.

    The unit of α is the typical deviation of the states at the site: the median distance of tokens from their median.
    The huge states of a few tokens in language models do not affect it.

    Args:
        model: a causal language model.
        directions: directions to add.
        alphas: multiples to add; 0, which changes nothing, is left out.
        words: words that should become more likely, and words that should become less likely; for a word of several
            tokens, the first token counts.
        reading: a probe whose reading should rise; None: nothing is read.

    Raises:
        ValueError: the model is no causal language model, or does not know a word; a direction has another width, a
            site that the model lacks, or one above the reading; no α is positive; or there are neither words nor a
            reading to measure an effect.
    """

    def __init__(
        self,
        model: FrozenModel,
        directions: Sequence[Direction],
        alphas: Sequence[float],
        words: tuple[Sequence[str], Sequence[str]] = ((), ()),
        reading: Reading | None = None,
    ) -> None:
        check_causal(model)
        if bool(words[0]) != bool(words[1]):
            raise UserError(
                "Expected words for and against, or neither, but got only one of them."
            )
        good, cautions = first_tokens(model, words[0])
        bad, more = first_tokens(model, words[1])
        self.tokens = (good, bad)
        self.cautions = [*cautions, *more]
        self.model = model
        self.directions = list(directions)
        self.reading = reading
        self.alphas = sorted({float(alpha) for alpha in alphas} - {0.0})
        self.effects = list[str]()
        if good:
            self.effects.append("words")
        if reading is not None:
            self.effects.append("reading")
        if not self.effects or not self.alphas or self.alphas[-1] <= 0:
            raise UserError(
                "Expected words for and against, or a `reading`, to measure an effect, and `alphas` with a positive"
                f" number, but got {self.effects or 'neither'} and {list(alphas)}."
            )
        for one in directions:
            self._check_direction(one)
        self.units: dict[int, float] = {}

    def _check_direction(self, one: Direction) -> None:
        """Raise unless a direction has the model's width, and a site that is not above the reading."""
        self.model.check_site(one.site, "site")
        above = self.reading is not None and one.site > self.reading.site
        if len(one.vector) != self.model.width or above:
            raise UserError(
                f"Expected directions of width {self.model.width}, that of {self.model.name}, at no later site than "
                f"the reading, but {one.name} has width {len(one.vector)} and site {one.site}."
            )

    @torch.no_grad()
    def measure_units(self, batches: Sequence[TaskBatch]) -> None:
        """Measure the unit of α at every site, on the tokens of some texts."""
        sites = sorted({one.site for one in self.directions})
        parts = [
            read_rows(self.model, batch.inputs, sites, batch.rows) for batch in batches
        ]
        read = torch.cat(parts, 1).float()
        centre = read.median(1, keepdim=True).values
        distances = (read - centre).norm(dim=-1)
        self.units = dict(zip(sites, distances.median(1).values.tolist(), strict=True))

    def vector(self, direction: Direction, alpha: float) -> Tensor:
        """Return the vector to add for α, (d,)."""
        unit = torch.nn.functional.normalize(direction.vector.float(), dim=0)
        return alpha * self.units[direction.site] * unit

    @torch.no_grad()
    def sums(self, task: TaskBatch, each: Callable[[Any], Any] = iter) -> Sums:
        """Sum over each text's tokens but the last: quantity of `QUANTITIES` -> (directions, alphas, B).

        The quantities are KL(own ‖ steered) in nats, and the increases of the loss, of the words' log-odds and of the
        reading. The front runs once for all directions and α.

        Args:
            task: the batch.
            each: iterates over the directions, and shows the progress.
        """
        unsteered = self._unsteered(task)
        parts = []
        for one in each(self.directions):
            for alpha in self.alphas:
                values = self._changes(task, unsteered, one, alpha)
                parts.append(per_text_sums(values, task.targets))
        shape = (len(self.directions), len(self.alphas))
        table = torch.stack(parts, 1).double().unflatten(1, shape)
        return dict(zip(QUANTITIES, table, strict=True))

    def _unsteered(self, task: TaskBatch) -> Unsteered:
        """Run the model on a batch with nothing added."""
        model, targets = self.model, task.targets
        read_at = {one.site for one in self.directions}
        if self.reading is not None:
            read_at.add(self.reading.site)
        sites = sorted(read_at)
        states = dict(zip(sites, model.front(task.inputs, sites), strict=True))
        logits = chosen(model.logits(task.inputs), targets)
        measured = self._measured(logits, states[sites[-1]], targets)
        return Unsteered(states, logits, measured)

    def _changes(
        self, task: TaskBatch, unsteered: Unsteered, one: Direction, alpha: float
    ) -> Tensor:
        """Return the `QUANTITIES` at each unit with α of a direction added, (5, U)."""
        here = unsteered.states[one.site]
        moved = here + self.vector(one, alpha).to(here)
        last = one.site if self.reading is None else self.reading.site
        logits, reached = self.model.tail_through(task.inputs, one.site, moved, last)
        steered = chosen(logits, task.targets)
        measured = self._measured(steered, reached, task.targets)
        rises = measured - unsteered.measured
        units = torch.ones_like(rises[0])
        return torch.stack([units, divergence(steered, unsteered.logits), *rises])

    def _measured(self, logits: Tensor, states: Tensor, targets: Targets) -> Tensor:
        """Return loss, log-odds of the words and reading at each unit, (3, U); zero for what is not measured."""
        loss = unit_losses(logits, targets)
        odds = read = torch.zeros_like(loss)
        if "words" in self.effects:
            good, bad = self.tokens
            odds = logits[:, good].logsumexp(-1) - logits[:, bad].logsumexp(-1)
        if self.reading is not None:
            rows = states.flatten(0, -2)[targets.index]
            answers = self.reading.answers(rows.float())
            read = answers[:, -1]
            if answers.shape[1] > 1:
                read = read - answers[:, 0]
        return torch.stack([loss, odds, read])


def curve(steering: Steering, table: Sums, seed: int) -> list[Row]:
    """Make a row for each direction and α: effects and costs per token, with intervals over texts."""
    rows = list[Row]()
    for d, one in enumerate(steering.directions):
        for a, alpha in enumerate(steering.alphas):
            row: Row = {
                "method": one.name,
                "role": one.role,
                "site": one.site,
                "alpha": alpha,
            }
            for name in ("kl", "loss", *steering.effects):
                row |= mean_columns(name, table[name][d, a], table["units"][d, a], seed)
            rows.append(row)
    return rows


def at_equal_cost(
    steering: Steering, table: Sums, levels: Sequence[float], seed: int
) -> list[Row]:
    """Return effects of positive α at equal cost, in nats of KL per token, and their shares of the native direction's.

    Between two α the effect is interpolated linearly in √KL, as both are linear in small α. If no α costs as much,
    there is no effect to report. The random directions of a site share a row: their mean, with the least and the
    largest as its interval.
    """
    means = _resampled_means(steering, table, seed)
    groups = _groups(steering.directions)

    rows = list[Row]()
    for effect, level in product(steering.effects, levels):
        lines = zip(means["kl"], means[effect], strict=True)
        found = torch.stack(
            [crossings(costs, values, level) for costs, values in lines]
        )
        native: dict[int, Tensor] = {}  # of the first native direction of a site
        for (site, role, _), places in groups.items():
            if role == "native":
                native.setdefault(site, found[places[0]])
        for (site, role, name), places in groups.items():
            row = {
                "method": name,
                "role": role,
                "site": site,
                "effect": effect,
                "kl": level,
            }
            values = found[places]
            row |= _with_range("value", values, role)
            row |= _with_range("share", values / native.get(site, torch.nan), role)
            rows.append(row)
    return rows


def _resampled_means(steering: Steering, table: Sums, seed: int) -> dict[str, Any]:
    """Return KL and effects per token of positive α, of all texts and each resample: (directions, A, 1 + R)."""
    counts = scores.resampled_counts(table["units"].shape[-1], seed)
    weights = table["units"] @ counts.T
    positive = np.array(steering.alphas) > 0
    means = {}
    for name in ("kl", *steering.effects):
        resampled = (table[name] @ counts.T / weights).numpy()
        means[name] = resampled[:, positive]
    return means


def _groups(directions: Sequence[Direction]) -> dict[tuple[int, str, str], list[int]]:
    """Return the numbers of the directions that share a row, by site, role and name."""
    groups: dict[tuple[int, str, str], list[int]] = {}
    for place, one in enumerate(directions):
        name = "random" if one.role == "random" else one.name
        groups.setdefault((one.site, one.role, name), []).append(place)
    return groups


def _with_range(name: str, values: Tensor, role: str) -> Row:
    """Return columns for values (directions, R): one with its interval; of random ones, mean, least and largest."""
    if role != "random":
        return named(name, map(finite, scores.with_interval(values[0])))
    own = values[:, 0]
    least, most = own.aminmax()
    return named(name, map(finite, (own.mean(), least, most)))


def crossings(costs: np.ndarray, values: np.ndarray, level: float) -> Tensor:
    """Return the values (R,) where the cost first reaches a level, or NaN; costs and values (A, R), ascending in α."""
    start = np.zeros_like(costs[:1])
    across = np.maximum.accumulate(np.concatenate([start, costs]).clip(0)) ** 0.5
    up = np.concatenate([start, values])
    found = []
    for costs_of_draw, values_of_draw in zip(across.T, up.T, strict=True):
        found.append(np.interp(level**0.5, costs_of_draw, values_of_draw, right=np.nan))
    return torch.tensor(found, dtype=torch.float64)


class SteeringEvaluation(Evaluation):
    """Measures effects and costs of directions: curves over α, effects at equal cost, and the texts that result.

    Args:
        directions: native and carried directions.
        writing: how text is generated.
        reading: a probe of the model; None: only words measure the effect.
        alphas: how much of a direction of unit length is added at every token, in typical deviations of the states at
            its site (the median distance of tokens from their median). Negative ones are measured too; effects at equal
            cost are only those of positive ones.
        equal_kl: costs at which effects are compared: KL(own ‖ steered), in nats per token. Text is generated at the
            middle one.
        words_for: words whose log-odds against `words_against` should rise; for a word of several tokens, the first
            token counts.
        words_against: words whose log-odds should fall, likewise.
        random: number of directions to draw at random at each site, of equal length.
        seed: seed of the random directions, of the resampling of texts, and of draws in generation.
    """

    kind = ModelTexts

    def __init__(
        self,
        directions: Sequence[Direction],
        writing: Continuing,
        reading: Reading | None = None,
        alphas: Sequence[float] = ALPHAS,
        equal_kl: Sequence[float] = LEVELS,
        words_for: Sequence[str] = (),
        words_against: Sequence[str] = (),
        random: int = 3,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        check_range(least=1, random=random)
        check_range(above=0, equal_kl=min(equal_kl, default=0))
        self.directions = [*directions, *random_directions(directions, random, seed)]
        self.writing = writing
        self.reading = reading
        self.alphas = alphas
        self.levels = list(equal_kl)
        self.words = (words_for, words_against)

    def prepare_panels(self) -> None:
        """Check the options, and prepare everything."""
        check_precision(self.trainer)
        (model,) = self.injected_into()
        self.steering = Steering(
            model, self.directions, self.alphas, self.words, self.reading
        )
        if self.writing.generate:
            self.prompts = self.writing.prompts(self.stream.split("test"), model)
        directions, alphas = len(self.directions), len(self.steering.alphas)
        self.scores = scores.TextScores(QUANTITIES, directions, alphas, self.n_texts)
        self.meta = {
            **self.stream.describe(),
            "words_for": [*self.words[0]],
            "words_against": [*self.words[1]],
            "equal_kl": self.levels,
            "cautions": self.steering.cautions,
            "seed": self.seed,
        }

    def injected_into(self) -> list[FrozenModel]:
        """The model that is steered."""
        return list(self.stream.frozen)

    @property
    def parts(self) -> int:
        """The number of steps of the progress bar in a batch: one for each direction."""
        return len(self.directions)

    def on_test_start(self) -> None:
        """Run the self-test, and measure the unit of α at every site."""
        super().on_test_start()
        texts = self.stream.split("fit")
        few = self.stream.prepare(texts[list(range(min(FOR_UNITS, len(texts))))])
        self.steering.measure_units([few.to(self.device)])
        self.meta["units"] = self.steering.units

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Measure every direction and α on one batch."""
        self.scores.update(batch.texts.text, self.steering.sums(batch, self.each))

    def on_test_epoch_end(self) -> None:
        """Make the rows of the report, and generate."""
        table = self.scores.compute()
        about = {
            "model": self.steering.model.name,
            "n_texts": self.n_texts,
            "n_units": int(table["units"][0, 0].sum()),
        }
        self.rows = [about | row for row in curve(self.steering, table, self.seed)]
        equal = [
            about | row
            for row in at_equal_cost(self.steering, table, self.levels, self.seed)
        ]
        self.report_tables = {"equal": equal}
        if self.writing.generate and self.trainer.is_global_zero:
            prompts = self.prompts.to(self.steering.model.device)
            self.report_tables |= continuations(
                prompts, self.writing, self.seed, self._ways()
            )

    def _ways(self) -> Iterator[Way]:
        """Return the ways to write: the model itself, then each direction at the middle cost (one random per site)."""
        model = self.steering.model
        about = {"model_x": model.name, "model_y": model.name}
        own = {
            "alpha": 0.0,
            "site_x": None,
            "site_y": None,
            "method": "own",
            "role": "ceiling",
        }
        yield about | own, model, None
        for one in self.directions:
            if one.role == "random" and not one.name.endswith(" 1"):
                continue
            alpha = self._alpha_at_middle_cost(one)
            here = {
                "method": one.name,
                "role": one.role,
                "alpha": alpha,
                "site_x": one.site,
                "site_y": one.site,
            }
            vector = self.steering.vector(one, alpha).to(self.device)
            yield about | here, model, Added(one.site, vector)

    def _alpha_at_middle_cost(self, direction: Direction) -> float:
        """Return the α of a direction at the middle one of the costs; the largest α if none costs as much."""
        level = sorted(self.levels)[len(self.levels) // 2]
        costs, alphas = [], []
        for row in self.rows:
            own = (row["method"], row["site"]) == (direction.name, direction.site)
            if own and row["alpha"] > 0:
                costs.append([row["kl"]])
                alphas.append([row["alpha"]])
        found = crossings(np.array(costs), np.array(alphas), level)
        return float(found.nan_to_num(alphas[-1][0]))
