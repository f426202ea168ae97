"""The LightningModule that measures steering on held-out texts."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from aligners.errors import check_range
from aligners.injection.generation import steering
from aligners.injection.generation.continuing import Continuing, Way, continuations
from aligners.injection.generation.generating import Added
from aligners.injection.generation.steering import Direction, Reading, Steering
from aligners.injection.injecting import Evaluation
from aligners.injection.scoring.scores import TextScores
from aligners.models.loading.models import check_precision
from aligners.models.model import FrozenModel
from datamodules.model_texts import ModelTexts

FOR_UNITS = 64  # fitting texts by which typical deviations are measured


class SteeringEvaluation(Evaluation):
    """Measures what directions do and cost: curves over α, effects at equal cost, and what the model then writes.

    Args:
        directions: native and carried ones.
        writing: how text is generated.
        reading: a probe of the model; None: words alone show the effect.
        alphas: how much of a direction of unit length is added at every token, in typical deviations of the states at
            its site (the median distance of tokens from their median). Negative ones are measured, too; effects at
            equal cost are those of positive ones.
        equal_kl: costs at which effects are compared: KL(own ‖ steered), nats a token. Text is generated at the middle
            one.
        words_for: words whose log-odds against `words_against` should rise; of a word of several tokens, the first.
        words_against: likewise those that should fall.
        random: directions drawn at random at each site, of equal length.
        seed: of these, of the resampling of texts, and of draws in generation.
    """

    kind = ModelTexts

    def __init__(
        self, directions: Sequence[Direction], writing: Continuing, reading: Reading | None = None,
        alphas: Sequence[float] = steering.ALPHAS, equal_kl: Sequence[float] = steering.LEVELS,
        words_for: Sequence[str] = (), words_against: Sequence[str] = (), random: int = 3, seed: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(seed)
        check_range(least=1, random=random)
        check_range(above=0, equal_kl=min(equal_kl, default=0))
        self.directions = [*directions, *steering.random_directions(directions, random, seed)]
        self.writing, self.reading = writing, reading
        self.alphas, self.levels, self.words = alphas, list(equal_kl), (words_for, words_against)

    def prepare_panels(self) -> None:
        """Check everything."""
        check_precision(self.trainer)
        (model,) = self.injected_into()
        self.steering = Steering(model, self.directions, self.alphas, self.words, self.reading)
        if self.writing.generate:
            self.prompts = self.writing.prompts(self.stream.split("test"), model)
        self.scores = TextScores(steering.QUANTITIES, len(self.directions), len(self.steering.alphas), self.n_texts)
        about = {"words_for": [*self.words[0]], "words_against": [*self.words[1]], "equal_kl": self.levels}
        self.meta = {**self.stream.describe(), **about, "cautions": self.steering.cautions, "seed": self.seed}

    def injected_into(self) -> list[FrozenModel]:
        """The model."""
        return list(self.stream.frozen)

    @property
    def parts(self) -> int:
        """The steps of the progress bar in a batch: one for each direction."""
        return len(self.directions)

    def on_test_start(self) -> None:
        """Run the self-test, and measure the units of α."""
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
        about = {"model": self.steering.model.name, "n_texts": self.n_texts, "n_units": int(table["units"][0, 0].sum())}
        self.rows = [about | row for row in steering.curve(self.steering, table, self.seed)]
        equal = [about | row for row in steering.at_equal_cost(self.steering, table, self.levels, self.seed)]
        self.report_tables = {"equal": equal}
        if self.writing.generate and self.trainer.is_global_zero:
            prompts = self.prompts.to(self.steering.model.device)
            self.report_tables |= continuations(prompts, self.writing, self.seed, self._ways())

    def _ways(self) -> Iterator[Way]:
        """The model itself, and with each direction but further random ones added, at the middle cost."""
        model, level = self.steering.model, sorted(self.levels)[len(self.levels) // 2]
        about = {"model_x": model.name, "model_y": model.name, "alpha": 0.0, "site_x": None, "site_y": None}
        yield about | {"method": "own", "role": "ceiling"}, model, None
        for one in (one for one in self.directions if one.role != "random" or one.name.endswith(" 1")):
            known = [row for row in self.rows if (row["method"], row["site"]) == (one.name, one.site)]
            costs, alphas = (np.array([[row[name]] for row in known if row["alpha"] > 0]) for name in ("kl", "alpha"))
            alpha = float(steering.crossings(costs, alphas, level).nan_to_num(alphas[-1, 0]))
            here = {"method": one.name, "role": one.role, "alpha": alpha, "site_x": one.site, "site_y": one.site}
            yield about | here, model, Added(one.site, self.steering.vector(one, alpha).to(self.device))
