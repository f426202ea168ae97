"""Early stopping and best-so-far snapshots, site by site."""

import logging
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from aligners.errors import UserError, check_range
from aligners.fitting.alignment import Alignment
from aligners.fitting.bank_training import BankTraining
from aligners.fitting.saved_bank import DIRECTIONS
from aligners.fitting.steps import LAST
from aligners.maps.base import Aligner

EXACT = 1e-6  # FVU, added over the directions that count, by which runs differ through float32 rounding alone
STATE = ("best", "step", "waited", "diverged", "kept")  # what a resumed run needs

logger = logging.getLogger(__name__)


class BestPerSite(pl.Callback):
    """Keeps the parameters that did best in validation for each site of each trained aligner.

    A site that has not improved for `patience` validations is closed: later validations no longer count for it, as if
    its training had ended there. A site that diverges is closed too, and reset to its best at once. The run stops when
    all sites are closed. At the end the best parameters are restored, so a bank gives each site what it would have got
    alone; `Alignment.training_record` then holds the step at which each site was best (0: the
    untrained start).

    The criterion is the validation FVU, plus that of the inverse for aligners trained both ways. For stitching layers
    it is the validation loss of the task.

    Args:
        patience: number of validations without improvement after which a site is closed; None: never.
        min_delta: smallest improvement that counts.
    """

    def __init__(self, patience: int | None = None, min_delta: float = 0.0) -> None:
        check_range(least=1, patience=patience)
        self.patience = patience
        self.min_delta = min_delta
        self._seen: int | None = None  # step of the last validation
        self._best: dict[str, Tensor] = {}
        self._step: dict[str, Tensor] = {}
        self._waited: dict[str, Tensor] = {}
        self._diverged: dict[str, Tensor] = {}
        self._kept: dict[str, dict[str, Tensor]] = {}

    def setup(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str
    ) -> None:
        """Raise if the Trainer has trained before: it would go on counting its steps.

        Raises:
            ValueError: it has taken steps already.
        """
        if stage == "fit" and trainer.global_step and trainer.ckpt_path is None:
            raise UserError(
                f"Expected a new Trainer, but this one has taken {trainer.global_step:,} steps already, and Lightning "
                "goes on counting. Make a Trainer for each fit; `ckpt_path` goes on from a checkpoint."
            )

    def choosing(self) -> dict[str, Any]:
        """Return how the best step is chosen, as plain values: a resumed run must choose it likewise."""
        return {"patience": self.patience, "min_delta": self.min_delta}

    def on_train_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> None:
        """Stop a resumed run that had closed all its sites."""
        self._stop_if_closed(trainer)

    def on_validation_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> None:
        """Keep what improved, reset what diverged, and stop the run once every site is closed."""
        if trainer.state.fn != "fit" or not isinstance(pl_module, BankTraining):
            return
        step = trainer.global_step
        if trainer.sanity_checking or self._seen == step:
            return
        self._seen = step
        banks = pl_module.banks()
        for key, criterion in pl_module.criteria().items():
            bank = banks[key]
            self._begin(key, bank, criterion)
            before = self._diverged[key]
            diverged = pl_module.divergence.step.get(key, before)
            self._diverged[key] = diverged.clone()  # these are closed from now on
            self._compare(key, bank, criterion, step)
            new = (diverged > 0) & (before == 0)
            if new.any() and isinstance(pl_module, Alignment):
                self._set_back(key, bank, new, trainer)
                _warn_of_divergence(pl_module, key, new, self._step[key])
        self._stop_if_closed(trainer)

    def _stop_if_closed(self, trainer: pl.Trainer) -> None:
        for key in self._best:
            if not self._closed(key).all():
                return
        if self._best:
            trainer.should_stop = True

    def _closed(self, key: str) -> Tensor:
        closed = self._diverged[key] > 0
        if self.patience is not None:
            closed = closed | (self._waited[key] >= self.patience)
        return closed

    def _begin(self, key: str, bank: Aligner, criterion: Tensor) -> None:
        if key in self._best:
            return
        self._best[key] = torch.full_like(criterion, torch.inf)
        none = torch.zeros_like(criterion, dtype=torch.long)
        self._step[key] = none
        self._waited[key] = none
        self._diverged[key] = none
        kept = {}
        for name, value in bank.state_dict().items():
            kept[name] = value.clone()
        self._kept[key] = kept

    @torch.no_grad()
    def _compare(self, key: str, bank: Aligner, criterion: Tensor, step: int) -> None:
        """Keep the parameters of the sites that are better than at any validation before."""
        open_sites = ~self._closed(key)
        improved = criterion < self._best[key] - self.min_delta
        better = improved & open_sites
        self._best[key] = criterion.where(better, self._best[key])
        self._step[key] = self._step[key].masked_fill(better, step)
        waited = self._waited[key] + open_sites.long()
        self._waited[key] = waited.masked_fill(better, 0)
        kept = self._kept[key]
        for name, value in bank.state_dict().items():
            of_each = better[bank.places(name)]
            kept[name][of_each] = value[of_each]

    @torch.no_grad()
    def _set_back(
        self, key: str, bank: Aligner, sites: Tensor, trainer: pl.Trainer
    ) -> None:
        """Restore the best parameters of some sites (S,), and clear their momentum so that they stay there."""
        kept = self._kept[key]
        for name, value in bank.state_dict().items():
            of_each = sites[bank.places(name)]
            value[of_each] = kept[name][of_each]
        of_optimizer = trainer.optimizers[0].state
        for name, parameter in bank.named_parameters():
            of_each = sites[bank.places(name)]
            for kind, moment in of_optimizer.get(parameter, {}).items():
                if moment.shape != parameter.shape:
                    continue
                if kind == LAST:
                    moment[of_each] = parameter[of_each]
                else:
                    moment[of_each] = 0

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore each site's best parameters, even if nothing was left to train."""
        if not isinstance(pl_module, BankTraining):
            return
        pl_module.training_record = {}
        exact = EXACT if isinstance(pl_module, Alignment) else 0
        for key, bank in pl_module.banks().items():
            if key not in self._kept:
                continue
            bank.load_state_dict(self._kept[key])
            is_exact = self._best[key] < exact
            pl_module.training_record[key] = {
                "best_step": self._step[key].tolist(),
                "diverged_step": self._diverged[key].tolist(),
                "exact": is_exact.tolist(),
                "start": list(bank.start_names()),
                "steps": trainer.global_step,
            }
        if isinstance(pl_module, Alignment):
            _warn_of_untrained(pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to continue comparing."""
        return {name: getattr(self, f"_{name}") for name in STATE}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name in STATE:
            setattr(self, f"_{name}", state_dict[name])


def _warn_of_divergence(
    module: Alignment, key: str, sites: Tensor, best: Tensor
) -> None:
    """Warn that sites (S,) of a bank, True where it diverged, were set back to their best steps (S,)."""
    diverged = module.divergence.step[key]
    names = module.site_names()
    places = []
    for s in sites.nonzero()[:, 0].tolist():
        back = f"set back to step {int(best[s])}"
        places.append(f"{names[s]} at step {int(diverged[s])} ({back})")
    where = f"diverged at site pair {', '.join(places)}."
    _warn(module, key, f"{where} It is frozen there; training goes on elsewhere.")


def _warn_of_untrained(module: Alignment) -> None:
    """Warn about the sites at which no step improved on a start that leaves something to learn."""
    for key, record in module.training_record.items():
        sites = []
        for s, best in enumerate(record["best_step"]):
            if best == 0 and not record["exact"][s]:
                sites.append(s)
        if not sites or not record["steps"]:
            continue
        every = module.site_names()
        names = ", ".join(every[s] for s in sites)
        starts = dict.fromkeys(record["start"][s] for s in sites)
        reason = f"no step did better on the validation texts than the untrained start ({', '.join(starts)})"
        _warn(
            module,
            key,
            f"learned nothing at site pair {names}: {reason}, which is kept.",
        )


@rank_zero_only
def _warn(module: Alignment, key: str, said: str) -> None:
    """Warn about a bank, and say at which learning rate it was trained."""
    route, name = key.split(".")
    groups = module.trainer.optimizers[0].param_groups
    rate = max(group["initial_lr"] for group in groups)
    advice = f"The learning rate is {rate:g}: try another, or more `rows`."
    logger.warning("%s (%s) %s %s", name, DIRECTIONS[route], said, advice)
