"""`evaluate.py inject`: errors of maps, and what a model does with mapped states."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
from jsonargparse import Namespace
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities import rank_zero_only

from aligners.cli.command import Run, can_build, command, options_of
from aligners.datamodules.module import stream_of
from aligners.datamodules.paired_activations import PairedActivations
from aligners.datamodules.pairings import pair_states
from aligners.errors import UserError, check_known
from aligners.fitting.saved_bank import DIRECTIONS, StoredBank, load_bank, save_bank
from aligners.injection.generation.continuing import Continuing, continue_texts
from aligners.injection.injecting import InjectionEvaluation
from aligners.injection.methods import ALL_CLOSED_FORMS, ClosedForms, between_two_models
from aligners.injection.routes import InjectedTask, paired_routes
from aligners.progress import tell


def _check(made: Namespace) -> None:
    check_known(ALL_CLOSED_FORMS, closed_form=made.closed_form)
    can_build(Continuing)(made)


@command(
    "inject",
    InjectionEvaluation,
    Continuing,
    data=pair_states,
    skip={"stored"},
    defaults={"data.batch_size": 128},
    check=_check,
)
def inject(run: Run, checkpoints: Sequence[Path] = ()) -> None:
    """Measure maps on held-out text: their errors, and what a model does with mapped states in place of its own.

    Errors are those on the rows that the maps were fitted on. The frozen model is a classifier on texts with labels,
    or a language model; to inject into it, both models must read the same tokens. With `--generate 16` language models
    also continue the beginnings of 16 held-out texts: by themselves, and with every map in place at every site.

    Example: `--checkpoints runs/mine/aligners.safetensors --run runs/injected`

    Args:
        run: of the command.
        checkpoints: Files aligners.safetensors or stitching.safetensors of one pair of models. The data options of the
            first are this command's defaults. Without an aligners.safetensors, the closed forms are fitted on the spot.
    """
    if not checkpoints and not run.options.closed_form:
        raise UserError(
            "Expected `checkpoints` or `closed_form` to name at least one map, but got neither: there is nothing to "
            "measure. Leave `closed_form` out for all of them."
        )
    stored = [between_two_models(load_bank(path)) for path in checkpoints]
    if stored:
        run.use_data_of(
            {"far_rows": "keep", **stored[0].data_config}
        )  # which earlier versions kept
    run.start()
    before: list[pl.Callback] = [
        LambdaCallback(setup=partial(_say_what_is_not_injected, run.options))
    ]
    if all(bank.moments is None for bank in stored):
        stored.append(_fit_closed_forms(run, *before))
        before = []
    after = LambdaCallback(
        on_test_epoch_end=partial(continue_texts, run.build(Continuing))
    )
    run.test(run.build(InjectionEvaluation, stored), "injection", *before, after)


def _say_what_is_not_injected(
    options: Namespace, trainer: pl.Trainer, module: pl.LightningModule, stage: str
) -> None:
    """Report, before anything is read, where nothing can be injected, and reject labels that no head predicts."""
    data = stream_of(trainer, PairedActivations)
    routes = paired_routes(data, both_directions=options.both_directions)
    task = InjectedTask.of(data, routes, masked_share=options.masked_share, seed=0)
    writing = Continuing(**options_of(Continuing, options))
    for route, why in task.not_injected.items():
        writing.check(data.split("test"), route, why)
        if why is not None:
            rank_zero_only(tell)(
                f"Nothing will be injected {DIRECTIONS[route.key]}, only errors are measured: {why}."
            )


def _fit_closed_forms(run: Run, *callbacks: pl.Callback) -> StoredBank:
    """Fit the closed forms in one pass over the fitting texts, and save those that they determine beside the report."""
    names = run.options.closed_form or ["linear"]
    module = ClosedForms(
        {name: ALL_CLOSED_FORMS[name] for name in names},
        both_directions=run.options.both_directions,
    )
    once = {
        "max_epochs": -1,
        "logger": False,
        "limit_val_batches": 0,
        "enable_model_summary": False,
    }
    trainer = run.trainer(*callbacks, **once)
    trainer.fit(module, datamodule=run.made.data)
    bank = replace(module.stored().freeze(), path=run.folder / "aligners.safetensors")
    if trainer.is_global_zero:
        save_bank(bank, bank.path)
        tell(f"Saved {bank.path}")
    return (
        bank if run.options.closed_form else replace(bank, maps={})
    )  # only the floors need its moments
