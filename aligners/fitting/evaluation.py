"""Errors of the maps of a fit on held-out and on fitting rows, where nothing can be injected."""

from __future__ import annotations

from typing import Any, cast

import lightning.pytorch as pl
from torch import nn

from aligners.fitting.alignment import Alignment
from aligners.fitting.bank import FORWARD
from aligners.fitting.errors import MapErrors, error_rows
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
        self.fitted, self.errors = fitted, nn.ModuleDict()
        self.rows: list[dict[str, Any]] = []
        self.meta: dict[str, Any] = {}

    def setup(self, stage: str) -> None:
        """Start afresh, on held-out and on fitting texts."""
        self.stream = stream_of(self.trainer, States)
        self.stream.plan(Plan(measured=self.stream.seen, fitting=True))
        self.fits = [fit for fit in self.fitted.fits() if fit.route == FORWARD]
        names = [f"{split}/{fit.name}" for fit in self.fits for split in self.stream.splits]
        self.errors = nn.ModuleDict({name: MapErrors(*self.fitted.means(self.fits[0])) for name in names})

    def _of(self, split: str, fit: Fit) -> MapErrors:
        return cast(MapErrors, self.errors[f"{split}/{fit.name}"])

    def test_step(self, batch: PairedBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Add the errors of every map on one batch."""
        for fit in self.fits:
            errors = self._of(self.stream.splits[dataloader_idx], fit)
            errors.update(fit.aligner, batch.x, batch.y, batch.rows.unseen)

    def on_test_epoch_end(self) -> None:
        """One row for every map and place."""
        self.stream.reader.check.flush()
        cautions = few_rows(cast(Moments, self.fitted.moments))
        self.meta = {**self.stream.describe(), "split": "test", "cautions": cautions}
        self.rows = [row for fit in self.fits for row in self._rows(fit)]

    def _rows(self, fit: Fit) -> list[dict[str, Any]]:
        held_out, fitting = (self._of(split, fit).compute() for split in ("test", "fit"))
        places = self.fitted.places
        figures = {
            **{name: held_out[name] for name in HELD_OUT},
            "mse_reduced": reduced_mse(fit.aligner, len(places)),
            **{f"{name}_fit": fitting[name] for name in FITTING},
        }
        training = outcomes(self.fitted.training_record.get(fit.key), len(places))
        return error_rows(places, fit.name, fit.aligner, training, figures)
