"""The stitched forward g_{>m} ∘ φ ∘ f_{≤l} of a whole bank: X's front is run once, Y's tail once for each site pair."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from aligners.injection.routes import Route
from aligners.injection.scoring.tasks import UnitAnswers, batch_answers, chosen
from aligners.models.architectures import Component
from aligners.models.model import FrozenModel, Inputs
from datamodules.asking import TaskBatch
from datamodules.rows.policies import Rows
from datamodules.rows.reading import read_rows


def mapped_rows(layer: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """φ of the rows (S, N, d_x), in full precision whatever the models around it run in: (S, N, d_y)."""
    with torch.autocast(rows.device.type, enabled=False):
        return layer(rows)


def stitched_logits(
    target: FrozenModel, inputs: Inputs, site: int, rows: Rows, mapped: Tensor, component: Component = "residual"
) -> Tensor:
    """What the target answers when its real tokens have these states at a site.

    Args:
        target: the frozen model; no block up to `site` is run.
        inputs: the batch, (B, T).
        site: m.
        rows: where the states belong.
        mapped: (N, d) states. Gradients flow to them. Padding gets zeros, which nothing sees.
        component: what the states are. Of a sub-layer nothing but its own output is left out of the run.
    """
    blank = mapped.new_zeros(*inputs["input_ids"].shape, target.width)
    return target.tail(inputs, site, rows.scatter(mapped, blank), component)


def pair_logits(route: Route, pair: int, batch: TaskBatch, mapped: Tensor) -> Tensor:
    """What the target answers with mapped rows (N, d_y) at the site pair of this number: (U, C)."""
    return chosen(_stitched(route, pair, batch, mapped), batch.targets, route.target.class_map)


def bank_answers(route: Route, batch: TaskBatch, mapped: Tensor) -> Iterator[UnitAnswers]:
    """Score what the target answers with the mapped rows (S, N, d_y) at each site in turn, one site's logits held."""
    groups = route.target.class_map
    for pair, rows in enumerate(mapped):
        yield batch_answers(_stitched(route, pair, batch, rows), batch.targets, groups)


def _stitched(route: Route, pair: int, batch: TaskBatch, mapped: Tensor) -> Tensor:
    return stitched_logits(route.target, batch.inputs, route.pairs[pair][1], batch.rows, mapped, route.component)


class ReadStates:
    """Rows of several models at the sites that some routes need.

    Args:
        rows: model -> (its sites, their rows (S, N, d) float32).
    """

    def __init__(self, rows: Mapping[FrozenModel, tuple[list[int], Tensor]]) -> None:
        self._rows = rows

    def sources(self, route: Route) -> Tensor:
        """(S, N, d_x) what the route reads."""
        return self._at(route.source, [i for i, _ in route.pairs])

    def targets(self, route: Route) -> Tensor:
        """(S, N, d_y) the target's own states where the route puts others."""
        return self._at(route.target, [j for _, j in route.pairs])

    def _at(self, model: FrozenModel, sites: list[int]) -> Tensor:
        held, rows = self._rows[model]
        # one by one: a list as index would have to be copied to the device, which waits for it
        return rows if sites == held else torch.stack([rows[held.index(site)] for site in sites])


def read_all(routes: Sequence[Route], batch: TaskBatch, *, targets: bool = False) -> ReadStates:
    """Run each model's front once, as far as any route needs it.

    Args:
        routes: of the run, all of one component.
        batch: on the run's device.
        targets: also read the targets' own states at the sites where others go in.
    """
    wanted: dict[FrozenModel, set[int]] = {}
    component = routes[0].component
    for route in routes:
        wanted.setdefault(route.source, set()).update(i for i, _ in route.pairs)
        if targets:
            wanted.setdefault(route.target, set()).update(j for _, j in route.pairs)
    sites, stored = {model: sorted(at) for model, at in wanted.items()}, batch.texts.stored
    rows = {m: read_rows(m, batch.inputs, at, batch.rows, component, stored.get(m)) for m, at in sites.items()}
    return ReadStates({model: (sites[model], read) for model, read in rows.items()})


@torch.no_grad()
def own_logits(target: FrozenModel, batch: TaskBatch) -> Tensor:
    """What the target answers by itself, (U, C), without gradients."""
    return chosen(target.logits(batch.inputs), batch.targets, target.class_map)


@torch.no_grad()
def own_answers(target: FrozenModel, batch: TaskBatch) -> UnitAnswers:
    """Score what the target answers by itself."""
    return batch_answers(target.logits(batch.inputs), batch.targets, target.class_map)
