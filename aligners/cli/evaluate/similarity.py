"""`evaluate.py similarity`: how similar layers are."""

from aligners.cli.command import Run, can_build, command
from aligners.cli.endings import goes_on_with
from aligners.cli.folders import is_begun, rank
from aligners.datamodules.layers import LayerActivations
from aligners.similarity.passes.saved import PASSES, SavedPasses
from aligners.similarity.similarity_evaluation import SimilarityEvaluation

RESULT = "similarity.json"


@command(
    "similarity",
    SimilarityEvaluation,
    data=LayerActivations,
    defaults={"data.batch_size": 32},
    check=can_build(SimilarityEvaluation),
)
def similarity(run: Run, each_pair: bool | None = None) -> None:
    """Measure how similar the layers of two or more models are on the same held-out text.

    Write a table, heat maps over all layer pairs, and lines along matching layers. After an interruption, the same
    command with the same `--run` resumes after the last finished pass over the texts.

    Example: `--data.models embedded:0 embedded:1 --measures cka svcca --run runs/compared`

    Args:
        run: of the command.
        each_pair: Figures and a table of each pair of models. Default: for up to a dozen pairs; beyond that, a figure
            of each measure shows all pairs.
    """
    evaluation = run.build(SimilarityEvaluation)
    folder = (
        run.options.run
    )  # the folder of a comparison that was stopped, if it holds passes or no result
    begun = is_begun(folder) and (
        (folder / PASSES).exists() or not (folder / RESULT).exists()
    )
    if begun:
        run.check_begun()
    run.start(begun=begun)
    saved = evaluation.saved = SavedPasses(run.folder / PASSES)
    with goes_on_with(lambda: {"run": run.folder}):
        run.test(evaluation, "similarity", each_pair=each_pair)
    if rank() == 0:
        saved.remove()
