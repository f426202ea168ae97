"""`evaluate.py stitch`: what stitching models together costs."""

from pathlib import Path

from aligners.cli.command import Run, can_build, command
from aligners.datamodules.model_texts import stitched_texts
from aligners.fitting.saved_bank import load_bank
from aligners.injection.scoring.pair_intervals import check_groups
from aligners.injection.stitching.measuring import StitchingEvaluation


@command(
    "stitching",
    StitchingEvaluation,
    data=stitched_texts,
    skip={"stored"},
    defaults={"data.batch_size": 128},
    check=lambda made: made.checkpoint or can_build(StitchingEvaluation)(made),
)
def stitch(
    run: Run, checkpoint: Path | None = None, groups: dict[str, list[str]] | None = None
) -> None:
    """Stitch models on held-out text and measure the penalty.

    With a checkpoint of `train.py stitch`, its layers are measured. Without one, identity stitching is measured between
    any number of models of one width, at every block or on the whole grid of site pairs.

    Example: `--checkpoint runs/stitched/stitching.safetensors --run runs/penalties`

    Args:
        run: of the command.
        checkpoint: File stitching.safetensors. Its data options are this command's defaults.
        groups: Name -> models, for example those that generalise and those that do not: means are then taken over the
            routes within and between groups.
    """
    stored = load_bank(checkpoint) if checkpoint else None
    if stored is not None:
        run.use_data_of(stored.data_config)
    check_groups(groups, run.options.data.models)
    evaluation = run.build(StitchingEvaluation, stored)
    run.start()
    run.test(evaluation, "stitching", groups=groups)
