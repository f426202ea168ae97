"""`evaluate.py steer`: what directions do to a language model, and what they cost."""

from pathlib import Path

from aligners.cli.command import Run, can_build, command
from aligners.datamodules.model_texts import steered_texts
from aligners.errors import UserError
from aligners.injection.generation.continuing import Continuing
from aligners.injection.generation.steering import Direction, SteeringEvaluation
from aligners.probing.artefacts.artefact_files import read_artefacts


@command(
    "steering",
    SteeringEvaluation,
    Continuing,
    data=steered_texts,
    skip={"directions", "writing", "reading"},
    defaults={"data.text.max_held_out": 200},
    check=can_build(Continuing),
)
def steer(
    run: Run,
    artefacts: Path | None = None,
    carried: Path | None = None,
    probe: Path | None = None,
) -> None:
    """Add directions to the states of a language model, on held-out text: their effect and cost, next to random ones.

    The effect is the log-odds of given words, or what a probe reads; the cost is KL from the model's own answers, and
    the loss. With `--generate 8`, the model also continues the beginnings of 8 texts.

    Example: `--data.model gpt2 --artefacts directions --words_for '[good]' --words_against '[bad]' --run runs/steered`

    Args:
        run: of the command.
        artefacts: Folder of an artefact, or of several: directions that were found on this model.
        carried: Folder of an artefact, or of several: directions that were brought from another model.
        probe: Folder of one artefact of this model that reads states, a direction or a head, at the site of the
            directions or later. The effect is its reading; for a head with several logits, the last logit minus the
            first.
    """
    directions = [
        Direction(
            one.name + " (carried)" * (role == "carried"),
            one.site,
            one.tensors["vector"],
            role,
        )
        for folder, role in ((artefacts, "native"), (carried, "carried"))
        for one in (read_artefacts(folder) if folder else ())
        if one.kind == "direction"
    ]
    if not directions:
        raise UserError(
            "Expected `artefacts` or `carried` to name a folder with a direction, but found none."
        )
    reading = None if probe is None else read_artefacts(probe)[0]
    evaluation = run.build(
        SteeringEvaluation, directions, run.build(Continuing), reading
    )
    run.start()
    run.test(evaluation, "steering")
