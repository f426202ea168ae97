"""Maps and measures on plain arrays, and injection from names and texts: the library in a few lines of Python.

`docs/python.md` shows every name. The maps here take the widths from what they are fitted on; the banks in
`aligners.maps`, which they are made of, hold one map for each of many site pairs.
"""
# ruff: noqa: F403, F405  (each module lists what it offers)

from typing import TYPE_CHECKING, Any

from aligners.api import array_maps, measures
from aligners.api.array_maps import *
from aligners.api.compare_arrays import Compared, compare_arrays
from aligners.api.measures import *

if TYPE_CHECKING:
    from aligners.api.model_injection import *
    from aligners.api.model_states import *
    from aligners.api.model_updates import *

__all__ = [
    *array_maps.__all__,
    *measures.__all__,
    "Artefact",
    "Compared",
    "Dictionary",
    "Direction",
    "Head",
    "Injected",
    "Steered",
    "TextSource",
    "carry",
    "compare",
    "compare_arrays",
    "inject",
    "load",
    "load_texts",
    "logit_lens",
    "read_artefacts",
    "read_control_vector",
    "read_tuned_lens",
    "states",
    "steer",
    "write_artefact",
    "write_control_vector",
    "write_tuned_lens",
]


def __getattr__(name: str) -> Any:
    """Import what runs models, and thereby transformers, only when it is used."""
    if name in __all__:
        from aligners.api import model_injection, model_states, model_updates

        for module in (model_states, model_injection):
            if name in module.__all__:
                return getattr(module, name)
        return getattr(model_updates, name)
    raise AttributeError(f"module 'aligners.api' has no attribute {name!r}")
