"""Errors of the maps of a fit on held-out and on fitting rows, where nothing can be injected."""

from __future__ import annotations

import math
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import nn

from aligners.fitting.alignment import Alignment
from aligners.fitting.errors import MapErrors
from aligners.fitting.fits import Fit
from aligners.fitting.outcomes import few_rows, outcomes
from aligners.maps.canonical import reduced_mse
from aligners.similarity.algebra.moments import Moments
from datamodules.module import stream_of
from datamodules.rows.reading import PairedBatch, Plan
from datamodules.states import States

HELD_OUT = ("mse", "l2", "relative_error", "fvu", "fvu_unseen", "fvu_inverse", "round_trip")
FITTING = ("mse", "relative_error", "fvu")


class ErrorsEvaluation(pl.LightningModule):
    """Measures the maps of a fit from X to Y on the held-out texts, and on as many fitting texts.

    Attributes:
        rows: of the report, after the evaluation.
        meta: what holds for all of them.

    Args:
        fitted: the module that was trained.
    """

    def __init__(self, fitted: Alignment) -> None:
        super().__init__()
        self.fitted = fitted
        self.errors = nn.ModuleDict()
        self.rows: list[dict[str, Any]] = []
        self.meta: dict[str, Any] = {}

    @property
    def _data(self) -> States:
        return stream_of(self.trainer, States)

    def setup(self, stage: str) -> None:
        """Start afresh, on held-out and on fitting texts."""
        self._data.plan(Plan(measured=self._data.seen, fitting=True))
        moments = cast(Moments, self.fitted.moments)
        self.errors = nn.ModuleDict(
            {
                f"{split}/{fit.name}": MapErrors(moments.mean_x, moments.mean_y)
                for fit in self._fits()
                for split in self._data.splits
            }
        )

    def _fits(self) -> list[Fit]:
        return [fit for fit in self.fitted.fits() if fit.direction == "forward"]

    def test_step(self, batch: PairedBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add the errors of every map on one batch."""
        split = self._data.splits[dataloader_idx]
        for fit in self._fits():
            errors = cast(MapErrors, self.errors[f"{split}/{fit.name}"])
            errors.update(fit.aligner, batch.x, batch.y, batch.rows.unseen)

    def on_test_epoch_end(self) -> None:
        """One row for every map and place."""
        self._data.reader.check.flush()
        cautions = few_rows(cast(Moments, self.fitted.moments))
        self.meta = {**self._data.describe(), "split": "test", "cautions": cautions}
        self.rows = [row for fit in self._fits() for row in self._rows(fit)]

    def _rows(self, fit: Fit) -> list[dict[str, Any]]:
        found = {split: cast(MapErrors, self.errors[f"{split}/{fit.name}"]).compute() for split in self._data.splits}
        training = outcomes(self.fitted.training_record.get(fit.key), len(self.fitted.places))
        reduced = reduced_mse(fit.aligner, len(self.fitted.places))
        parameters = sum(weight[0].numel() for weight in fit.aligner.parameters())
        return [
            {
                "model_x": place.model_x,
                "model_y": place.model_y,
                "site_x": place.site_x,
                "site_y": place.site_y,
                **place.about,
                "method": fit.name,
                "role": "method",
                "parameters": parameters,
                "training": training[s],
                **{name: _number(found["test"][name].reshape(-1)[s]) for name in HELD_OUT},
                "mse_reduced": reduced[s],
                **{f"{name}_fit": _number(found["fit"][name].reshape(-1)[s]) for name in FITTING},
            }
            for s, place in enumerate(self.fitted.places)
        ]


def _number(value: torch.Tensor) -> float | None:
    return float(value) if math.isfinite(value) else None
