"""What Y does with states that are put into it, text by text, and the columns that a report makes of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from aligners.answers import in_data_order, one_after_another
from aligners.baselines import random_labels
from aligners.methods import WHOLE, Route
from aligners.scores import bootstrap_interval
from aligners.tasks import unit_scores
from datamodules.reading import PairedBatch
from datamodules.targets import classification_targets
from frozen.architectures import Component
from frozen.model import FrozenModel

__all__ = ["BEHAVIOUR", "BEHAVIOUR_COLUMNS", "Behaviour", "behaviour_columns"]

BEHAVIOUR = ["correct", "loss", "agree"]
BEHAVIOUR_COLUMNS = ("accuracy", "accuracy_low", "accuracy_high", "loss", "agreement")


class Behaviour:
    """Runs Y's tail on mapped states, and scores what needs no site beside it.

    Args:
        route: from X into Y.
        sites: of each pair, the one in Y.
        component: what is replaced there.
        texts: number of held-out texts.
        classes: that these have.
        seed: of the random floors.
    """

    def __init__(
        self, route: Route, sites: list[int], component: Component, texts: int, classes: int, seed: int
    ) -> None:
        self.source, self.target = route.source, route.target
        self.sites, self.component, self.seed = sites, component, seed
        self.chance = random_labels(texts, classes, seed)

    def injected(self, batch: PairedBatch, mapped: Tensor, native: Tensor) -> dict[str, Tensor]:
        """What Y does with the mapped rows (S, N, d_y) at each site: quantity -> (S, B).

        Args:
            batch: whose rows are all tokens.
            mapped: what is put into Y.
            native: (B, C) what Y says by itself, in the order of the texts' classes.
        """
        inputs = batch.texts.inputs_x
        blank = mapped.new_zeros(*inputs["input_ids"].shape, self.target.width)
        logits = [
            self.target.tail(inputs, site, batch.rows.scatter(rows, blank), self.component)
            for site, rows in zip(self.sites, mapped, strict=True)
        ]
        ordered = in_data_order(torch.stack(logits), self.target.class_map)
        return unit_scores(ordered, classification_targets(_labels(batch)), native.argmax(-1))

    def whole(self, batch: PairedBatch, natives: dict[FrozenModel, Tensor]) -> dict[str, Tensor]:
        """The rows of `WHOLE`: quantity -> (methods, 1, B).

        Args:
            batch: of texts with labels.
            natives: (B, C) likewise of each model with a head for the task.
        """
        inputs, labels, text = batch.texts.inputs_x, _labels(batch), batch.texts.text
        native = natives[self.target]
        answer = native.argmax(-1)
        missing = torch.full_like(native, torch.nan)
        # The source answers its own way; without a head, or one of this task, there is nothing to say.
        of_source = natives.get(self.source, missing)
        with self.target.fresh_head(self.seed):
            fresh = in_data_order(self.target.logits(inputs), one_after_another(self.target.class_map))
        drawn = self.chance.to(labels.device)[text]
        each = torch.stack([of_source, native, fresh, missing])
        found = unit_scores(each, classification_targets(labels), answer)
        found["correct"][WHOLE.index("random_label")] = (drawn == labels).float()
        found["agree"][WHOLE.index("random_label")] = (drawn == answer).float()
        return {name: values[:, None] for name, values in found.items()}


def behaviour_columns(table: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Each of `BEHAVIOUR_COLUMNS` as (methods, S), over all texts.

    Args:
        table: quantity -> (methods, S, texts).
        seed: of the resampling of texts.
    """
    low, high = bootstrap_interval(table["correct"], seed=seed)
    return {
        "accuracy": table["correct"].mean(-1),
        "accuracy_low": low,
        "accuracy_high": high,
        "loss": table["loss"].mean(-1),
        "agreement": table["agree"].mean(-1),
    }


def _labels(batch: PairedBatch) -> Tensor:
    labels: Any = batch.texts.labels  # there, or nothing is injected
    return labels
