"""The evaluation of maps: how far g(X's state) is from Y's own, and whether Y still does its task with it in place."""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

import lightning.pytorch as pl
from torch import Tensor, nn

from aligners.datamodules.module import TextModule, stream_of
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.rows.policies import RowKind
from aligners.datamodules.rows.read_rows import PairedBatch, Plan
from aligners.datamodules.task_targets import TaskBatch
from aligners.datamodules.text.sources import TextSource
from aligners.datamodules.tokens.splits import Split
from aligners.errors import UserError, check_known
from aligners.fitting.bank_training import BankTraining, stored_of
from aligners.fitting.heldout_retrieval import HeldOutRows
from aligners.fitting.read_moments import moments_of_states
from aligners.fitting.saved_bank import (
    DIRECTIONS,
    FORWARD,
    StoredBank,
    refuse_other_bank,
)
from aligners.fitting.training_status import few_rows
from aligners.injection.behaviour import (
    OF_LABELS,
    OF_TOKENS,
    Behaviour,
    Natives,
    own_answers,
    read_all,
)
from aligners.injection.methods import (
    CLOSED_FORMS,
    Method,
    build_floors,
    route_methods,
    seen_by_any,
    stored_kind,
)
from aligners.injection.panels import Panel, PanelBatch
from aligners.injection.routes import InjectedTask, Route, paired_routes
from aligners.injection.scoring.scores import ScoredTask, wrong_order
from aligners.injection.scoring.task_scores import matched_by_number
from aligners.models.loading.load_models import check_precision
from aligners.models.model import FrozenModel
from aligners.progress import hidden
from aligners.similarity.algebra.moments import Moments

TOKENS = RowKind("tokens")  # the rows that injection replaces: all of them


class Evaluation(pl.LightningModule):
    """What `evaluate.py inject` and `evaluate.py stitch` share: panels of methods at sites, and rows made of them.

    Everything is kept text by text and added over ranks, so the figures are the same for any number of them. Before
    anything is measured, a model that states are put into must pass the self-test: injecting what was read changes
    nothing, bit for bit.

    Attributes:
        kind: of the data module that it needs.
        stream: that of the run.
        stored: the checkpoints whose maps are measured.
        panels: one for each route and kind of rows.
        rows: of the report, after the evaluation.
        meta: what holds for all of them.

    Args:
        seed: of the random floors and of the resampling of texts.
    """

    kind: type[TextModule]
    stored: Sequence[StoredBank] = ()

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed, self.panels = seed, nn.ModuleList()
        self.asked: ScoredTask | None = None
        self.rows: list[dict[str, Any]] = []
        self.meta: dict[str, Any] = {}

    @abstractmethod
    def prepare_panels(self) -> None:
        """Check everything, and make the panels or what they need."""

    @abstractmethod
    def injected_into(self) -> list[FrozenModel]:
        """The models that states are put into, each once."""

    def setup(self, stage: str) -> None:
        """Start afresh, as an evaluation may run twice; texts that maps were fitted on are not held out."""
        self.stream: Any = stream_of(self.trainer, self.kind)
        self.panels, self.rows = nn.ModuleList(), []
        self.stream.leave_out(
            {
                str(bank.path): bank.fitted
                for bank in self.stored
                if bank.fitted is not None
            }
        )
        self.n_texts = len(self.stream.split("test"))
        self.prepare_panels()

    def about_answers(self, labels: dict[FrozenModel, Any]) -> dict[str, Any]:
        """What a report says of the task, where there is one.

        Args:
            labels: of each classifier that answers, what was matched with what.
        """
        return {
            **{
                name: getattr(self.asked, name, None)
                for name in ("task", "unit", "score")
            },
            "labels": {model.name: words for model, words in labels.items()},
            "cautions": matched_by_number(self.stream, list(labels)),
            "seed": self.seed,
            "split": "test",
        }

    def natives(self, models: Sequence[FrozenModel], task: TaskBatch) -> Natives:
        """What the models answer by themselves, one after another, so that only one model's logits are held."""
        return {model: own_answers(model, task) for model in models}

    @property
    def parts(self) -> int:
        """The steps of the progress bar in a batch: a method of a panel takes one."""
        return sum(len(panel.methods) for panel in cast(Sequence[Panel], self.panels))

    def each(self, methods: Iterable[Method]) -> Iterator[Method]:
        """Yield each, and tell the progress bar when it is done."""
        for method in methods:
            yield method
            getattr(
                self.trainer.progress_bar_callback, "part_done", int
            )()  # Lightning's own bars know no parts

    def on_test_start(self) -> None:
        """Run the self-test, on a few of the held-out texts."""
        few = self.stream.split("test")[list(range(min(8, self.n_texts)))].to(
            self.device
        )
        for target in self.injected_into():
            target.self_test(
                few.inputs[self.stream.frozen.index(target)], self.stream.component
            )

    def on_test_epoch_end(self) -> None:
        """One row for every method and site, in each panel."""
        panels = cast(Sequence[Panel], self.panels)
        self.rows = [
            row for panel in panels for row in panel.rows(quiet=hidden(self._trainer))
        ]
        self.doubt_orders(
            {
                name: answers
                for panel in panels
                for name, answers in panel.native_answers.items()
            }
        )

    def doubt_orders(self, native: dict[str, Tensor]) -> None:
        """Caution in the report, which is printed next, about classifiers whose classes seem to be in another order.

        Args:
            native: model -> (n,) what it answers by itself.
        """
        if self.asked is None or self.asked.labels is None or self.asked.regression:
            return
        cautions = [
            wrong_order(name, answers, self.asked.labels)
            for name, answers in native.items()
        ]
        self.meta["cautions"] = [*self.meta["cautions"], *filter(None, cautions)]


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
        stored: what is measured: a fitted `Alignment`, or checkpoints, all of the same models and site pairs.
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
        source_pooler: also score, at Y's last site, what Y's classifier answers where X's pooler reads the mapped
            states in place of Y's own, as the code released with Ren et al. 2023 does: `accuracy_source_pooler`.
            Nothing is added for models of different widths, or without a pooler.
    """

    kind = PairedActivations

    def __init__(
        self,
        stored: BankTraining | Sequence[StoredBank | BankTraining],
        closed_form: Sequence[str] = tuple(CLOSED_FORMS),
        both_directions: bool = False,
        seed: int = 0,
        other_text: TextSource | None = None,
        masked_share: float = 0.15,
        fitting_errors: bool = False,
        source_pooler: bool = False,
    ) -> None:
        super().__init__(seed)
        check_known(CLOSED_FORMS, closed_form=closed_form)
        banks = [
            stored_of(maps)
            for maps in ([stored] if isinstance(stored, BankTraining) else stored)
        ]
        if all(bank.moments is None for bank in banks):
            raise UserError(
                "Expected a checkpoint of `train.py fit` in `stored`, whose moments floors need."
            )
        self.stored, self.closed_form = banks, list(closed_form)
        self.both_directions, self.other_text = both_directions, other_text
        self.masked_share, self.fitting_errors, self.source_pooler = (
            masked_share,
            fitting_errors,
            source_pooler,
        )

    # ------------------------------------------------------------------ before

    def prepare_panels(self) -> None:
        """Check everything; collect the maps of each direction, and choose the rows that they are measured on."""
        check_precision(self.trainer)
        data, reader = self.stream, self.stream.reader
        described = data.describe()
        check_stored(self.stored, described, reader.sites)
        self.routes = paired_routes(data, both_directions=self.both_directions)
        task = InjectedTask.of(
            data, self.routes, masked_share=self.masked_share, seed=self.seed
        )
        self.not_injected, self.answering, self.asked = (
            task.not_injected,
            task.answering,
            task.asked,
        )
        known = [
            checkpoint
            for checkpoint in reversed(self.stored)
            if checkpoint.moments is not None
        ]
        self.fitted = {
            stored_kind(checkpoint): cast(Moments, checkpoint.moments)
            for checkpoint in known
        }
        injects = [TOKENS] if self.injected_into() else []
        self.kinds = list(
            dict.fromkeys([reader.kind, *map(stored_kind, self.stored), *injects])
        )
        data.plan(
            Plan(
                self.kinds,
                seen_by_any(self.stored, data),
                self.other_text,
                task.targets_of,
                self.fitting_errors,
            )
        )
        masked = self.asked is not None and self.asked.task == "masked"
        answers = self.about_answers(task.labels or {})
        self.meta = {
            **described,
            **data.describe_other(),
            **answers,
            "cautions": answers["cautions"] + few_rows(*self.fitted.values()),
            "masked_share": self.masked_share if masked else None,
            "not_injected": {
                DIRECTIONS[r.key]: why
                for r, why in self.not_injected.items()
                if why is not None
            },
        }

    def on_test_start(self) -> None:
        """Run the self-test, and make the panels once the moments of all rows are known."""
        super().on_test_start()
        known = self._fitted_alike()
        lacking = [kind for kind in self.kinds if kind not in known]
        moments = {str(kind): moments for kind, moments in known.items()}
        moments |= self._moments("fit", lacking) if lacking else {}
        validation = self._validation_moments()
        self.meta |= {"methods": {}, "refusals": {}}
        for route in self.routes:
            methods, refusals = route_methods(
                route, self.stored, self.closed_form, validation
            )
            way = DIRECTIONS[route.key]
            self.meta["methods"] |= {
                f"{way}.{method.name}": method.about for method in methods
            }
            self.meta["refusals"] |= {
                f"{way}.{name}": why for name, why in refusals.items()
            }
            for kind in self.kinds:
                injects = kind == TOKENS and self.not_injected[route] is None
                if injects or kind == self.stream.reader.kind or kind in self.fitted:
                    self.panels.append(
                        self._panel(route, kind, moments[str(kind)], methods, injects)
                    )
        self.panels.to(self.device)

    def _fitted_alike(self) -> dict[RowKind, Moments]:
        """The moments of checkpoints, without those that have far rows where this run leaves them out, or lack them."""
        if not self.stream.far.any():
            return self.fitted
        other = {
            stored_kind(bank)
            for bank in self.stored
            if bank.data.get("far_rows", "keep") != self.stream.far_rows
        }
        return {
            kind: moments for kind, moments in self.fitted.items() if kind not in other
        }

    def _validation_moments(self) -> Moments | None:
        """Moments on which ridges that no checkpoint holds choose their strength, as in a fit."""
        held = [
            any("ridge" in bank.maps.get(route.key, {}) for bank in self.stored)
            for route in self.routes
        ]
        if "ridge" not in self.closed_form or all(held):
            return None
        first = next(bank for bank in self.stored if bank.moments is not None)
        kind, device = stored_kind(first), cast(Moments, first.moments).n.device
        return Moments(
            *(
                part.to(device)
                for part in self._moments("validation", [kind])[str(kind)]
            )
        )

    def _moments(self, split: Split, kinds: Sequence[RowKind]) -> dict[str, Moments]:
        """Moments of some kinds of rows, on the texts of a split."""

        def rows_of(batch: PairedBatch) -> dict[str, tuple[Tensor, Tensor]]:
            pairs = zip(self.kinds, (batch, *batch.others), strict=True)
            return {
                str(kind): (rows.x, rows.y) for kind, rows in pairs if kind in kinds
            }

        return moments_of_states(
            self.stream, rows_of, split, kinds=[str(kind) for kind in kinds]
        )

    def _panel(
        self,
        route: Route,
        kind: RowKind,
        moments: Moments,
        methods: Sequence[Method],
        injects: bool,
    ) -> Panel:
        moments = moments if route.key == FORWARD else moments.swap()
        sizes = len(route.pairs), route.source.width, route.target.width
        return Panel(
            route,
            [*build_floors(route, moments, self.seed), *methods],
            self.n_texts,
            self.seed,
            kind=str(kind),
            means=(moments.mean_x, moments.mean_y),
            behaviour=self._behaviour(route) if injects else None,
            others=len(self.stream.split("other"))
            if self.other_text is not None
            else 0,
            fitting=self.fitting_errors,
            retrieval=HeldOutRows(*sizes, self.seed, self.device),
            far_rows=self.stream.far_rows,
        )

    def _behaviour(self, route: Route) -> Behaviour:
        scored = cast(ScoredTask, self.asked)
        if scored.unit == "text":
            return Behaviour(
                route, scored, OF_LABELS, self.seed, source_pooler=self.source_pooler
            )
        tokens, special, _ = self.stream.split("fit").first_tokens()
        counted = tokens if scored.task == "causal" else tokens[~special]
        counts = counted.long().bincount(
            minlength=route.target.model.config.get_text_config().vocab_size
        )
        return Behaviour(route, scored, OF_TOKENS, self.seed, counts)

    def injected_into(self) -> list[FrozenModel]:
        """The targets of the routes on which states are injected."""
        return list(
            dict.fromkeys(
                route.target for route, why in self.not_injected.items() if why is None
            )
        )

    # ------------------------------------------------------------------ the passes

    def test_step(
        self, batch: PairedBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Score a batch of held-out, other or fitting texts. Each model answers once, as X, as Y, or as both."""
        by_kind = dict(zip(map(str, self.kinds), (batch, *batch.others), strict=True))
        split, task = self.stream.splits[dataloader_idx], batch.task
        panels = cast(Sequence[Panel], self.panels)
        natives = {} if task is None else self.natives(self.answering, task)
        injecting = [panel.route for panel in panels if panel.behaviour is not None]
        masked = task is not None and self.meta["masked_share"] is not None
        far = any(paired.whole is not None for paired in by_kind.values())
        states = (
            read_all(injecting, cast(TaskBatch, task), targets=far) if masked else None
        )
        for panel in panels:
            paired = by_kind[panel.kind]
            read, beside = _oriented(paired, panel.route), paired.counterpart
            if split != "test":
                panel.update_squares(split, read, self.each)
                continue
            if panel.behaviour is not None:
                read = read._replace(
                    task=task,
                    injected=None if states is None else states.sources(panel.route),
                )
            if beside is not None:
                read = read._replace(beside=_oriented(beside, panel.route))
                if panel.behaviour is not None and self.stream.far_rows == "leave_out":
                    own = (
                        cast(PanelBatch, read.beside).target
                        if states is None
                        else states.targets(panel.route)
                    )
                    read = read._replace(own=own)
            panel.update(read, natives, self.each)

    def on_test_epoch_end(self) -> None:
        """Check the states of the last batch as well."""
        self.stream.reader.check.flush()
        super().on_test_epoch_end()
        self.rows = [
            row | {"direction": DIRECTIONS[row["direction"]]} for row in self.rows
        ]


def _oriented(batch: PairedBatch, route: Route) -> PanelBatch:
    """A batch as a route reads it."""
    return PanelBatch(
        batch, *((batch.x, batch.y) if route.key == FORWARD else (batch.y, batch.x))
    )


def check_stored(
    stored: Sequence[StoredBank], present: dict[str, Any], sites: list[tuple[int, int]]
) -> None:
    """Raise unless checkpoints are of the models and site pairs of a run.

    Args:
        stored: the checkpoints.
        present: what the run's data module is, by its `describe()`.
        sites: its site pairs.

    Raises:
        ValueError: naming the checkpoint and what differs.
    """
    for bank in stored:
        refuse_other_bank(
            bank, present["models"], present["component"], {FORWARD: sites}
        )
