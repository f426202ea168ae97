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

EXACT = 1e-6  # FVU, added over the directions that count, of what differs by the rounding of float32 alone
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
        """Raise if the Trainer has trained before, and would go on counting.

        Raises:
            ValueError: it has taken steps already.
        """
        if stage == "fit" and trainer.global_step and trainer.ckpt_path is None:
            raise UserError(
                f"Expected a new Trainer, but this one has taken {trainer.global_step:,} steps already, and Lightning "
                "goes on counting. Make a Trainer for each fit; `ckpt_path` goes on from a checkpoint."
            )

    def choosing(self) -> dict[str, Any]:
        """By what the best step is chosen, as plain values: a run that goes on has to share it."""
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
            self._begin(key, banks[key], criterion)
            before = self._diverged[key]
            # sites that have diverged are closed from now on
            self._diverged[key] = pl_module.divergence.step.get(key, before).clone()
            self._compare(key, banks[key], criterion, step)
            new = (self._diverged[key] > 0) & (before == 0)
            if isinstance(pl_module, Alignment) and bool(new.any()):
                self._set_back(key, banks[key], new, trainer)
                _warn_of_divergence(pl_module, key, new, self._step[key])
        self._stop_if_closed(trainer)

    def _stop_if_closed(self, trainer: pl.Trainer) -> None:
        if self._best and all(bool(self._closed(key).all()) for key in self._best):
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
        for record in (self._step, self._waited, self._diverged):
            record[key] = torch.zeros_like(criterion, dtype=torch.long)
        self._kept[key] = {
            name: value.clone() for name, value in bank.state_dict().items()
        }

    @torch.no_grad()
    def _compare(self, key: str, bank: Aligner, criterion: Tensor, step: int) -> None:
        closed = self._closed(key)
        better = (criterion < self._best[key] - self.min_delta) & ~closed
        self._best[key] = torch.where(better, criterion, self._best[key])
        self._step[key] = torch.where(better, step, self._step[key])
        self._waited[key] = torch.where(better, 0, self._waited[key] + (~closed).long())
        for name, value in bank.state_dict().items():
            of_each = better[bank.places(name)]
            self._kept[key][name][of_each] = value[of_each]

    @torch.no_grad()
    def _set_back(
        self, key: str, bank: Aligner, sites: Tensor, trainer: pl.Trainer
    ) -> None:
        """Restore the best parameters of some sites (S,), and clear their momentum so that they stay there."""
        for name, value in bank.state_dict().items():
            of_each = sites[bank.places(name)]
            value[of_each] = self._kept[key][name][of_each]
        for name, parameter in bank.named_parameters():
            of_each = sites[bank.places(name)]
            for kind, moment in trainer.optimizers[0].state.get(parameter, {}).items():
                if moment.shape == parameter.shape:
                    moment[of_each] = parameter[of_each] if kind == LAST else 0

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
            pl_module.training_record[key] = {
                "best_step": self._step[key].tolist(),
                "diverged_step": self._diverged[key].tolist(),
                "exact": (self._best[key] < exact).tolist(),
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
    places = []
    diverged = module.divergence.step[key]
    for s, site in enumerate(module.site_names()):
        if bool(sites[s]):
            places.append(
                f"{site} at step {int(diverged[s])} (set back to step {int(best[s])})"
            )
    where = f"diverged at site pair {', '.join(places)}."
    _warn(module, key, f"{where} It is frozen there; training goes on elsewhere.")


def _warn_of_untrained(module: Alignment) -> None:
    """Warn about the sites at which no step improved on a start that leaves something to learn."""
    for key, record in module.training_record.items():
        at = enumerate(zip(record["best_step"], record["exact"], strict=True))
        sites = [s for s, (best, exact) in at if best == 0 and not exact]
        if not sites or not record["steps"]:
            continue
        names = ", ".join(module.site_names()[s] for s in sites)
        start = ", ".join(dict.fromkeys(record["start"][s] for s in sites))
        reason = f"no step did better on the validation texts than the untrained start ({start}), which is kept."
        _warn(module, key, f"learned nothing at site pair {names}: {reason}")


@rank_zero_only
def _warn(module: Alignment, key: str, said: str) -> None:
    """Warn about a bank, and say at which learning rate it was trained."""
    route, name = key.split(".")
    rate = max(
        group["initial_lr"] for group in module.trainer.optimizers[0].param_groups
    )
    advice = f"The learning rate is {rate:g}: try another, or more `rows`."
    logger.warning("%s (%s) %s %s", name, DIRECTIONS[route], said, advice)
