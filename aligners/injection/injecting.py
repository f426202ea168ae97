"""The evaluation of maps: the distance of g(X's state) from Y's own, and whether Y still does its task with it."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from aligners.datamodules.module import TextModule, stream_of
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.rows.policies import RowKind
from aligners.datamodules.rows.read_rows import PairedBatch, Plan
from aligners.datamodules.task_targets import TaskBatch
from aligners.datamodules.text.sources import TextSource
from aligners.datamodules.tokens.splits import Split
from aligners.errors import check_known
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
    ReadStates,
    own_answers,
    read_all,
)
from aligners.injection.methods import (
    ALL_CLOSED_FORMS,
    BY_ROWS,
    CLOSED_FORMS,
    Method,
    build_floors,
    first_moments,
    route_methods,
    seen_by_any,
    stored_kind,
)
from aligners.injection.panels import Panel, PanelBatch
from aligners.injection.routes import InjectedTask, Route, paired_routes, targets_of
from aligners.injection.scoring.scores import ScoredTask, wrong_order
from aligners.injection.scoring.task_scores import matched_by_number
from aligners.maps.by_rows.drawn_rows import KeptRows
from aligners.maps.shared_solutions import SharedMoments
from aligners.models.loading.load_models import check_precision
from aligners.models.model import FrozenModel
from aligners.progress import hidden
from aligners.similarity.algebra.moments import Moments

TOKENS = RowKind("tokens")  # the rows that injection replaces: all of them
FOR_SELF_TEST = 8  # which texts are held out


class Evaluation(pl.LightningModule):
    """The common base of all evaluations that put states into models.

    Sums are kept text by text and added over ranks, so the figures are the same for any number of ranks. Before
    anything is measured, each model that states are put into must pass the self-test: injecting its own states changes
    nothing, bit for bit.

    Attributes:
        kind: class of the data module that is needed.
        stream: the data module of the run.
        stored: the checkpoints whose maps are measured.
        panels: a `Panel` for each route and kind of rows.
        rows: rows of the report, after the evaluation.
        meta: what the report says once for all rows.

    Args:
        seed: seed of the random floors and of the resampling of texts.
    """

    kind: type[TextModule]
    stored: Sequence[StoredBank] = ()
    panels: Any  # an nn.ModuleList, which has no type for its members

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.panels = nn.ModuleList()
        self.asked: ScoredTask | None = None
        self.rows: list[dict[str, Any]] = []
        self.meta: dict[str, Any] = {}

    @abstractmethod
    def prepare_panels(self) -> None:
        """Check the options, and make the panels or what they need."""

    @abstractmethod
    def injected_into(self) -> list[FrozenModel]:
        """The models that states are put into, each once."""

    def setup(self, stage: str) -> None:
        """Start afresh, as an evaluation may run twice. Texts that maps were fitted on are dropped."""
        self.stream: Any = stream_of(self.trainer, self.kind)
        self.panels = nn.ModuleList()
        self.rows = []
        fitted = {}
        for bank in self.stored:
            if bank.fitted is not None:
                fitted[str(bank.path)] = bank.fitted
        self.stream.leave_out(fitted)
        self.n_texts = len(self.stream.split("test"))
        self.prepare_panels()

    def about_answers(self, labels: dict[FrozenModel, Any]) -> dict[str, Any]:
        """Return what a report says of the task; null where nothing is asked.

        Args:
            labels: for each classifier that answers, which of its classes stands for which class of the texts.
        """
        about: dict[str, Any] = {}
        for name in ("task", "unit", "score"):
            about[name] = getattr(self.asked, name, None)
        about["labels"] = {model.name: words for model, words in labels.items()}
        about["cautions"] = matched_by_number(self.stream, list(labels))
        return {**about, "seed": self.seed, "split": "test"}

    def natives(self, models: Sequence[FrozenModel], task: TaskBatch) -> Natives:
        """Return the models' own answers, computed one model at a time so that only one model's logits are held."""
        return {model: own_answers(model, task) for model in models}

    @property
    def parts(self) -> int:
        """The number of steps of the progress bar in a batch: one for each method of each panel."""
        return sum(len(panel.methods) for panel in self.panels)

    def each(self, methods: Iterable[Method]) -> Iterator[Method]:
        """Yield each item, and tell the progress bar when it is done."""
        # Lightning's own bars have no steps within a batch
        done = getattr(self.trainer.progress_bar_callback, "part_done", None)
        for method in methods:
            yield method
            if done is not None:
                done()

    def on_test_start(self) -> None:
        """Run the self-test on a few held-out texts."""
        few = list(range(min(FOR_SELF_TEST, self.n_texts)))
        texts = self.stream.split("test")[few].to(self.device)
        for target in self.injected_into():
            inputs = texts.inputs[self.stream.frozen.index(target)]
            target.self_test(inputs, self.stream.component)

    def on_test_epoch_end(self) -> None:
        """Make the rows of the report: in each panel, one for every method and site."""
        self.rows = []
        native: dict[str, Tensor] = {}
        for panel in self.panels:
            self.rows += panel.rows(quiet=hidden(self._trainer))
            native |= panel.native_answers
        self.doubt_orders(native)

    def doubt_orders(self, native: Mapping[str, Tensor]) -> None:
        """Warn of classifiers whose classes seem to be in another order.

        Args:
            native: model -> (n,) its own answers.
        """
        asked = self.asked
        if asked is None or asked.labels is None or asked.regression:
            return
        cautions = list(self.meta["cautions"])
        for name, answers in native.items():
            caution = wrong_order(name, answers, asked.labels)
            if caution is not None:
                cautions.append(caution)
        self.meta["cautions"] = cautions


class InjectionEvaluation(Evaluation):
    """Measures every map at every site on held-out text: its errors, and what Y does with mapped states in place.

    Errors are measured on rows of each kind that a checkpoint was fitted on, and of the data module's kind. Injection
    replaces the states of all tokens, so where it is possible, errors are measured on all tokens too. It needs equal
    tokenizers and a target with a head: a classifier, for which the texts need labels, or a language model, masked or
    causal. Where it is not possible, `meta["not_injected"]` says why.

    Each model's front runs once per batch for all sites, kinds of rows and methods, and once more if texts are masked.

    Floors are made from the moments of the fitting rows of each kind. Where no checkpoint has them, a pass over the
    fitting texts computes them first.

    Args:
        stored: what is measured: a fitted `Alignment`, or checkpoints, all with the same models and site pairs.
        closed_form: names of closed forms to fit to the moments of the first checkpoint, where no checkpoint holds
            them. Those that keep rows take another pass over the fitting texts. One that cannot be fitted is left out,
            and `meta["refusals"]` says why.
        both_directions: also map Y's states into X: with the inverse of a bijective aligner, and for any other with an
            aligner fitted from Y to X.
        seed: seed of the random floors and of the resampling of texts.
        other_text: another source; on its held-out texts errors are measured too, for the columns `fvu_other`. Texts
            that maps were fitted on are left out, and `meta["other_text"]` says how many.
        masked_share: share of the tokens that a masked language model must predict.
        fitting_errors: also measure the errors on as many fitting texts as are held out, for the columns `mse_fit`,
            `fvu_fit` and `relative_error_fit`. They distinguish a poor fit from one that does not generalise.
        source_pooler: also score, at Y's last site, what Y's classifier answers where X's pooler reads the mapped
            states in place of Y's own, as the code released with Ren et al. 2023 does: `accuracy_source_pooler`.
            Nothing is added for models of different widths or without poolers.
        kl: also measure KL(own ‖ injected) of Y's distributions over classes or tokens, in nats per text or token, with
            its interval over texts. It sees changes that the right answer's loss does not. It costs a forward pass of Y
            more for each map, and the memory of two batches' logits at a time. Predicted numbers have none.

    Raises:
        ValueError: a closed form is unknown, or no checkpoint holds moments.
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
        kl: bool = False,
    ) -> None:
        super().__init__(seed)
        check_known(ALL_CLOSED_FORMS, closed_form=closed_form)
        if isinstance(stored, BankTraining):
            stored = [stored]
        self.stored = [stored_of(maps) for maps in stored]
        first_moments(
            self.stored
        )  # the checkpoint whose moments the floors are made from
        self.closed_form = list(closed_form)
        self.both_directions = both_directions
        self.other_text = other_text
        self.masked_share = masked_share
        self.fitting_errors = fitting_errors
        self.source_pooler = source_pooler
        self.kl = kl

    # ------------------------------------------------------------------ before

    def prepare_panels(self) -> None:
        """Check the options, and choose the routes, the task and the rows."""
        check_precision(self.trainer)
        data = self.stream
        described = data.describe()
        check_stored(self.stored, described, data.reader.sites)
        self.routes = paired_routes(data, both_directions=self.both_directions)
        self.task = InjectedTask.of(
            data, self.routes, masked_share=self.masked_share, seed=self.seed
        )
        self.asked = self.task.asked
        self._choose_kinds()
        plan = Plan(
            self.kinds,
            seen_by_any(self.stored, data),
            self.other_text,
            self.task.targets_of,
            self.fitting_errors,
        )
        data.plan(plan)
        self.meta = {**described, **data.describe_other(), **self._about_task()}

    def _about_task(self) -> dict[str, Any]:
        """Report the task, the cases of few rows, and the routes on which nothing is injected."""
        about = self.about_answers(self.task.labels or {})
        about["cautions"] += few_rows(*self.fitted.values())
        about["masked_share"] = None
        if about["task"] == "masked":
            about["masked_share"] = self.masked_share
        about["not_injected"] = {}
        for route, why in self.task.not_injected.items():
            if why is not None:
                about["not_injected"][DIRECTIONS[route.key]] = why
        return about

    def _choose_kinds(self) -> None:
        """Choose the kinds of rows on which errors are measured, and the moments that checkpoints hold of them."""
        self.fitted: dict[RowKind, Moments] = {}
        for bank in reversed(self.stored):  # if kinds are equal, the first one stays
            if bank.moments is not None:
                self.fitted[stored_kind(bank)] = bank.moments
        kinds = [self.stream.reader.kind, *map(stored_kind, self.stored)]
        if self.injected_into():
            kinds.append(TOKENS)
        self.kinds: list[RowKind] = list(dict.fromkeys(kinds))

    def on_test_start(self) -> None:
        """Run the self-test, and make the panels once the moments of all rows are known."""
        super().on_test_start()
        moments = self._moments_of_kinds()
        kept = self._kept_rows()
        validation = self._validation_moments()
        self.meta["methods"] = {}
        self.meta["refusals"] = {}
        _, of_first = first_moments(self.stored)
        shared = SharedMoments.of(of_first.to(self.device))
        for route in self.routes:
            self._add_panels(route, moments, validation, shared, kept)
        self.panels.to(self.device)

    def _moments_of_kinds(self) -> dict[str, Moments]:
        """Return the moments of the fitting rows of each kind: a checkpoint's where they are of the same rows."""
        known = dict(self.fitted)
        if self.stream.far.any():
            for bank in self.stored:
                if bank.data.get("far_rows", "keep") != self.stream.far_rows:
                    known.pop(stored_kind(bank), None)
        moments = {}
        for of_rows, of_kind in known.items():
            moments[str(of_rows)] = of_kind.to(self.device)
        lacking = [str(kind) for kind in self.kinds if kind not in known]
        if lacking:
            moments |= self._read_moments("fit", lacking)
        return moments

    def _validation_moments(self) -> Moments | None:
        """Return the moments that choose the strength of ridges that no checkpoint holds, as in a fit."""
        if not self._lacking("ridge"):
            return None
        kind, _ = first_moments(self.stored)
        return self._read_moments("validation", [str(kind)])[str(kind)]

    def _lacking(self, name: str) -> bool:
        """Tell whether a closed form is asked for on a route for which no checkpoint holds it."""
        lacking = {route.key for route in self.routes}
        for bank in self.stored:
            for route, maps in bank.maps.items():
                if name in maps:
                    lacking.discard(route)
        return name in self.closed_form and bool(lacking)

    def _kept_rows(self) -> KeptRows:
        """Draw the rows for closed forms that no checkpoint holds, as in a fit."""
        reader = self.stream.reader
        sites = len(reader.sites)
        maps = []
        for name, kind in BY_ROWS.items():
            if self._lacking(name):
                maps.append(kind(sites, *reader.widths))
        kept = KeptRows.of(maps, sites, reader.widths, self.device)
        of_rows, _ = first_moments(self.stored)
        splits: tuple[Split, ...] = ("fit", "validation")
        for split in splits:
            add = kept.adding(split)
            if add is not None:
                self._read_moments(split, [str(of_rows)], add)
        kept.end()
        return kept

    def _read_moments(
        self,
        split: Split,
        kinds: Sequence[str],
        add: Callable[[PairedBatch], None] | None = None,
    ) -> dict[str, Moments]:
        """Compute the moments of some kinds of rows, on the texts of a split, and `add` those of the first."""

        def rows_of(batch: PairedBatch) -> dict[str, tuple[Tensor, Tensor]]:
            by_kind = self._by_kind(batch)
            return {kind: (by_kind[kind].x, by_kind[kind].y) for kind in kinds}

        also = None
        if add is not None:

            def also(batch: PairedBatch) -> None:
                add(self._by_kind(batch)[kinds[0]])

        return moments_of_states(self.stream, rows_of, split, also=also, kinds=kinds)

    def _by_kind(self, batch: PairedBatch) -> dict[str, PairedBatch]:
        """Return the rows of each kind."""
        batches = batch, *batch.others
        return dict(zip(map(str, self.kinds), batches, strict=True))

    def _add_panels(
        self,
        route: Route,
        moments: Mapping[str, Moments],
        validation: Moments | None,
        shared: SharedMoments,
        kept: KeptRows,
    ) -> None:
        """Collect the maps of a route, and make its panel for each kind of rows."""
        methods, refusals = route_methods(
            route, self.stored, self.closed_form, validation, shared, kept
        )
        way = DIRECTIONS[route.key]
        for method in methods:
            self.meta["methods"][f"{way}.{method.name}"] = method.about
        for name, why in refusals.items():
            self.meta["refusals"][f"{way}.{name}"] = why
        for kind in self.kinds:
            injects = kind == TOKENS and self.task.not_injected[route] is None
            # a file of stitching layers has no moments: its rows are read only to be injected
            if injects or kind == self.stream.reader.kind or kind in self.fitted:
                of_kind = moments[str(kind)]
                panel = self._panel(route, str(kind), of_kind, methods, injects)
                self.panels.append(panel)

    def _panel(
        self,
        route: Route,
        kind: str,
        moments: Moments,
        methods: Sequence[Method],
        injects: bool,
    ) -> Panel:
        """Make the panel of a route and a kind of rows, with its floors."""
        if route.key != FORWARD:
            moments = moments.swap()
        floors = build_floors(route, moments, self.seed)
        others = 0
        if self.other_text is not None:
            others = len(self.stream.split("other"))
        behaviour = None
        if injects:
            behaviour = self._behaviour(route)
        return Panel(
            route,
            [*floors, *methods],
            self.n_texts,
            self.seed,
            kind=kind,
            means=(moments.mean_x, moments.mean_y),
            behaviour=behaviour,
            others=others,
            retrieval=HeldOutRows(*route.sizes, self.seed, self.device),
            far_rows=self.stream.far_rows,
        )

    def _behaviour(self, route: Route) -> Behaviour:
        """Make the object that puts mapped states into the target of a route."""
        asked = cast(ScoredTask, self.asked)
        if asked.unit == "text":
            return Behaviour(
                route,
                asked,
                OF_LABELS,
                self.seed,
                source_pooler=self.source_pooler,
                kl=self.kl,
            )
        counts = self._token_counts(route.target, asked)
        return Behaviour(route, asked, OF_TOKENS, self.seed, counts, kl=self.kl)

    def _token_counts(self, target: FrozenModel, asked: ScoredTask) -> Tensor:
        """Count each token in the fitting texts, (V,), except special tokens, which are never masked."""
        tokens, special, _ = self.stream.split("fit").tokens_of(0)
        if asked.task == "masked":
            tokens = tokens[~special]
        vocabulary = target.model.config.get_text_config().vocab_size
        return torch.bincount(tokens.long(), minlength=vocabulary)

    def injected_into(self) -> list[FrozenModel]:
        """The targets of the routes on which states are injected."""
        reasons = self.task.not_injected.items()
        return targets_of(route for route, why in reasons if why is None)

    # ------------------------------------------------------------------ the passes

    def test_step(
        self, batch: PairedBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Score a batch of held-out, other or fitting texts. Each model answers once, whether it is X, Y, or both."""
        by_kind = self._by_kind(batch)
        split = self.stream.splits[dataloader_idx]
        if split != "test":
            for panel in self.panels:
                read = _oriented(by_kind[panel.kind], panel.route)
                panel.update_squares(split, read, self.each)
            return

        natives = {}
        if batch.task is not None:
            natives = self.natives(self.task.answering, batch.task)
        states = self._masked_states(batch)
        for panel in self.panels:
            read = self._read(panel, by_kind[panel.kind], batch.task, states)
            panel.update(read, natives, self.each)

    def _masked_states(self, batch: PairedBatch) -> ReadStates | None:
        """Return models' states on masked texts, also targets' where far rows are not replaced; None if not masked."""
        if batch.task is None or self.meta["masked_share"] is None:
            return None
        routes = [panel.route for panel in self.panels if panel.behaviour is not None]
        far = [part for part in (batch, *batch.others) if part.whole is not None]
        return read_all(routes, batch.task, targets=bool(far))

    def _read(
        self,
        panel: Panel,
        batch: PairedBatch,
        task: TaskBatch | None,
        states: ReadStates | None,
    ) -> PanelBatch:
        """Return what a panel gets of a batch."""
        route = panel.route
        read = _oriented(batch, route)
        beside = batch.counterpart
        if beside is not None:
            read = read._replace(beside=_oriented(beside, route))
        if panel.behaviour is None:
            return read

        read = read._replace(task=task)
        if states is not None:
            read = read._replace(injected=states.sources(route))
        if beside is None or beside.rows.far is None:
            return read
        # far rows were left out of the batch, and Y keeps its own states there
        own = _oriented(beside, route).target
        if states is not None:
            own = states.targets(route)
        return read._replace(own=own)

    def on_test_epoch_end(self) -> None:
        """Check the states of the last batch as well, and name the directions."""
        self.stream.reader.check.flush()
        super().on_test_epoch_end()
        for row in self.rows:
            row["direction"] = DIRECTIONS[row["direction"]]


def _oriented(batch: PairedBatch, route: Route) -> PanelBatch:
    """Return a batch in the direction that a route reads it."""
    if route.key == FORWARD:
        return PanelBatch(batch, batch.x, batch.y)
    return PanelBatch(batch, batch.y, batch.x)


def check_stored(
    stored: Sequence[StoredBank], present: dict[str, Any], sites: list[tuple[int, int]]
) -> None:
    """Raise unless checkpoints are of the models and site pairs of a run.

    Args:
        stored: checkpoints to check.
        present: the run's data module, by its `describe()`.
        sites: site pairs of the run.

    Raises:
        ValueError: they are not; the message names the checkpoint and what differs.
    """
    models, component = present["models"], present["component"]
    for bank in stored:
        refuse_other_bank(bank, models, component, {FORWARD: sites})
