"""Learned maps between the hidden states of two models: everything that fits, injects, measures and reports them.

What a Trainer of Lightning takes is here: `Alignment` and `Stitching` fit, `InjectionEvaluation` and
`StitchingEvaluation` measure, and `pair_states` and `stitched_texts` make their data modules. The maps are in
`aligners.maps`, maps and measures on plain arrays in `aligners.api`. Importing this package loads nothing; its maps
need torch and SciPy alone, reading them from files neither transformers nor datasets, the rooms above them all.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = [
    "Alignment",
    "BestPerSite",
    "InjectionEvaluation",
    "Stitching",
    "StitchingEvaluation",
    "TextSource",
    "WriteReport",
    "compare_arrays",
    "load_bank",
    "pair_states",
    "save_bank",
    "stitched_texts",
]

try:
    __version__ = version("aligners")  # that of pyproject.toml
except PackageNotFoundError:  # run from a folder, and never installed
    __version__ = "unknown"

_HOMES = {
    "Alignment": "aligners.fitting.alignment",
    "BestPerSite": "aligners.callbacks.best",
    "InjectionEvaluation": "aligners.injection.injecting",
    "Stitching": "aligners.injection.stitching.stitching_training",
    "StitchingEvaluation": "aligners.injection.stitching.measuring",
    "TextSource": "aligners.datamodules.text.sources",
    "WriteReport": "aligners.reports.publishing",
    "compare_arrays": "aligners.api.compare_arrays",
    "load_bank": "aligners.fitting.saved_bank",
    "pair_states": "aligners.datamodules.pairings",
    "save_bank": "aligners.fitting.saved_bank",
    "stitched_texts": "aligners.datamodules.model_texts",
    "SharedPart": "aligners.fitting.universe.shared_part",
    "ThroughSpace": "aligners.fitting.universe.through",
    "TwoLinear": "aligners.fitting.universe.through",
    **dict.fromkeys(
        ("SharedMaps", "SharedProbes", "SharedStitching", "SharedUniverse"),
        "aligners.reports.sharing",
    ),
}


def __getattr__(name: str) -> Any:
    """Import what is asked for. `aligners.INN` and so on are class paths in files that have been written."""
    if not name.startswith("_"):
        home = import_module(_HOMES.get(name, "aligners.maps"))
        if name in _HOMES or name in home.__all__:
            return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
