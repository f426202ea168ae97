"""How well models do when they are stitched together, on held-out text: every route, method and site pair."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from aligners.injection.forward import ReadStates, bank_logits, mapped_rows, own_logits, read_all
from aligners.injection.methods import CLOSED, TRAINED
from aligners.injection.routes import Route, Routes, build_routes, check_routes
from aligners.maps.base import Aligner
from aligners.maps.linear import Identity
from aligners.scoring.answers import match_heads
from aligners.scoring.scores import TextScores, bootstrap_interval
from aligners.scoring.task_scores import ScoredTask, score_interval, task_score
from aligners.scoring.tasks import per_text, unit_answers, unit_scores
from aligners.stitching.storage import StoredStitching, fitted_maps, refuse_other_component, refuse_other_models
from datamodules.asking import TaskBatch
from datamodules.protocol import TaskData, stream_of
from frozen.loading.precision import check_precision

__all__ = ["StitchingEvaluation"]

BEHAVIOUR = ["loss", "correct", "agree", "answer"]
DISTANCE = ["squares", "total"]
TASK_LOSS = "task loss"
BITS = math.log(2)


class Stitch(NamedTuple):
    """A way to stitch along one route: `layer` maps rows (S, N, d_x) to (S, N, d_y)."""

    name: str
    role: str
    layer: Aligner
    fit: str


class StitchingEvaluation(pl.LightningModule):
    """Stitches models on held-out text and sets each loss beside the target's own.

    Everything is kept text by text and added over ranks, so the figures are the same for any number of them. Before
    anything is measured, every target must pass the self-test: injecting what was read changes nothing, bit for bit.

    Args:
        stored: a checkpoint of `train.py stitch`; None: identity stitching alone (Brown et al. §4), for which no
            training is needed.
        fitted: file aligners.ckpt of `train.py fit` on the first two models at the same sites: its maps as they are.
        routes: which routes, of a checkpoint those that it has; default: all.
        identity: whether identity stitching is measured too, where widths are equal.
        allow_mixed: let a model that sees the next token feed one that has to predict it.
        seed: of the resampling of texts.
    """

    def __init__(
        self,
        stored: StoredStitching | None = None,
        fitted: Path | None = None,
        routes: Routes | None = None,
        identity: bool = True,
        allow_mixed: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.stored, self.fitted, self.wanted_routes = stored, fitted, routes
        self.identity, self.allow_mixed, self.seed = identity, allow_mixed, seed
        self.curves = stored.curves if stored is not None else []
        self.owned = nn.ModuleList()
        self.rows: list[dict[str, Any]] = []
        self.meta: dict[str, Any] = {}

    # ------------------------------------------------------------------ before

    @property
    def _stream(self) -> TaskData:
        """The data module of the run."""
        return stream_of(self.trainer, TaskData)

    def setup(self, stage: str) -> None:
        """Every check, and the methods of each route."""
        self.owned, self.rows = nn.ModuleList(), []
        check_precision(self.trainer, ("32-true", "bf16-mixed"))
        data = self._stream
        described = data.describe()
        if self.stored is not None:
            refuse_other_models(self.stored.data["models"], described["models"], str(self.stored.path))
            refuse_other_component(self.stored.data, data.component, str(self.stored.path))
        self.routes = self._routes()
        texts = data.split("test")
        check_routes(self.routes, texts.labels, data.text.source, allow_mixed=self.allow_mixed, gradients=False)
        further = fitted_maps(self.fitted, self.routes, data.frozen)
        self.methods = {route: self._methods(route, further.get(route.key, {})) for route in self.routes}
        for route, methods in self.methods.items():
            if not methods:
                why = (
                    "`identity` is false"
                    if not self.identity
                    else f"widths {route.source.width} and {route.target.width} differ, so the identity does not apply"
                )
                raise ValueError(
                    f"Nothing to measure from {route.name}: {why}, and neither a checkpoint nor `fitted` has a layer. "
                    "Train some with `train.py stitch`."
                )
            self.owned.extend(method.layer for method in methods)
        self.n_texts = len(texts)
        self.targets = list(dict.fromkeys(route.target for route in self.routes))
        task = str(self.targets[0].task)
        heads = match_heads(data, self.targets) if task == "classification" else {}
        self.task = ScoredTask.of(data, regression=False, seed=self.seed) if heads else None
        self.scores = nn.ModuleList(
            TextScores(BEHAVIOUR + DISTANCE, len(self.methods[route]), len(route.pairs), self.n_texts)
            for route in self.routes
        )
        self.natives = nn.ModuleList(TextScores([*BEHAVIOUR, "units"], 1, 1, self.n_texts) for _ in self.targets)
        self.meta = {
            "task": task,
            "unit": "text" if task == "classification" else "token",
            **described,
            "routes": [
                {"model_x": r.source.name, "model_y": r.target.name, "pairs": [list(pair) for pair in r.pairs]}
                for r in self.routes
            ],
            "loss": self.stored.loss if self.stored is not None else None,
            "labels": {model.name: words for model, words in heads.items()},
            "score": "accuracy" if self.task is None else self.task.score,
            "constant_score": None if self.task is None else self.task.constant_score(),
            "bytes_per_token": data.bytes_per_token("test") if task == "causal" else None,
            "seed": self.seed,
            "split": "test",
        }

    def _routes(self) -> list[Route]:
        data = self._stream
        routes = build_routes(data.frozen, data.sites, self.wanted_routes or "all", data.component)
        if self.stored is None:
            return routes
        routes = [route for route in routes if route.key in self.stored.layers]
        for route in routes:
            if list(route.pairs) != self.stored.pairs[route.key]:
                raise ValueError(
                    f"{self.stored.path} was trained at site pairs {self.stored.pairs[route.key]} from {route.name}, "
                    f"but `data.sites` gives {list(route.pairs)}. Leave `data.sites` out."
                )
        return routes

    def _methods(self, route: Route, fitted: dict[str, Aligner]) -> list[Stitch]:
        methods = []
        if self.identity and route.source.width == route.target.width:
            layer = Identity(len(route.pairs), route.source.width, route.target.width)
            methods.append(Stitch("identity", "floor", layer, "none"))
        for name, aligner in fitted.items():
            methods.append(Stitch(name, "method", aligner, CLOSED if aligner.closed_form else TRAINED))
        if self.stored is not None:
            layers = self.stored.layers[route.key]
            methods += [Stitch(name, "method", layer, TASK_LOSS) for name, layer in layers.items()]
        return methods

    def on_test_start(self) -> None:
        """The self-test, on a few of the held-out texts."""
        few = self._stream.split("test")[list(range(min(8, self.n_texts)))]
        inputs = self._stream.prepare(few).to(self.device).inputs
        for target in self.targets:
            target.self_test(inputs, self._stream.component)

    # ------------------------------------------------------------------ the one pass

    def test_step(self, batch: TaskBatch, batch_idx: int) -> None:
        """Score every method at every site pair of every route, and the targets by themselves, on one batch."""
        text, asked = batch.texts.text, batch.targets
        answers = {}
        for target, scores in zip(self.targets, cast(Any, self.natives), strict=True):
            logits = own_logits(target, batch)
            answers[target] = logits.argmax(-1)
            units = per_text(torch.ones_like(asked.owner, dtype=torch.float32), asked)
            found = self._per_text(logits, batch, answers[target])
            scores.update(text, {name: value[None, None] for name, value in {**found, "units": units}.items()})
        measured = self.stored is not None and bool(self.stored.spread)
        states = read_all(self.routes, batch, targets=measured)
        for route, scores in zip(self.routes, cast(Any, self.scores), strict=True):
            collected: dict[str, list[Tensor]] = {name: [] for name in BEHAVIOUR + DISTANCE}
            for method in self.methods[route]:
                mapped = mapped_rows(method.layer, states.sources(route))
                found = self._behaviour(route, batch, mapped, answers[route.target])
                found.update(self._distances(route, batch, mapped, states if measured else None))
                for name, values in found.items():
                    collected[name].append(values)
            scores.update(text, {name: torch.stack(values) for name, values in collected.items()})

    def _behaviour(self, route: Route, batch: TaskBatch, mapped: Tensor, own: Tensor) -> dict[str, Tensor]:
        """What the target does with the mapped states at each site: quantity -> (S, B) sums over units."""
        found: dict[str, list[Tensor]] = {name: [] for name in BEHAVIOUR}
        for logits in bank_logits(route, batch, mapped):
            for name, values in self._per_text(logits, batch, own).items():
                found[name].append(values)
        return {name: torch.stack(values) for name, values in found.items()}

    def _per_text(self, logits: Tensor, batch: TaskBatch, own: Tensor) -> dict[str, Tensor]:
        """Sums over units, (B,); the answer to a text, NaN where many tokens are answered."""
        found = {name: per_text(each, batch.targets) for name, each in unit_scores(logits, batch.targets, own).items()}
        if self.meta["unit"] == "text":
            return {**found, "answer": unit_answers(logits, regression=False)}
        return {**found, "answer": torch.full_like(found["loss"], torch.nan)}

    def _distances(
        self, route: Route, batch: TaskBatch, mapped: Tensor, states: ReadStates | None
    ) -> dict[str, Tensor]:
        """How far the mapped rows are from the target's own: quantity -> (S, B); NaN where those were never read."""
        if states is None or self.stored is None:
            missing = mapped.new_full((len(mapped), batch.rows.texts), torch.nan)
            return {"squares": missing, "total": missing}
        own = states.targets(route)
        mean = self.stored.spread[route.key]["mean"][:, None].to(own.device)

        def sums(values: Tensor) -> Tensor:
            squares = values.double().square().sum(-1)
            return squares.new_zeros(len(squares), batch.rows.texts).index_add_(1, batch.rows.owner, squares)

        return {"squares": sums(mapped - own), "total": sums(own - mean)}

    # ------------------------------------------------------------------ after

    def on_test_epoch_end(self) -> None:
        """One row for every route, method and site pair, and one for each route's target by itself."""
        tables = {
            target: scores.compute() for target, scores in zip(self.targets, cast(Any, self.natives), strict=True)
        }
        for route, scores in zip(self.routes, cast(Any, self.scores), strict=True):
            native = tables[route.target]
            units = native["units"][0, 0]
            base = {"model_x": route.source.name, "model_y": route.target.name, "same_model": route.same}
            tail = {"n_texts": self.n_texts, "n_units": int(units.sum()), "score_name": self.meta["score"]}
            empty = {"site_x": None, "site_y": None, "parameters": None}
            figures = self._figures({**native, "squares": native["loss"] * torch.nan, "total": native["loss"]}, native)
            head = {**base, "method": "native", "role": "ceiling", **empty, "fit": "none", **tail}
            self.rows.append({**head, **_take(figures, 0, 0), "overflow": False, "seed": self.seed})
            table = scores.compute()
            figures = self._figures(table, native)
            for place, method in enumerate(self.methods[route]):
                for s, (i, j) in enumerate(route.pairs):
                    parameters = sum(p.numel() for p in method.layer.parameters()) // len(route.pairs) or None
                    where = {"site_x": i, "site_y": j, "parameters": parameters, "fit": method.fit}
                    head = {**base, "method": method.name, "role": method.role, **where, **tail}
                    overflow = not bool(table["loss"][place, s].isfinite().all())
                    self.rows.append({**head, **_take(figures, place, s), "overflow": overflow, "seed": self.seed})

    def _figures(self, table: dict[str, Tensor], native: dict[str, Tensor]) -> dict[str, Tensor]:
        """Columns (methods, sites) from per-text sums (methods, sites, texts)."""
        units = native["units"]
        total = units.sum()
        gap = table["loss"] - native["loss"]
        low, high = self._interval(gap, units)
        least, most = self._interval(table["correct"], units)
        loss = table["loss"].sum(-1) / total
        accuracy = table["correct"].sum(-1) / total
        language = self.meta["unit"] == "token"
        per_byte = self.meta["bytes_per_token"]
        missing = torch.full_like(loss, torch.nan)
        own, score, *ends = native["correct"].sum(-1) / total, accuracy, least, most
        if self.task is not None and self.task.score != "accuracy":
            own, score = (task_score(self.task.score, each["answer"], self.task.labels) for each in (native, table))
            ends = list(score_interval(self.task.score, table["answer"], self.task.labels, seed=self.seed))
        return {
            "loss": loss,
            "penalty": gap.sum(-1) / total,
            "penalty_low": low,
            "penalty_high": high,
            "accuracy": accuracy,
            "accuracy_low": least,
            "accuracy_high": most,
            "accuracy_penalty": native["correct"].sum(-1) / total - accuracy,
            **dict(zip(("score", "score_low", "score_high"), (score, *ends), strict=True)),
            "score_penalty": own - score,
            "perplexity": loss.exp() if language else missing,
            "bits_per_byte": loss / BITS / per_byte if per_byte else missing,
            "agreement": table["agree"].sum(-1) / total,
            "fvu": table["squares"].sum(-1) / table["total"].sum(-1),
        }

    def _interval(self, values: Tensor, units: Tensor) -> tuple[Tensor, Tensor]:
        return bootstrap_interval(values, units.expand_as(values), seed=self.seed)


def _take(figures: dict[str, Tensor], method: int, site: int) -> dict[str, float | None]:
    """One row's figures; null where a figure does not apply or, as `overflow` then says, is not finite."""
    values = {name: float(column[method, site]) for name, column in figures.items()}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
