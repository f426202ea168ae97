"""What every command imports, in the order that takes least time, without what no command uses."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch


def import_packages(*, with_wandb: bool) -> None:
    """Import W&B if it is used, then Lightning: W&B inspects all loaded modules, and many take long.

    The garbage collector is off meanwhile, and ignores these modules later: they stay, and searching them took a tenth
    of the time to the first step of a fit.

    Args:
        with_wandb: whether the command begins a run at W&B.
    """
    gc.disable()
    try:
        if with_wandb:
            with suppress(ImportError):
                import wandb.sdk.launch.inputs.internal  # noqa: F401
        _list_models_of_transformers()
        with _standing_in(_unused()):
            import torchmetrics  # noqa: F401
            import transformers.modeling_utils  # noqa: F401
        import aligners.cli.command  # noqa: F401

        if not gc.get_freeze_count():
            gc.freeze()  # once: what a command leaves in this process should go
    finally:
        gc.enable()


def _list_models_of_transformers() -> None:
    """Import transformers, which reads all of its sources to list its models, and would do so again for `models`."""
    import transformers
    from transformers.utils import import_utils

    models = Path(transformers.__file__).parent / "models"
    listed = import_utils.create_import_structure_from_path(models)  # kept by it
    with patch.object(
        import_utils, "create_import_structure_from_path", lambda _: listed
    ):
        import transformers.models


def _unused() -> dict[str, Any]:
    """Packages and what stands for them, with all that is looked up in them as others import them.

    Half of SciPy is for torchmetrics' audio metrics and transformers' detection of objects. Matplotlib stays: a user's
    callback may plot any metric of torchmetrics.
    """
    return {
        "scipy.signal": SimpleNamespace(hamming=None),
        "scipy.optimize": SimpleNamespace(linear_sum_assignment=None),
    }


@contextmanager
def _standing_in(modules: dict[str, Any]) -> Iterator[None]:
    """Within it, these stand for modules; where one of those, or who needs them, is there already, nothing does."""
    there = {"torchmetrics", "transformers.modeling_utils", *modules}
    if there & sys.modules.keys():
        yield
        return
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
