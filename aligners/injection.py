"""The functional test: put g(X's state) into the frozen Y, run its tail, see whether it still does its task."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from aligners.answers import in_data_order, match_heads, one_after_another
from aligners.baselines import random_labels
from aligners.methods import CLOSED_FORMS, WHOLE, Method, Route, build_route
from aligners.scores import TextScores, bootstrap_interval
from aligners.storage import StoredAlignment, different_models
from aligners.tasks import check_labels, unit_scores
from datamodules.targets import classification_targets
from frozen.model import FrozenModel
from frozen.precision import check_precision

__all__ = ["DISTANCE_COLUMNS", "InjectionEvaluation"]

BEHAVIOUR = ["correct", "loss", "agree"]
DISTANCE = ["squares", "total", "cosine", "norm", "back", "back_total", "gap", "largest"]


class InjectionEvaluation(pl.LightningModule):
    """Injects at every site with every method, on held-out labelled text.

    X's head runs once a batch, for all sites and methods. Everything is kept text by text and added over
    ranks, so the figures are the same for any number of them. Before anything is measured, both models must
    pass the self-test: injecting what was read changes nothing, bit for bit.

    Args:
        stored: checkpoints, all of the same models and site pairs.
        closed_form: names of closed forms to fit on the first checkpoint's moments, where it does not hold them.
        both_directions: also inject Y's states into X: with the inverse of a bijective aligner, and with an
            aligner fitted from Y to X for any other.
        seed: of the random floors and of the resampling of texts.
    """

    def __init__(
        self,
        stored: Sequence[StoredAlignment],
        closed_form: Sequence[str] = tuple(CLOSED_FORMS),
        both_directions: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        unknown = [name for name in closed_form if name not in CLOSED_FORMS]
        if unknown:
            raise ValueError(f"Expected `closed_form` out of {', '.join(CLOSED_FORMS)}, but got {', '.join(unknown)}.")
        if not stored:
            raise ValueError("Expected at least one checkpoint in `stored`, but got none.")
        self.stored, self.closed_form = list(stored), list(closed_form)
        self.both_directions, self.seed = both_directions, seed
        self.owned = nn.ModuleList()
        self.rows: list[dict[str, Any]] = []
        self.meta: dict[str, Any] = {}

    # ------------------------------------------------------------------ before

    @property
    def _stream(self) -> Any:
        """The data module of the run."""
        return self.trainer.datamodule  # type: ignore[attr-defined]

    def setup(self, stage: str) -> None:
        """Every check, and the methods of each direction."""
        self.owned, self.rows = nn.ModuleList(), []
        check_precision(self.trainer)
        data = self._stream
        reader = data.reader
        self.sites = reader.sites
        described = data.describe()
        _check_stored(self.stored, described, self.sites)
        if reader.policy != "tokens" or not reader.special_tokens:
            raise ValueError(
                "Injection replaces every token's state, special ones too: expected `data.rows` 'tokens' and "
                f"`data.special_tokens` true, but got {reader.policy!r} and {reader.special_tokens}. On which rows the "
                "maps were fitted is another matter, and free."
            )
        texts = data.split("test")
        make = partial(build_route, stored=self.stored, closed_form=self.closed_form, seed=self.seed)
        self.routes = [make("forward", reader.model_x, reader.model_y)]
        if self.both_directions:
            self.routes.append(make("backward", reader.model_y, reader.model_x))
        self.owned.extend(method.aligner for route in self.routes for method in route.methods if method.aligner)
        for route in self.routes:
            check_labels(route.target, texts.labels, data.text.source)
        self.heads = match_heads(data, [route.target for route in self.routes], [reader.model_x])
        self.n_texts = len(texts)
        self.chance = random_labels(self.n_texts, data.texts.classes, self.seed)
        self.scores = nn.ModuleList(
            TextScores(BEHAVIOUR + DISTANCE, len(route.methods), len(self.sites), self.n_texts) for route in self.routes
        )
        self.whole = nn.ModuleList(TextScores(BEHAVIOUR, len(WHOLE), 1, self.n_texts) for _ in self.routes)
        self.lengths = TextScores(["rows"], 1, 1, self.n_texts)
        self.meta = {
            **described,
            "methods": {f"{r.direction}.{m.name}": m.about for r in self.routes for m in r.methods},
            "labels": {model.name: words for model, words in self.heads.items()},
            "seed": self.seed,
            "split": "test",
        }

    def _scored(self) -> Iterator[tuple[Route, TextScores, TextScores]]:
        """Each route with its two tables: by site, and of what needs no site."""
        yield from zip(self.routes, cast(Any, self.scores), cast(Any, self.whole), strict=True)

    def on_test_start(self) -> None:
        """The self-test, on a few of the held-out texts."""
        few = self._stream.split("test")[list(range(min(8, self.n_texts)))].to(self.device)
        for route in self.routes:
            route.target.self_test(few.inputs_x, self._stream.component)

    # ------------------------------------------------------------------ the one pass

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Score every method at every site, and what needs no site, on one batch."""
        inputs, labels, text = batch.texts.inputs_x, batch.texts.labels, batch.texts.text
        counts = torch.zeros(len(text), device=self.device).index_add_(
            0, batch.rows.owner, torch.ones(len(batch.rows), device=self.device)
        )
        self.lengths.update(text, {"rows": counts[None, None]})
        natives: dict[FrozenModel, Tensor] = {}  # each model answers once, whether as X, as Y, or as both
        for route, scores, whole in self._scored():
            for model in (route.source, route.target):
                if model not in natives and model in self.heads:
                    natives[model] = in_data_order(model.logits(inputs), model.class_map)
            native = natives[route.target]
            whole.update(text, self._whole(route, batch, natives))
            source, target = route.orient(batch.x, batch.y)
            collected: dict[str, list[Tensor]] = {name: [] for name in BEHAVIOUR + DISTANCE}
            for method in route.methods:
                mapped = method.map(source, batch)
                found = self._distances(method, route, batch, source, target, mapped)
                found.update(self._injected(route, batch, mapped, labels, native.argmax(-1)))
                for name, values in found.items():
                    collected[name].append(values)
            scores.update(text, {name: torch.stack(values) for name, values in collected.items()})

    def _injected(self, route: Route, batch: Any, mapped: Tensor, labels: Tensor, native: Tensor) -> dict[str, Tensor]:
        """What Y does with the mapped states at each site: quantity -> (S, B)."""
        inputs = batch.texts.inputs_x
        blank = mapped.new_zeros(*inputs["input_ids"].shape, route.target.width)
        logits = [
            route.target.tail(inputs, route.orient(*pair)[1], batch.rows.scatter(rows, blank), self._stream.component)
            for pair, rows in zip(self.sites, mapped, strict=True)
        ]
        ordered = in_data_order(torch.stack(logits), route.target.class_map)
        return unit_scores(ordered, classification_targets(labels), native)

    def _whole(self, route: Route, batch: Any, natives: dict[FrozenModel, Tensor]) -> dict[str, Tensor]:
        """The rows of `WHOLE`: quantity -> (methods, 1, B)."""
        inputs, labels, text = batch.texts.inputs_x, batch.texts.labels, batch.texts.text
        native = natives[route.target]
        answer = native.argmax(-1)
        missing = torch.full_like(native, torch.nan)
        # The source answers its own way; without a head, or one of this task, there is nothing to say.
        of_source = natives.get(route.source, missing)
        with route.target.fresh_head(self.seed):
            fresh = in_data_order(route.target.logits(inputs), one_after_another(route.target.class_map))
        drawn = self.chance.to(self.device)[text]
        each = torch.stack([of_source, native, fresh, missing])
        found = unit_scores(each, classification_targets(labels), answer)
        found["correct"][3] = (drawn == labels).float()
        found["agree"][3] = (drawn == answer).float()
        return {name: values[:, None] for name, values in found.items()}

    def _distances(
        self, method: Method, route: Route, batch: Any, source: Tensor, target: Tensor, mapped: Tensor
    ) -> dict[str, Tensor]:
        """How far the mapped rows are from Y's own, and the inverse's from X's: quantity -> (S, B)."""
        mean_source, mean_target = self._means(route)

        def per_text(values: Tensor) -> Tensor:
            sums = values.new_zeros(len(values), batch.rows.texts)
            return sums.index_add_(1, batch.rows.owner, values)

        squares = (mapped - target).double().square().sum(-1)
        found = {
            "squares": per_text(squares),
            "norm": per_text(squares.sqrt()),
            "total": per_text((target.double() - mean_target).square().sum(-1)),
            "cosine": per_text(torch.nn.functional.cosine_similarity(mapped.double(), target.double(), dim=-1)),
        }
        for name in ("back", "back_total", "gap", "largest"):
            found[name] = torch.full_like(found["squares"], torch.nan)
        if method.inverse is not None:
            found["back"] = per_text((method.inverse(target) - source).double().square().sum(-1))
            found["back_total"] = per_text((source.double() - mean_source).square().sum(-1))
            gap = (method.inverse(mapped) - source).abs().amax(-1)
            owner = batch.rows.owner.expand_as(gap)
            blank = torch.zeros_like(found["squares"], dtype=gap.dtype)
            found["gap"] = blank.scatter_reduce(1, owner, gap, "amax")
            found["largest"] = blank.scatter_reduce(1, owner, source.abs().amax(-1), "amax")
        return found

    def _means(self, route: Route) -> tuple[Tensor, Tensor]:
        moments = self.stored[0].moments
        means = route.orient(moments.mean_x, moments.mean_y)
        return means[0][:, None].to(self.device), means[1][:, None].to(self.device)

    # ------------------------------------------------------------------ after

    def on_test_epoch_end(self) -> None:
        """One row for every method and site, in each direction."""
        self._stream.reader.check.flush()
        lengths = self.lengths.compute()["rows"].flatten()
        for route, scores, whole in self._scored():
            base = {
                "model_x": route.source.name,
                "model_y": route.target.name,
                "direction": route.direction,
                "n_texts": self.n_texts,
                "n_rows": int(lengths.sum()),
                "seed": self.seed,
            }
            behaviour = self._behaviour_columns(whole.compute())
            for place, name in enumerate(WHOLE):
                role = "ceiling" if name.startswith("native") else "floor"
                head = {
                    **base,
                    "method": name,
                    "role": role,
                    **dict.fromkeys(("site_x", "site_y", *METHOD_COLUMNS)),
                }
                self.rows.append(
                    {**head, **_take(behaviour, place, 0), **dict.fromkeys(DISTANCE_COLUMNS), "overflow": False}
                )
            table = scores.compute()
            columns = {**self._behaviour_columns(table), **self._distance_columns(table, lengths, route)}
            # What does not apply is NaN for every text: the map is only at fault where some other text has a number.
            overflows = ~table["squares"].isfinite().all(-1) | table["back"].isinf().any(-1)
            for place, method in enumerate(route.methods):
                for s, pair in enumerate(self.sites):
                    site_x, site_y = route.orient(*pair)
                    head = {
                        **base,
                        "method": method.name,
                        "role": method.role,
                        "site_x": site_x,
                        "site_y": site_y,
                    }
                    head.update({name: method.about.get(name) for name in METHOD_COLUMNS})
                    overflow = bool(overflows[place, s])
                    self.rows.append({**head, **_take(columns, place, s), "overflow": overflow})

    def _behaviour_columns(self, table: dict[str, Tensor]) -> dict[str, Tensor]:
        low, high = bootstrap_interval(table["correct"], seed=self.seed)
        return {
            "accuracy": table["correct"].mean(-1),
            "accuracy_low": low,
            "accuracy_high": high,
            "loss": table["loss"].mean(-1),
            "agreement": table["agree"].mean(-1),
        }

    def _distance_columns(self, table: dict[str, Tensor], lengths: Tensor, route: Route) -> dict[str, Tensor]:
        rows = lengths.sum()
        squares, total = table["squares"].sum(-1), table["total"].sum(-1)
        low, high = bootstrap_interval(table["squares"], table["total"], seed=self.seed)
        return {
            "mse": squares / (rows * route.target.width),
            "l2": table["norm"].sum(-1) / rows,
            "fvu": squares / total,
            "fvu_low": low,
            "fvu_high": high,
            "fvu_inverse": table["back"].sum(-1) / table["back_total"].sum(-1),
            "relative_error": (squares / total).sqrt(),
            "cosine": table["cosine"].sum(-1) / rows,
            "round_trip": table["gap"].amax(-1) / table["largest"].amax(-1),
        }


METHOD_COLUMNS = ("parameters", "fit", "bijective", "fitted_on")
DISTANCE_COLUMNS = (
    "mse", "l2", "fvu", "fvu_low", "fvu_high", "fvu_inverse", "relative_error", "cosine", "round_trip",
)  # fmt: skip


def _take(columns: dict[str, Tensor], method: int, site: int) -> dict[str, float | None]:
    """One row's figures; null where a figure does not apply or, as `overflow` then says, is not finite."""
    values = {name: float(column[method, site]) for name, column in columns.items()}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


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
