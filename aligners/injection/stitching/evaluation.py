"""How well models do when they are stitched together, on held-out text: every route, method and site pair."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from aligners.fitting.outcomes import outcomes
from aligners.fitting.storage.bank import StoredBank, load_bank
from aligners.fitting.storage.refusals import refuse_other_component, refuse_other_models
from aligners.injection.behaviour import Behaviour
from aligners.injection.evaluation import Evaluation
from aligners.injection.forward import read_all
from aligners.injection.methods import Method, describe_map, make_method
from aligners.injection.panels import Panel, Read
from aligners.injection.routes import Route, Routes, build_routes, check_routes
from aligners.injection.scoring.answers import match_heads, matched_by_number
from aligners.injection.scoring.asked import Asked
from aligners.injection.stitched import TASK_LOSS
from aligners.injection.stitching.fitted import fitted_maps
from aligners.maps.base import Aligner
from aligners.maps.linear import Identity
from aligners.models.loading.precision import check_precision
from aligners.models.model import FrozenModel
from datamodules.asking import TaskBatch
from datamodules.model_texts import ModelTexts
from datamodules.module import stream_of

__all__ = ["StitchingEvaluation"]


class StitchingEvaluation(Evaluation):
    """Stitches models on held-out text and sets each loss beside the target's own.

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
        stored: StoredBank | None = None,
        fitted: Path | None = None,
        routes: Routes | None = None,
        identity: bool = True,
        allow_mixed: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        self.stored, self.fitted, self.wanted_routes = stored, fitted, routes
        self.identity, self.allow_mixed = identity, allow_mixed
        self.curves = stored.curves if stored is not None else []

    @property
    def report_tables(self) -> dict[str, list[dict[str, Any]]]:
        """Further tables of the report."""
        return {"curves": self.curves}

    # ------------------------------------------------------------------ before

    @property
    def stream(self) -> ModelTexts:
        """The data module of the run."""
        return stream_of(self.trainer, ModelTexts)

    def measured(self) -> Sequence[StoredBank]:
        """The checkpoints whose maps are measured."""
        maps = [] if self.fitted is None else [load_bank(self.fitted)]
        return [*maps, *([] if self.stored is None else [self.stored])]

    def prepare_panels(self) -> None:
        """Check everything, and collect the methods of each route."""
        check_precision(self.trainer, ("32-true", "bf16-mixed"))
        data = self.stream
        described = data.describe()
        if self.stored is not None:
            refuse_other_models(self.stored.data["models"], described["models"], str(self.stored.path))
            refuse_other_component(self.stored.data, data.component, str(self.stored.path))
        self.routes = self._routes()
        labels, source = data.split("test").labels, data.text.source
        check_routes(self.routes, labels, source, allow_mixed=self.allow_mixed, gradients=False)
        further = fitted_maps(self.fitted, self.routes, data.frozen)
        methods = {route: self._methods(route, further.get(route.key, {})) for route in self.routes}
        asked = self.injected_into()
        heads = match_heads(data, asked) if asked[0].task == "classification" else {}
        self.asked = Asked.of(data, asked[0], seed=self.seed)
        self.panels.extend(self._panel(route, methods[route]) for route in self.routes)
        self.meta = {
            "task": self.asked.task,
            "unit": self.asked.unit,
            **described,
            "routes": [
                {"model_x": r.source.name, "model_y": r.target.name, "pairs": [list(pair) for pair in r.pairs]}
                for r in self.routes
            ],
            "loss": self.stored.loss if self.stored is not None else None,
            "labels": {model.name: words for model, words in heads.items()},
            "cautions": matched_by_number(data, list(heads)),
            "score": self.asked.score,
            "constant_score": None if self.asked.scored is None else self.asked.scored.constant_score(),
            "bytes_per_token": self.asked.bytes_per_token,
            "seed": self.seed,
            "split": "test",
        }

    def _routes(self) -> list[Route]:
        data = self.stream
        routes = build_routes(data.frozen, data.sites, self.wanted_routes or "all", data.component)
        if self.stored is None:
            return routes
        routes = [route for route in routes if route.key in self.stored.maps]
        for route in routes:
            if list(route.pairs) != self.stored.pairs[route.key]:
                raise ValueError(
                    f"{self.stored.path} was trained at site pairs {self.stored.pairs[route.key]} from {route.name}, "
                    f"but `data.sites` gives {list(route.pairs)}. Leave `data.sites` out."
                )
        return routes

    def _methods(self, route: Route, fitted: dict[str, Aligner]) -> list[Method]:
        methods = []
        if self.identity and route.source.width == route.target.width:
            same = Identity(len(route.pairs), route.source.width, route.target.width)
            methods.append(make_method("identity", same, "floor", {**describe_map(same), "fit": "none"}))
        methods += [make_method(name, layer, "method", describe_map(layer)) for name, layer in fitted.items()]
        if self.stored is not None:
            for name, layer in self.stored.maps[route.key].items():
                outcome = outcomes(self.stored.training.get(f"{route.key}.{name}"), layer.sites)
                about = {**describe_map(layer), "fit": TASK_LOSS, "training": outcome}
                methods.append(make_method(name, layer, "method", about))
        if not methods:
            widths = f"widths {route.source.width} and {route.target.width} differ, so the identity does not apply"
            raise ValueError(
                f"Nothing to measure from {route.name}: {widths if self.identity else '`identity` is false'}, and "
                "neither a checkpoint nor `fitted` has a layer. Train some with `train.py stitch`."
            )
        return methods

    def _panel(self, route: Route, methods: list[Method]) -> Panel:
        means = (None, self.stored.spread[route.key]["mean"]) if self._measures and self.stored is not None else None
        behaviour = Behaviour(route, cast(Asked, self.asked), ("native",), self.seed)
        return Panel(route, methods, self.n_texts, self.seed, means=means, behaviour=behaviour)

    @property
    def _measures(self) -> bool:
        """Whether the mean of the target's states is known, relative to which errors are measured."""
        return self.stored is not None and bool(self.stored.spread)

    def injected_into(self) -> list[FrozenModel]:
        """The targets of all routes."""
        return list(dict.fromkeys(route.target for route in self.routes))

    def few_inputs(self) -> dict[str, Tensor]:
        """A few of the held-out texts, masked where that is the task."""
        few = self.stream.split("test")[list(range(min(8, self.n_texts)))]
        return self.stream.prepare(few).to(self.device).inputs

    # ------------------------------------------------------------------ the one pass

    def test_step(self, batch: TaskBatch, batch_idx: int) -> None:
        """Score every method at every site pair of every route, and the targets by themselves, on one batch."""
        natives = self.natives(self.injected_into(), batch)
        states = read_all(self.routes, batch, targets=self._measures)
        for panel in cast(Sequence[Panel], self.panels):
            own: Any = states.targets(panel.route) if self._measures else None
            panel.update(Read(batch, states.sources(panel.route), own, batch), natives)
