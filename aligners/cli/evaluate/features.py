"""`evaluate.py features`: what two models share, feature by feature."""

from collections.abc import Sequence
from pathlib import Path

from aligners.cli.command import Run, command
from aligners.datamodules.pairings import pair_states
from aligners.errors import UserError
from aligners.fitting.saved_bank import StoredBank, load_bank
from aligners.injection.latents.control_banks import check_control, check_seed
from aligners.injection.latents.latent_evaluation import LatentEvaluation
from aligners.injection.latents.stored_dictionary import dictionary_of
from aligners.reports.page.latent_page import WriteLatentPage
from aligners.similarity.latents.unit_sums import Parts


@command(
    "features",
    LatentEvaluation,
    data=pair_states,
    skip={"bank"},
    defaults={"data.batch_size": 64},
)
def features(
    run: Run,
    checkpoint: Path | None = None,
    same: Sequence[Path] = (),
    other_seeds: Sequence[Path] = (),
) -> None:
    """Say what two models share, feature by feature of a sparse dictionary of both, on held-out text.

    Every latent gets a verdict: shared, X's own, Y's own or undecided. It rests on what both models have of the latent,
    not on decoder norms alone, on intervals over texts, and on controls: states of other texts, and, with `--same`,
    dictionaries of models that differ by chance alone, which show how many own latents nothing makes.

    Example: `--checkpoint runs/mine/aligners.safetensors --run runs/features`

    Args:
        run: of the command.
        checkpoint: File aligners.safetensors of `train.py fit --config sparse`. Its data options are this command's
            defaults.
        same: Such files of models that differ by chance alone, such as two seeds of one training: no latent of theirs
            is only one model's. Each is read with its own data options.
        other_seeds: Such files of the same models and sites as `checkpoint`, trained from other seeds: in how many of
            them a latent recurs becomes a column.
    """
    if checkpoint is None:
        raise UserError(
            "Expected `checkpoint` to name a file aligners.safetensors with a dictionary of two models, but got "
            "none. `train.py fit --config sparse` makes one."
        )
    bank = load_bank(checkpoint)
    name = run.options.dictionary
    _, aligner = dictionary_of(bank, name)
    controls = [load_bank(path) for path in same]
    for control in controls:
        check_control(control)
    others = [load_bank(path) for path in other_seeds]
    for other in others:
        check_seed(other, bank, aligner)
    run.use_data_of({"far_rows": "keep", **bank.data_config})
    evaluation = run.build(LatentEvaluation, bank)
    run.start()
    for control in controls:
        evaluation.same[str(control.path)] = _parts_of(run, control)
    evaluation.seeds = [dictionary_of(other)[1] for other in others]
    run.test(evaluation, "features", WriteLatentPage(run.folder))


def _parts_of(run: Run, control: StoredBank) -> Parts:
    """Measure a same-model control on its own models and texts."""
    options = run.made
    evaluation = LatentEvaluation(
        control,
        spaces=options.spaces,
        units=options.units,
        seed=options.seed,
        effects=0,
        contexts=0,
    )
    data = run.data_like({"far_rows": "keep", **control.data_config})
    run.trainer(logger=False).test(evaluation, datamodule=data, verbose=False)
    return evaluation.found.parts
