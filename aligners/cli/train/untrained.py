"""`train.py untrained`: a model's untrained twin."""

from typing import cast

from transformers import PreTrainedTokenizerBase

from aligners.cli.command import Run, command
from aligners.datamodules.layers import LayerActivations
from aligners.errors import UserError
from aligners.files.atomic import whole_folder
from aligners.models.loading.model_files import save_model
from aligners.progress import tell


@command(
    "untrained",
    parts={"data": LayerActivations},
    defaults={"data.models": ["embedded:0"], "data.max_length": 2},  # nothing is read
)
def untrained(run: Run, seed: int = 0) -> None:
    """Save a model's untrained twin in model/: the same config, with weights drawn at random.

    Example: `--data.models embedded:0 --run runs/untrained`

    Args:
        run: of the command.
        seed: Of the weights.
    """
    if len(run.options.data.models) != 1:
        raise UserError(
            f"Expected `data.models` to name one model, but got {run.options.data.models}."
        )
    data = run.made.data  # options are checked, nothing is loaded
    run.claim()
    (frozen,) = data.frozen
    twin = frozen.untrained(seed)
    with whole_folder(run.folder / "model") as unfinished:
        save_model(
            unfinished, twin.model, cast(PreTrainedTokenizerBase, twin.tokenizer)
        )
    tell(f"Saved {run.folder / 'model'}")
