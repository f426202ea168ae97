"""The evaluation of a dictionary of two models: what each latent is, on held-out texts read in one pass."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from aligners.datamodules.module import stream_of
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.rows.read_rows import PairedBatch, Plan
from aligners.errors import UserError, check_known, check_range, finite
from aligners.files.resources import in_words
from aligners.fitting.saved_bank import StoredBank
from aligners.injection.injecting import check_stored
from aligners.injection.latents.evaluated_effects import (
    add_effects,
    cumulative_rows,
    evaluated_effects,
)
from aligners.injection.latents.latent_rows import head_of, latent_rows, site_rows
from aligners.injection.latents.latent_texts import (
    LatentReader,
    LatentTexts,
    add_tokens,
)
from aligners.injection.latents.stored_dictionary import check_same_rows, dictionary_of
from aligners.injection.scoring.scores import resampled_counts
from aligners.maps.sparse.sparse_aligner import SparseAligner
from aligners.models.loading.load_models import check_precision
from aligners.progress import tell
from aligners.similarity.double_metric import DoubleMetric
from aligners.similarity.latents.agreement import Matching, joint_decoders, recurrences
from aligners.similarity.latents.dictionary import relative_norms
from aligners.similarity.latents.examination import (
    SPACES,
    Examination,
    Measured,
    Spaces,
    check_memory,
    readings_of,
)
from aligners.similarity.latents.other_texts import GROUP, drawn_order, groups_of
from aligners.similarity.latents.ratios import LEAST_UNITS, ratios_with_intervals
from aligners.similarity.latents.readings import FittedReadings
from aligners.similarity.latents.unit_sums import Parts
from aligners.similarity.latents.verdicts import (
    Verdicts,
    can_rank,
    control_scores,
    verdicts,
)

CODES = 2**26  # computed at a time
FITTING, MEASURING = 0, 1  # parts of the held-out texts
FEWEST_TEXTS = 2 * LEAST_UNITS
TOO_FEW_TO_RANK = (
    "Fewer than 99 latents fire. That is too few for the control with texts of others, so which are called shared "
    "rests on tests over texts alone."
)
# Latents above which those of other seeds are matched with the nearest.
ONE_TO_ONE = 4096


class SiteErrors(DoubleMetric):
    """Sums what a dictionary of S sites leaves of the states of both models."""

    full_state_update = False
    n: Tensor
    x: Tensor
    y: Tensor

    def __init__(self, sites: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        for name, shape in {"n": (), "x": (sites,), "y": (sites,)}.items():
            zeros = torch.zeros(shape, dtype=torch.float64)
            self.add_state(name, zeros, dist_reduce_fx="sum")

    def update(self, x: Tensor, y: Tensor) -> None:
        """Add the errors of rows: (S, N, d_x) and (S, N, d_y)."""
        self.n += x.shape[1]
        self.x += x.double().square().sum((1, 2))
        self.y += y.double().square().sum((1, 2))

    def compute(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the number of rows, and the mean squared length of the error of X and of Y, (S,)."""
        return self.n, self.x / self.n, self.y / self.n


class LatentEvaluation(pl.LightningModule):
    """Says of each latent of a dictionary of two models whether they share it, after controls.

    Every second held-out text is fitted on, as `FittedReadings` needs it; the others are measured. The result is the
    same at any batch size and for any number of ranks.

    Args:
        bank: checkpoint with the dictionary.
        dictionary: its name there, see `dictionary_of`.
        spaces: "apart" reads each model along directions that are fitted for it; "one" reads both along decoders, for a
            model and its fine-tuning.
        units: most groups of texts, over which intervals and tests are made; with fewer texts each is one.
        effects: latents of each site whose effects on both models' answers are measured, and as many random ones; 0:
            none. See `latent_effects`.
        effect_texts: most texts on which effects are measured.
        seed: of the resampling of groups, and of the texts and random latents of effects.
        contexts: texts of each latent that are kept for the page of latents; 0: there is no such page.

    Attributes:
        same: parts of same-model controls, by name, to be set before the test: see `verdicts`.
        seeds: dictionaries of the same models and sites from other seeds.
        found: once tested, what both models have of each latent.
        texts: what each latent fires on; None without `contexts`.
        judged: the verdicts.
        rows: one for each latent that fired.
        report_tables: `sites`, one row for each site; `cumulative`, one for each number of latents that
            were moved together, if any were.
        meta: what holds for all rows.

    Raises:
        ValueError: an option is out of its range, or the bank has no such dictionary.
    """

    def __init__(
        self,
        bank: StoredBank,
        dictionary: str | None = None,
        spaces: Spaces = "apart",
        units: int = 200,
        effects: int = 20,
        effect_texts: int = 64,
        seed: int = 0,
        contexts: int = 8,
    ) -> None:
        super().__init__()
        check_known(SPACES, spaces=spaces)
        check_range(least=LEAST_UNITS, units=units)
        check_range(least=0, effects=effects)
        check_range(least=1, effect_texts=effect_texts)
        check_range(least=0, contexts=contexts)
        self.bank = bank
        self.name, self.aligner = dictionary_of(bank, dictionary)
        self.spaces = spaces
        self.most_units = units
        self.effects = effects
        self.effect_texts = effect_texts
        self.seed = seed
        self.contexts = contexts
        self.reader: LatentReader | None = None
        self.texts: LatentTexts | None = None
        self.same: dict[str, Parts] = {}
        self.seeds: list[SparseAligner] = []
        self.rows: list[dict[str, Any]] = []
        self.report_tables: dict[str, list[dict[str, Any]]] = {}
        self.meta: dict[str, Any] = {}

    # ------------------------------------------------------------------ before

    def setup(self, stage: str) -> None:
        """Run all checks that can be made before reading, and divide the held-out texts."""
        check_precision(self.trainer)
        data = self.stream = stream_of(self.trainer, PairedActivations)
        if self.bank.fitted is not None:
            data.leave_out({str(self.bank.path): self.bank.fitted})
        described = data.describe()
        check_stored([self.bank], described, data.reader.sites)
        check_same_rows(self.bank, described)
        texts = len(data.split("test"))
        if texts < FEWEST_TEXTS:
            raise UserError(
                f"Expected at least {FEWEST_TEXTS} held-out texts, half to fit on and half to measure, but got {texts}."
                " Give more text (`data.text`)."
            )
        self.units = min(self.most_units, texts // 2)
        numbers = torch.arange(texts)
        parts = [drawn_order(numbers[first::2]).tolist() for first in (0, 1)]
        data.plan(Plan(parts=parts, group=GROUP))
        self.meta = {
            **described,
            "dictionary": self.name,
            "latents": self.aligner.latents,
            "spaces": self.spaces,
            "units": self.units,
            "n_texts": texts // 2,
            "split": "test",
            "seed": self.seed,
            "controls": list(self.same),
            "seeds": len(self.seeds),
            "cautions": [],
        }

    def on_test_start(self) -> None:
        """Begin with sums of nothing."""
        self.aligner.to(self.device)
        self.dictionary = self.aligner.paired()
        needed = check_memory(self.dictionary, self.units, self.spaces)
        rank_zero_only(tell)(
            f"What both models have of {self.aligner.latents:,} latents is summed, which takes up to "
            f"{in_words(needed)} of memory."
        )
        self.variances = self.aligner.variances()
        self.fitted = FittedReadings(self.dictionary, *self.variances).to(self.device)
        self.measured: Measured | None = None
        self.errors = SiteErrors(self.aligner.sites).to(self.device)
        if self.contexts:
            reader = LatentReader(
                self.aligner.sites,
                self.aligner.latents,
                self.stream.shown("test"),
                self.contexts,
            )
            self.reader = reader.to(self.device)

    # ------------------------------------------------------------------ reading

    def test_step(
        self, batch: PairedBatch, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Add a batch: of the texts to fit on, then of those to measure."""
        if dataloader_idx == FITTING:
            self._fit(batch)
            return
        if self.measured is None:
            self.measured = self._begin_measuring()
        for rows in groups_of(batch.rows.owner):
            self._measure(batch, rows)

    def _fit(self, batch: PairedBatch) -> None:
        at_a_time = max(1, CODES // (self.aligner.sites * self.aligner.latents))
        for x, y in zip(
            batch.x.split(at_a_time, 1), batch.y.split(at_a_time, 1), strict=True
        ):
            self.fitted.update(self.aligner.codes(x, y), x, y)

    def _begin_measuring(self) -> Measured:
        """Fit how the models are read to the texts of all ranks."""
        readings = readings_of(self.fitted, self.spaces)
        self.fitted.free()
        del self.fitted
        return Measured.empty(self.dictionary, readings, self.units)

    def _measure(self, batch: PairedBatch, rows: Tensor) -> None:
        """Add the rows of one group of texts."""
        assert self.measured is not None
        x = batch.x[:, rows]
        y = batch.y[:, rows]
        unit = batch.text[rows] // 2 % self.units
        codes = self.aligner.codes(x, y)
        self.measured.update(codes, x, y, unit, batch.rows.owner[rows])
        if self.reader is not None:
            self.reader.update(codes, batch.text[rows], batch.rows.place[rows])
        again_x, again_y = self.aligner.decode(codes)
        self.errors.update(x - again_x, y - again_y)

    # ------------------------------------------------------------------ after

    def on_test_epoch_end(self) -> None:
        """Give each latent its verdict, and make the rows of the report."""
        self.stream.reader.check.flush()
        if self.measured is None:
            raise UserError(
                "Expected held-out texts to measure after those that are fitted on, but none was read. Leave "
                "`trainer.limit_test_batches` out."
            )
        self.measured.gather()
        norm = relative_norms(self.dictionary, *self.variances)
        self.found = self.measured.examined(norm)
        self.judged = self._judged(self.found)
        self._make_rows(self.measured)
        self._add_effects()

    def _judged(self, found: Examination) -> Verdicts:
        permuted = [found.permuted]
        if not can_rank(control_scores(found.permuted)):
            permuted = []
            self.meta["cautions"].append(TOO_FEW_TO_RANK)
        return verdicts(found.parts, list(self.same.values()), permuted)

    def _make_rows(self, measured: Measured) -> None:
        """Make the rows of latents and of sites."""
        n, error_x, error_y = self.errors.compute()
        counts = resampled_counts(self.units, self.seed)
        ratios = ratios_with_intervals(
            self.found.parts, counts.to(self.found.parts.own.device)
        )
        places = self.stream.reader.places()
        self.meta["n_rows"] = int(n)
        self.meta["verdicts"] = self.judged.counts()
        self.meta["false_own"] = finite(self.judged.false_own)
        self.meta["error_rate"] = finite(self.judged.error_rate)
        carried = measured.sums.carried(self.variances, n)
        self.rows = latent_rows(
            places, self.found, self.judged, ratios, carried, n, self._recurrences()
        )
        if self.reader is not None:
            self.texts = self.reader.compute()
            add_tokens(self.rows, self.stream.reader.sites, self.texts)
        fvu = error_x / self.variances[0], error_y / self.variances[1]
        texts: int = self.meta["n_texts"]
        of_sites = site_rows(places, self.found, self.judged, fvu, texts)
        self.report_tables = {"sites": of_sites}

    def _add_effects(self) -> None:
        """Measure what latents do in both models, and add it to the rows."""
        sites = self.stream.reader.sites
        if not self.effects:
            add_effects(self.rows, sites, None)
            return
        measured = range(1, len(self.stream.split("test")), 2)
        found = evaluated_effects(
            self.stream,
            self.aligner,
            measured,
            count=self.effects,
            texts=self.effect_texts,
            seed=self.seed,
        )
        if isinstance(found, str):
            self.meta["effects"] = {"not_measured": found}
            add_effects(self.rows, sites, None)
            return
        self.meta["effects"] = found.meta
        add_effects(self.rows, sites, found)
        heads = [head_of(place) for place in self.stream.reader.places()]
        together = cumulative_rows(found, heads)
        if together:
            self.report_tables["cumulative"] = together

    def _recurrences(self) -> Tensor | None:
        """Count the dictionaries of other seeds in which each latent recurs, (S, m); None without any."""
        if not self.seeds:
            return None
        decoders = []
        for aligner in (self.aligner, *self.seeds):
            dictionary = aligner.to(self.device).paired()
            decoders.append(joint_decoders(dictionary, *self.variances))
        large = max(each.shape[1] for each in decoders) > ONE_TO_ONE
        matching: Matching = "nearest" if large else "one_to_one"
        return recurrences(decoders, matching)[0]
