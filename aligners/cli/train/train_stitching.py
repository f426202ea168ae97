"""`train.py stitch`: stitching layers through frozen tails."""

from dataclasses import replace

from aligners.callbacks.checkpoint import SaveStitching
from aligners.cli.command import Run, trains
from aligners.cli.options import check_goes_on
from aligners.datamodules.model_texts import stitched_texts
from aligners.fitting.saved_bank import STITCHING
from aligners.injection.stitching.measuring import StitchingEvaluation
from aligners.injection.stitching.stitching_training import STEPS, Stitching
from aligners.reports.publishing import WriteReport


@trains(
    "stitch",
    module=Stitching,
    data=stitched_texts,
    saving=SaveStitching,
    max_steps=STEPS,
    val_check_interval=200,
    check_val_every_n_epoch=None,  # the interval counts steps, across epochs
    num_sanity_val_steps=0,
)
def stitch(run: Run) -> None:
    """Train stitching layers through frozen tails, then measure them on the held-out texts and report.

    Example: `--data.models embedded:0 embedded:1 --data.sites 2 --run runs/stitched`
    """
    check_goes_on(run.options.ckpt_path, "stitch", STITCHING)
    run.start()
    model = run.made.model
    trainer = run.training(WriteReport("stitching", run.folder))
    run.fit(trainer)
    folder = run.made.checkpoint.inside(run.folder).folder
    stored = replace(model.stored().freeze(), path=folder / model.final)
    evaluation = StitchingEvaluation(
        stored, model.fitted, allow_mixed=model.allow_mixed, seed=model.seed
    )
    trainer.test(evaluation, datamodule=run.made.data, verbose=False)
