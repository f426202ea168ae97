"""The command lines of `train.py` and `evaluate.py`."""

from contextlib import suppress

with suppress(ImportError):
    # Every W&B run imports it. Before Lightning it takes a tenth of the time: it looks through all that is loaded.
    import wandb.sdk.launch.inputs.internal  # noqa: F401
