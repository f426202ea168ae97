"""The evaluation of maps: how far g(X's state) is from Y's own, and whether Y still does its task with it in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import lightning.pytorch as pl
from torch import Tensor, nn

from aligners.injection.behaviour import Behaviour
from aligners.injection.methods import CLOSED_FORMS, Route, build_route, stored_kind
from aligners.injection.panels import Panel
from aligners.injection.seen import fitted_texts, seen_by_any
from aligners.scoring.answers import in_data_order, match_heads
from aligners.scoring.task_scores import ScoredTask
from aligners.scoring.tasks import check_labels
from aligners.storage import StoredAlignment, different_models
from datamodules.protocol import PairedData, stream_of
from datamodules.reading import PairedBatch, RowKind
from datamodules.text.labels import known_labels
from datamodules.text.sources import TextSource
from datamodules.text.tokens import same_tokenizer
from frozen.loading.precision import check_precision
from frozen.model import FrozenModel
from similarity.functional.moments import Moments
from similarity.moments import MomentsMetric

__all__ = ["InjectionEvaluation"]

TOKENS = RowKind("tokens")  # the rows that injection replaces: all of them


class InjectionEvaluation(pl.LightningModule):
    """Measures every map at every site on held-out text: its errors, and by injection what Y does with it in place.

    Errors are measured on rows of the kinds that maps were fitted on, and of that of the data module. Injection needs a
    target with a classification head, labels, and one tokenizer, and replaces the states of all tokens; where it is
    possible, errors are measured on these too, and where not, `meta["not_injected"]` says why.

    Each model's head runs once a batch, for all sites, rows and methods. Everything is kept text by text and added over
    ranks, so the figures are the same for any number of them. Before anything is measured, a model that states are put
    into must pass the self-test: injecting what was read changes nothing, bit for bit.

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
    """

    def __init__(
        self,
        stored: Sequence[StoredAlignment],
        closed_form: Sequence[str] = tuple(CLOSED_FORMS),
        both_directions: bool = False,
        seed: int = 0,
        other_text: TextSource | None = None,
    ) -> None:
        super().__init__()
        unknown = [name for name in closed_form if name not in CLOSED_FORMS]
        if unknown:
            raise ValueError(f"Expected `closed_form` out of {', '.join(CLOSED_FORMS)}, but got {', '.join(unknown)}.")
        if not stored:
            raise ValueError("Expected at least one checkpoint in `stored`, but got none.")
        self.stored, self.closed_form = list(stored), list(closed_form)
        self.both_directions, self.seed, self.other_text = both_directions, seed, other_text
        self.panels, self.lacking = nn.ModuleList(), nn.ModuleDict()
        self.rows: list[dict[str, Any]] = []
        self.meta: dict[str, Any] = {}

    # ------------------------------------------------------------------ before

    @property
    def _stream(self) -> PairedData:
        """The data module of the run."""
        return stream_of(self.trainer, PairedData)

    def setup(self, stage: str) -> None:
        """Every check, the maps of each direction, and which rows they are measured on."""
        self.panels, self.rows = nn.ModuleList(), []
        check_precision(self.trainer)
        data, reader = self._stream, self._stream.reader
        self.sites = reader.sites
        described = data.describe()
        _check_stored(self.stored, described, self.sites)
        pairs = [(reader.model_x, reader.model_y), (reader.model_y, reader.model_x)]
        directions = zip(("forward", "backward"), pairs[: 1 + self.both_directions], strict=False)
        self.routes = [
            build_route(cast(Any, direction), *models, stored=self.stored, closed_form=self.closed_form)
            for direction, models in directions
        ]
        self.not_injected = {route.direction: self._no_injection(route) for route in self.routes}
        asked = [route.target for route in self.routes if self.not_injected[route.direction] is None]
        self.heads = match_heads(data, asked, [reader.model_x, reader.model_y]) if asked else {}
        self.task = ScoredTask.of(data, regression=asked[0].regression, seed=self.seed) if asked else None
        self._choose_rows()
        data.plan(
            ("fit", "test") if self.lacking else ("test",),
            kinds=self.kinds,
            measured=seen_by_any(self.stored, data),
            other=self.other_text,
            known=fitted_texts(self.stored, data) if self.other_text is not None else (),
        )
        self.n_texts = len(data.split("test"))
        self.meta = {**described, **data.describe_other(), **self._findings(), "seed": self.seed, "split": "test"}
        if not self.lacking:
            self._begin()

    def _no_injection(self, route: Route) -> str | None:
        """Why states cannot be put into the target, or None.

        Raises:
            ValueError: the labels are not those of the target's head.
        """
        labels, source = self._stream.split("test").labels, self._stream.text.source
        if route.target.n_labels is None:
            return f"{route.target.name} has no classification head"
        if labels is None or not known_labels(labels).any():
            return f"the texts of {source!r} have no labels"
        if not same_tokenizer(*(cast(Any, model.tokenizer) for model in (route.source, route.target))):
            return f"the tokenizers of {route.source.name} and {route.target.name} differ"
        check_labels(route.target, labels, source)
        return None

    def _choose_rows(self) -> None:
        """The kinds of rows to read, and those whose moments no checkpoint holds."""
        data = self._stream
        self.fitted = {stored_kind(checkpoint): checkpoint.moments for checkpoint in reversed(self.stored)}
        own = data.reader.kind
        injects = [TOKENS] if None in self.not_injected.values() else []
        kinds = list(dict.fromkeys([own, *map(stored_kind, self.stored), *injects]))
        self.kinds = kinds
        sizes = len(self.sites), data.reader.model_x.width, data.reader.model_y.width
        self.lacking = nn.ModuleDict(
            {str(place): MomentsMetric(*sizes) for place, kind in enumerate(kinds) if kind not in self.fitted}
        )

    def _findings(self) -> dict[str, Any]:
        """What the report says of all rows beyond the data."""
        return {
            "methods": {f"{route.direction}.{m.name}": m.about for route in self.routes for m in route.methods},
            "refusals": {f"{route.direction}.{n}": why for route in self.routes for n, why in route.refusals.items()},
            "labels": {model.name: words for model, words in self.heads.items()},
            "score": None if self.task is None else self.task.score,
            "not_injected": {direction: why for direction, why in self.not_injected.items() if why is not None},
        }

    def _begin(self) -> None:
        """The panels, once the moments of all rows are known."""
        found = {self.kinds[int(place)]: cast(Any, metric).compute() for place, metric in self.lacking.items()}
        for route in self.routes:
            for kind in self.kinds:
                injects = kind == TOKENS and self.not_injected[route.direction] is None
                if injects or kind == self._stream.reader.kind or kind in self.fitted:
                    self.panels.append(self._panel(route, kind, {**found, **self.fitted}[kind], injects))
        self.panels.to(self.device)

    def _panel(self, route: Route, kind: RowKind, moments: Moments, injects: bool) -> Panel:
        data, behaviour = self._stream, None
        others = len(data.split("other")) if self.other_text is not None else 0
        if injects:
            sites = [route.orient(*pair)[1] for pair in self.sites]
            behaviour = Behaviour(route, sites, data.component, cast(ScoredTask, self.task), self.seed)
        return Panel(route, kind, moments, self.sites, self.n_texts, others, behaviour, self.seed)

    def on_test_start(self) -> None:
        """The self-test, on a few of the held-out texts."""
        few = self._stream.split("test")[list(range(min(8, self.n_texts)))].to(self.device)
        for route in self.routes:
            if self.not_injected[route.direction] is None:
                route.target.self_test(few.inputs_x, self._stream.component)

    # ------------------------------------------------------------------ the passes

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Between the pass over the fitting texts and that over the held-out ones."""
        if self.lacking and batch_idx == 0 and self._stream.splits[dataloader_idx] == "test":
            self._begin()

    def test_step(self, batch: PairedBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add a batch of fitting texts to the moments that are missing, or score one of held-out or other texts."""
        each = dict(zip(self.kinds, (batch, *batch.others), strict=True))
        if self._stream.splits[dataloader_idx] == "fit":
            for place, metric in self.lacking.items():
                rows = each[self.kinds[int(place)]]
                cast(Any, metric).update(rows.x, rows.y)
            return
        if self._stream.splits[dataloader_idx] == "other":
            for panel in cast(Any, self.panels):
                panel.update_other(each[panel.kind])
            return
        natives = self._natives(batch)  # each model answers once, whether as X, as Y, or as both
        for panel in cast(Any, self.panels):
            panel.update(each[panel.kind], natives)

    def _natives(self, batch: PairedBatch) -> dict[FrozenModel, Tensor]:
        """What each model with a head for the task says by itself, where states are injected."""
        return {model: in_data_order(model.logits(batch.texts.inputs_x), model.class_map) for model in self.heads}

    # ------------------------------------------------------------------ after

    def on_test_epoch_end(self) -> None:
        """One row for every method and site, in each direction and on each kind of rows."""
        self._stream.reader.check.flush()
        self.rows = [row for panel in cast(Any, self.panels) for row in panel.rows()]


def _check_stored(stored: Sequence[StoredAlignment], present: dict[str, Any], sites: list[tuple[int, int]]) -> None:
    for checkpoint in stored:
        differences = different_models(checkpoint.data["models"], present["models"])
        if differences:
            raise ValueError(f"{checkpoint.path} was fitted on other models: " + "; ".join(differences) + ".")
        component = checkpoint.data.get("component", "residual")  # earlier checkpoints know no other
        if component != present["component"]:
            raise ValueError(
                f"{checkpoint.path} was fitted on `component` {component!r}, but `data.component` is "
                f"{present['component']!r}. Leave `data.component` out, or fit on that component."
            )
        if checkpoint.site_pairs != list(sites):
            raise ValueError(
                f"{checkpoint.path} was fitted at site pairs {checkpoint.site_pairs}, but `data.sites` gives "
                f"{list(sites)}. Leave `data.sites` out, or evaluate checkpoints of different sites one by one."
            )
