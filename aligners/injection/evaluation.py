"""The evaluation of maps: how far g(X's state) is from Y's own, and whether Y still does its task with it in place."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
from torch import Tensor, nn

from aligners.fitting.few_rows import few_rows
from aligners.fitting.moments import read_moments
from aligners.fitting.storage.bank import FORWARD, StoredBank
from aligners.fitting.storage.refusals import refuse_other_component, refuse_other_models
from aligners.injection.behaviour import OF_LABELS, OF_TOKENS, Answered, Behaviour
from aligners.injection.forward import own_logits, read_all
from aligners.injection.methods import CLOSED_FORMS, build_floors, check_closed_forms, route_methods, stored_kind
from aligners.injection.panels import Panel, Read
from aligners.injection.routes import Route
from aligners.injection.scoring.answers import matched_by_number
from aligners.injection.scoring.asked import Asked
from aligners.injection.seen import fitted_texts, seen_by_any
from aligners.injection.task import DIRECTIONS, InjectedTask, paired_routes
from aligners.maps.linear import Ridge
from aligners.models.loading.precision import check_precision
from aligners.models.model import FrozenModel
from aligners.similarity.algebra.moments import Moments
from datamodules.asking import TaskBatch
from datamodules.batches import TextBatch, limited
from datamodules.module import TextModule, stream_of
from datamodules.rows.policies import RowKind
from datamodules.rows.reading import PairedBatch, Plan
from datamodules.states import States
from datamodules.text.sources import TextSource

__all__ = ["TOKENS", "Evaluation", "InjectionEvaluation", "check_stored"]

TOKENS = RowKind("tokens")  # the rows that injection replaces: all of them


class Evaluation(pl.LightningModule):
    """What `evaluate.py inject` and `evaluate.py stitch` share: panels of methods at sites, and rows made of them.

    Everything is kept text by text and added over ranks, so the figures are the same for any number of them. Before
    anything is measured, a model that states are put into must pass the self-test: injecting what was read changes
    nothing, bit for bit.

    Attributes:
        panels: one for each route and kind of rows.
        rows: of the report, after the evaluation.
        meta: what holds for all of them.

    Args:
        seed: of the random floors and of the resampling of texts.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.panels = seed, nn.ModuleList()
        self.asked: Asked | None = None
        self.rows: list[dict[str, Any]] = []
        self.meta: dict[str, Any] = {}

    @property
    @abstractmethod
    def stream(self) -> TextModule:
        """The data module of the run."""

    @abstractmethod
    def measured(self) -> Sequence[StoredBank]:
        """The checkpoints whose maps are measured."""

    @abstractmethod
    def prepare_panels(self) -> None:
        """Check everything, and make the panels or what they need."""

    @abstractmethod
    def few_inputs(self) -> dict[str, Tensor]:
        """The targets' inputs for a few of the held-out texts."""

    def setup(self, stage: str) -> None:
        """Start afresh, as an evaluation may run twice; texts that maps were fitted on are not held out."""
        self.panels, self.rows = nn.ModuleList(), []
        self.stream.leave_out(fitted_texts(self.measured(), self.stream))
        self.n_texts = len(self.stream.split("test"))
        self.prepare_panels()

    @abstractmethod
    def injected_into(self) -> list[FrozenModel]:
        """The models that states are put into, each once."""

    def natives(self, models: Sequence[FrozenModel], task: TaskBatch) -> dict[FrozenModel, Answered]:
        """What the models answer by themselves, one after another, so that only one model's logits are held."""
        regression = self.asked is not None and self.asked.regression
        return {model: Answered.of(own_logits(model, task), task, regression=regression) for model in models}

    def on_test_start(self) -> None:
        """Run the self-test."""
        for target in self.injected_into():
            target.self_test(self.few_inputs(), self.stream.component)

    def on_test_epoch_end(self) -> None:
        """One row for every method and site, in each panel."""
        self.rows = [row for panel in cast(Sequence[Panel], self.panels) for row in panel.rows()]


class InjectionEvaluation(Evaluation):
    """Measures every map at every site on held-out text: its errors, and by injection what Y does with it in place.

    Errors are measured on rows of the kinds that maps were fitted on, and of that of the data module. Injection needs
    one tokenizer and a target with a head: a classifier, for which the texts need labels, or a language model, masked
    or causal. It replaces the states of all tokens; where it is possible, errors are measured on these too, and where
    not, `meta["not_injected"]` says why.

    Each model's front runs once a batch, for all sites, rows and methods, and once more on masked texts.

    Floors are of the rows that they stand beside. Where no checkpoint was fitted on rows of a kind, their moments are
    taken from the fitting texts first, in a pass of its own.

    Args:
        stored: checkpoints, all of the same models and site pairs.
        closed_form: names of closed forms to fit on the first checkpoint's moments, where it does not hold them. One
            that cannot be fitted is left out, and `meta["refusals"]` says why.
        both_directions: also map Y's states into X: with the inverse of a bijective aligner, and with an
            aligner fitted from Y to X for any other.
        seed: of the random floors and of the resampling of texts.
        other_text: another source; on its held-out texts errors are measured too, for the columns `fvu_other`. Texts
            that maps were fitted on are left out of it, and `meta["other_text"]` says how many.
        masked_share: share of the tokens that a masked language model has to find.
        fitting_errors: also measure the errors on fitting texts, as many as are held out, for the columns `mse_fit`,
            `fvu_fit` and `relative_error_fit`. What is fitted poorly and what does not generalise can then be told
            apart.
    """

    def __init__(
        self,
        stored: Sequence[StoredBank],
        closed_form: Sequence[str] = tuple(CLOSED_FORMS),
        both_directions: bool = False,
        seed: int = 0,
        other_text: TextSource | None = None,
        masked_share: float = 0.15,
        fitting_errors: bool = False,
    ) -> None:
        super().__init__(seed)
        check_closed_forms(closed_form)
        if all(checkpoint.moments is None for checkpoint in stored):
            raise ValueError("Expected a checkpoint of `train.py fit` in `stored`, whose moments floors need.")
        self.stored, self.closed_form = list(stored), list(closed_form)
        self.both_directions, self.other_text = both_directions, other_text
        self.masked_share, self.fitting_errors = masked_share, fitting_errors

    # ------------------------------------------------------------------ before

    @property
    def stream(self) -> States:
        """The data module of the run."""
        return stream_of(self.trainer, States)

    def measured(self) -> Sequence[StoredBank]:
        """The checkpoints whose maps are measured."""
        return self.stored

    def prepare_panels(self) -> None:
        """Check everything; collect the maps of each direction, and choose the rows that they are measured on."""
        check_precision(self.trainer)
        data, reader = self.stream, self.stream.reader
        self.sites = reader.sites
        described = data.describe()
        check_stored(self.stored, described, self.sites)
        self.routes = paired_routes(data, both_directions=self.both_directions)
        self.methods, self.refusals = {}, {}
        for route in self.routes:
            self.methods[route], self.refusals[route] = route_methods(route, self.stored, self.closed_form)
        task = InjectedTask.of(data, self.routes, masked_share=self.masked_share, seed=self.seed)
        self.not_injected, self.answering, self.asked = task.not_injected, task.answering, task.asked
        self._choose_rows()
        seen = seen_by_any(self.stored, data)
        data.plan(Plan(self.kinds, seen, self.other_text, task.asking, self.fitting_errors))
        self.meta = {
            **described,
            **data.describe_other(),
            **self._findings(task.labels or {}),
            "seed": self.seed,
            "split": "test",
        }

    def _choose_rows(self) -> None:
        """The kinds of rows to read."""
        data = self.stream
        known = [checkpoint for checkpoint in reversed(self.stored) if checkpoint.moments is not None]
        self.fitted = {stored_kind(checkpoint): cast(Moments, checkpoint.moments) for checkpoint in known}
        own = data.reader.kind
        injects = [TOKENS] if None in self.not_injected.values() else []
        self.kinds = list(dict.fromkeys([own, *map(stored_kind, self.stored), *injects]))

    def _findings(self, labels: dict[FrozenModel, Any]) -> dict[str, Any]:
        """What the report says of all rows beyond the data."""
        ways = {route: DIRECTIONS[route.key] for route in self.routes}
        return {
            "methods": {f"{ways[route]}.{m.name}": m.about for route in self.routes for m in self.methods[route]},
            "refusals": {f"{ways[route]}.{n}": why for route in self.routes for n, why in self.refusals[route].items()},
            "labels": {model.name: words for model, words in labels.items()},
            "cautions": matched_by_number(self.stream, list(labels)) + few_rows(*self.fitted.values()),
            "task": None if self.asked is None else self.asked.task,
            "unit": None if self.asked is None else self.asked.unit,
            "score": None if self.asked is None else self.asked.score,
            "masked_share": self.masked_share if self.asked is not None and self.asked.task == "masked" else None,
            "not_injected": {ways[route]: why for route, why in self.not_injected.items() if why is not None},
        }

    def on_test_start(self) -> None:
        """Run the self-test, and make the panels once the moments of all rows are known."""
        super().on_test_start()
        moments = {str(kind): moments for kind, moments in self.fitted.items()}
        lacking = [kind for kind in self.kinds if kind not in self.fitted]
        if lacking:
            data, trainer = self.stream, self.trainer
            loader = data.loader("fit")
            batches = limited(len(loader), trainer, "test")
            about = {"data": data.describe(), "config": data.config(), "kinds": list(map(str, lacking))}
            read = partial(self._rows_of, lacking)
            moments = {
                **read_moments(trainer, loader, read, data.reader.check, batches, about=about),
                **moments,
            }
        self._choose_ridges()
        for route in self.routes:
            for kind in self.kinds:
                injects = kind == TOKENS and self.not_injected[route] is None
                if injects or kind == self.stream.reader.kind or kind in self.fitted:
                    self.panels.append(self._panel(route, kind, moments[str(kind)], injects))
        self.panels.to(self.device)

    def _choose_ridges(self) -> None:
        """Choose the strengths of the ridges that no checkpoint holds on validation rows, as a fit does."""
        solved = [
            (route, method.aligner, method.about)
            for route in self.routes
            for method in self.methods[route]
            if isinstance(method.aligner, Ridge) and method.about["checkpoint"] is None
        ]
        if not solved:
            return
        first, data = next(each for each in self.stored if each.moments is not None), self.stream
        moments, kind, loader = cast(Moments, first.moments), stored_kind(first), data.loader("validation")
        about = {"data": data.describe(), "config": data.config(), "kinds": [str(kind)], "split": "validation"}
        read = partial(self._rows_of, [kind])
        found = read_moments(self.trainer, loader, read, data.reader.check, len(loader), about=about)
        validation = Moments(*(part.to(moments.n.device) for part in found[str(kind)]))
        for route, ridge, said in solved:
            ridge.fit(*(each if route.key == FORWARD else each.swap() for each in (moments, validation)))
            said.update(ridge.findings())

    def _rows_of(self, kinds: Sequence[RowKind], texts: TextBatch) -> dict[str, tuple[Tensor, Tensor]]:
        """The rows of some of the kinds that are read."""
        batch = self.trainer.strategy.batch_to_device(self.stream.on_before_batch_transfer(texts, 0))
        each = zip(self.kinds, (batch, *batch.others), strict=True)
        return {str(kind): (rows.x, rows.y) for kind, rows in each if kind in kinds}

    def _panel(self, route: Route, kind: RowKind, moments: Moments, injects: bool) -> Panel:
        moments = moments if route.key == FORWARD else moments.swap()
        return Panel(
            route,
            [*build_floors(route, moments, self.seed), *self.methods[route]],
            self.n_texts,
            self.seed,
            kind=str(kind),
            means=(moments.mean_x, moments.mean_y),
            behaviour=self._behaviour(route) if injects else None,
            others=len(self.stream.split("other")) if self.other_text is not None else 0,
            fitting=self.fitting_errors,
        )

    def _behaviour(self, route: Route) -> Behaviour:
        asked = cast(Asked, self.asked)
        if asked.unit == "text":
            return Behaviour(route, asked, OF_LABELS, self.seed)
        tokens, special, _ = self.stream.split("fit").first_tokens()
        counted = tokens if asked.task == "causal" else tokens[~special]
        counts = counted.long().bincount(minlength=route.target.model.config.get_text_config().vocab_size)
        return Behaviour(route, asked, OF_TOKENS, self.seed, counts)

    def injected_into(self) -> list[FrozenModel]:
        """The targets of the routes on which states are injected."""
        return list(dict.fromkeys(route.target for route, why in self.not_injected.items() if why is None))

    def few_inputs(self) -> dict[str, Tensor]:
        """A few of the held-out texts."""
        return self.stream.split("test")[list(range(min(8, self.n_texts)))].to(self.device).inputs_x

    # ------------------------------------------------------------------ the passes

    def test_step(self, batch: PairedBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Score a batch of held-out, other or fitting texts."""
        each = dict(zip(map(str, self.kinds), (batch, *batch.others), strict=True))
        split = self.stream.splits[dataloader_idx]
        if split == "test":
            return self._score(batch.task, each)
        for panel in cast(Sequence[Panel], self.panels):
            update = panel.update_other if split == "other" else panel.update_fitting
            update(_read(panel, each[panel.kind]))

    def _score(self, task: TaskBatch | None, each: dict[str, PairedBatch]) -> None:
        """One batch of held-out texts. Each model answers once, whether as X, as Y, or as both."""
        natives = {} if task is None else self.natives(self.answering, task)
        injecting = [panel.route for panel in cast(Sequence[Panel], self.panels) if panel.behaviour is not None]
        masked = self.asked is not None and self.asked.task == "masked" and task is not None
        states = read_all(injecting, cast(TaskBatch, task)) if masked else None
        for panel in cast(Sequence[Panel], self.panels):
            read = _read(panel, each[panel.kind])
            if panel.behaviour is not None:
                read = read._replace(task=task, injected=None if states is None else states.sources(panel.route))
            panel.update(read, natives)

    def on_test_epoch_end(self) -> None:
        """Check the states of the last batch as well."""
        self.stream.reader.check.flush()
        super().on_test_epoch_end()
        self.rows = [row | {"direction": DIRECTIONS[row["direction"]]} for row in self.rows]


def _read(panel: Panel, batch: PairedBatch) -> Read:
    states = (batch.x, batch.y) if panel.route.key == FORWARD else (batch.y, batch.x)
    return Read(batch, *states)


def check_stored(stored: Sequence[StoredBank], present: dict[str, Any], sites: list[tuple[int, int]]) -> None:
    """Raise unless checkpoints are of the models and site pairs of a run.

    Args:
        stored: the checkpoints.
        present: what the run's data module is, by its `describe()`.
        sites: its site pairs.

    Raises:
        ValueError: naming the checkpoint and what differs.
    """
    for checkpoint in stored:
        refuse_other_models(checkpoint.data["models"], present["models"], str(checkpoint.path))
        refuse_other_component(checkpoint.data, present["component"], str(checkpoint.path))
        pairs = checkpoint.pairs.get(FORWARD, [])
        if pairs != list(sites):
            raise ValueError(
                f"{checkpoint.path} was fitted at site pairs {pairs}, but `data.sites` gives "
                f"{list(sites)}. Leave `data.sites` out, or evaluate checkpoints of different sites one by one."
            )
