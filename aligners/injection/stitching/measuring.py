"""How well models do when stitched together, on held-out text: every route, method and site pair."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from aligners.datamodules.model_texts import ModelTexts
from aligners.datamodules.task_targets import TaskBatch
from aligners.errors import UserError
from aligners.fitting.bank_training import BankTraining, stored_of
from aligners.fitting.saved_bank import StoredBank, load_bank, refuse_other_bank
from aligners.fitting.training_status import outcomes
from aligners.injection.behaviour import Behaviour, read_all
from aligners.injection.injecting import Evaluation
from aligners.injection.methods import TASK_LOSS, Method, describe_map, fitted_maps
from aligners.injection.panels import Panel, PanelBatch
from aligners.injection.routes import (
    Route,
    Routes,
    build_routes,
    check_routes,
    targets_of,
)
from aligners.injection.scoring.scores import ScoredTask
from aligners.injection.scoring.task_scores import match_heads
from aligners.maps.base import Aligner
from aligners.maps.linear import Identity
from aligners.models.loading.load_models import check_precision
from aligners.models.model import FrozenModel


class StitchingEvaluation(Evaluation):
    """Stitches models on held-out text, and compares each loss with the target's own.

    Args:
        stored: what is measured: a trained `Stitching`, or a checkpoint of `train.py stitch`; None: only identity
            stitching (Brown et al. §4), which needs no training.
        fitted: file of `train.py fit` on the first two models at the same sites, whose maps are measured unchanged.
        routes: routes to measure, of a checkpoint those that it has; default: all.
        identity: whether to measure identity stitching too, where widths are equal.
        allow_mixed: allow routes from a model that sees the next token to one that must predict it.
        seed: seed of the resampling of texts.
    """

    kind = ModelTexts

    def __init__(
        self,
        stored: StoredBank | BankTraining | None = None,
        fitted: Path | None = None,
        routes: Routes | None = None,
        identity: bool = True,
        allow_mixed: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(seed)
        self.layers = None if stored is None else stored_of(stored)
        self.maps = None if fitted is None else load_bank(fitted)
        self.stored = list(filter(None, (self.maps, self.layers)))
        self.wanted_routes = routes
        self.identity = identity
        self.allow_mixed = allow_mixed
        self.report_tables: dict[str, Any] = {"curves": []}
        if self.layers is not None:
            self.report_tables["curves"] = self.layers.curves

    # ------------------------------------------------------------------ before

    def prepare_panels(self) -> None:
        """Check the options, and make a panel of the methods of each route."""
        check_precision(self.trainer, ("32-true", "bf16-mixed"))
        data, layers = self.stream, self.layers
        described = data.describe()
        self._choose_routes(described)
        targets = self.injected_into()
        heads = {}
        if targets[0].task == "classification":
            heads = match_heads(data, targets)
        asked = ScoredTask.of(data, targets[0], seed=self.seed)
        self.asked = asked
        self._add_panels(asked)
        self.meta = {
            **described,
            **self.about_answers(heads),
            "routes": [_described_route(route) for route in self.routes],
            "loss": None,
            "constant_score": asked.constant_score(),
            "bytes_per_token": asked.bytes_per_token,
        }
        if layers is not None:
            self.meta["loss"] = layers.loss

    def _choose_routes(self, described: dict[str, Any]) -> None:
        """Choose the routes to measure: those of the checkpoint, if there is one."""
        data, layers = self.stream, self.layers
        wanted = self.wanted_routes or "all"
        routes = build_routes(data.frozen, data.sites, wanted, data.component)
        if layers is not None:
            routes = [route for route in routes if route.key in layers.maps]
            pairs = {route.key: route.pairs for route in routes}
            refuse_other_bank(layers, described["models"], data.component, pairs)
        check_routes(
            routes,
            data.split("test").labels,
            data.text.source,
            allow_mixed=self.allow_mixed,
            gradients=False,
        )
        self.routes = routes

    def _add_panels(self, asked: ScoredTask) -> None:
        """Make a panel of the methods of each route."""
        maps: dict[str, dict[str, Aligner]] = {}
        if self.maps is not None:
            maps = fitted_maps(self.maps, self.routes, self.stream.frozen)
        # errors are relative to the mean of the target's states, so they are measured where it is known
        self.spread: dict[str, dict[str, Tensor]] = {}
        if self.layers is not None:
            self.spread = self.layers.spread
        for route in self.routes:
            self.panels.append(self._panel(route, asked, maps.get(route.key, {})))

    def _panel(
        self, route: Route, asked: ScoredTask, fitted: dict[str, Aligner]
    ) -> Panel:
        """Make the panel of a route: the methods of `_methods`."""
        mean = None
        if self.spread:
            mean = self.spread[route.key]["mean"]
        return Panel(
            route,
            self._methods(route, fitted),
            self.n_texts,
            self.seed,
            means=(None, mean),
            behaviour=Behaviour(route, asked, ("native",), self.seed),
        )

    def _methods(self, route: Route, fitted: dict[str, Aligner]) -> list[Method]:
        """Return the identity, the maps of `fitted` and the trained layers.

        Raises:
            ValueError: there are no methods.
        """
        widths = route.source.width, route.target.width
        methods = []
        if self.identity and widths[0] == widths[1]:
            same = Identity(*route.sizes)
            about = {**describe_map(same), "fit": "none"}
            methods.append(Method.of("identity", "floor", same, about))
        for name, layer in fitted.items():
            methods.append(Method.of(name, "method", layer, describe_map(layer)))
        methods += self._trained(route)
        if not methods:
            why = "`identity` is false"
            if self.identity:
                why = f"widths {widths[0]} and {widths[1]} differ, so the identity does not apply"
            raise UserError(
                f"Nothing to measure from {route.name}: {why}, and "
                "neither a checkpoint nor `fitted` has a layer. Train some with `train.py stitch`."
            )
        return methods

    def _trained(self, route: Route) -> Iterator[Method]:
        """Return the layers of the checkpoint."""
        if self.layers is None:
            return
        for name, layer in self.layers.maps[route.key].items():
            record = self.layers.training.get(f"{route.key}.{name}")
            about = describe_map(layer)
            about["fit"] = TASK_LOSS
            about["training"] = outcomes(record, layer.sites)
            yield Method.of(name, "method", layer, about)

    def injected_into(self) -> list[FrozenModel]:
        """The targets of all routes."""
        return targets_of(self.routes)

    # ------------------------------------------------------------------ the one pass

    def test_step(self, batch: TaskBatch, batch_idx: int) -> None:
        """Score on one batch every method at every site pair of every route, and the targets with nothing replaced."""
        natives = self.natives(self.injected_into(), batch)
        states = read_all(self.routes, batch, targets=bool(self.spread))
        for panel in self.panels:
            source, target = states.sources(panel.route), None
            if self.spread:
                target = states.targets(panel.route)
            read = PanelBatch(batch, source, target, batch)
            panel.update(read, natives, self.each)


def _described_route(route: Route) -> dict[str, Any]:
    """Return a route as plain values."""
    return {
        "model_x": route.source.name,
        "model_y": route.target.name,
        "pairs": [list(pair) for pair in route.pairs],
    }
