"""Every table and figure of a study's report by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from typing import NamedTuple

from aligners.reports.study.contents import Figure, Missing, Table
from aligners.reports.study.frames import STATES, Frames
from aligners.reports.study.papers import brown, merchant, phang, phang_surgery, ren_figures, ren_tables, wu, wu_tuning

__all__ = ["CONTENTS", "Found", "Made", "check_names", "make"]

# Name -> the function that makes a table or a figure of what was collected, or raises `Missing`.
CONTENTS: dict[str, Callable[[Frames], Table | Figure]] = {
    "ren_table_2": ren_tables.similarity,
    "ren_table_3": ren_tables.recovery,
    "ren_table_4": ren_tables.alignment,
    "ren_table_4_tests": ren_tables.alignment_tests,
    "ren_table_5": ren_tables.injection,
    "ren_figure_2": ren_figures.errors_by_layer,
    "ren_figure_2_fvu": partial(ren_figures.errors_by_layer, column="fvu", name="ren_figure_2_fvu", component=STATES),
    "ren_figure_4": ren_figures.attention_by_layer,
    "ren_figure_3": partial(ren_figures.layer_maps, within=True),
    "ren_figure_6": partial(ren_figures.layer_maps, within=False),
    "ren_nuclear_norm": ren_figures.nuclear_norms,
    "wu_figure_1": partial(
        wu.block_map,
        name="wu_figure_1",
        title="All layers of all models (Wu et al., Figure 1)",
        measures=("neuronsim", "cka"),
    ),
    "wu_figure_2": wu.untrained_map,
    "wu_figure_3": wu.localization,
    "wu_figure_4": partial(
        wu.block_map,
        name="wu_figure_4",
        title="Attention of all layers of all models (Wu et al., Figures 4 and 10)",
        measures=(
            "attnsim_js",
            "attention_cka",
            "attnsim_norm",
            "attnsim_pearson",
            "attention_svcca",
            "attention_pwcca",
        ),
    ),
    "wu_figure_5": partial(wu_tuning.tuned_map, name="wu_figure_5", measure="cka", paper="Figure 5"),
    "wu_figure_6": partial(wu_tuning.tuned_map, name="wu_figure_6", measure="attnsim_js", paper="Figure 6"),
    "wu_figure_7": partial(wu.localization, name="wu_figure_7"),
    "wu_figure_8": partial(
        wu.block_map,
        name="wu_figure_8",
        title="All layers of all models, further measures (Wu et al., Figure 8)",
        measures=("svcca", "pwcca", "mixedsim", "rsa"),
    ),
    "wu_table_1": wu.freezing,
    "phang_figure_1": phang.layer_maps,
    "phang_clusters": phang.clusters,
    "phang_figure_3": phang_surgery.truncation,
    "phang_figure_4": phang_surgery.skipping,
    "phang_figure_7": phang.between_models,
    "merchant_table_1": merchant.mixed_layers,
    "merchant_layers": merchant.scores_by_site,
    "merchant_figure_1": merchant.scores_by_layer,
    "brown_figure_2_cka": brown.cka_by_layer,
    "brown_figure_2_stitching": brown.stitching_by_layer,
    "brown_figure_3": partial(
        wu.block_map,
        name="brown_figure_3",
        title="Minibatch CKA of all layers of all models (Brown et al., Figures 3, 9 and 10)",
        measures=("minibatch_cka",),
    ),
    "brown_figure_8": brown.angles,
    "brown_angular_distance": brown.angles_table,
}


class Found(NamedTuple):
    """What a table or a figure says in words.

    Attributes:
        name: of the table or figure.
        title: its title.
        said: sentences.
    """

    name: str
    title: str
    said: list[str]


class Made(NamedTuple):
    """What a study's report consists of.

    Attributes:
        tables: in the order of the registry.
        figures: likewise.
        missing: name -> why it could not be made.
    """

    tables: list[Table]
    figures: list[Figure]
    missing: dict[str, str]

    def findings(self) -> list[Found]:
        """What tables and figures say in words; a sentence that several say is that of the first."""
        before: set[str] = set()
        found = []
        items: list[Table | Figure] = [*self.tables, *self.figures]
        for item in items:
            said = [sentence for sentence in item.findings if sentence and sentence not in before]
            before.update(said)
            if said:
                found.append(Found(item.name, item.title, said))
        return found


def check_names(names: Sequence[str]) -> None:
    """Raise if a name is not in `CONTENTS`.

    Raises:
        ValueError: naming them, and names that are like them.
    """
    unknown = [name for name in names if name not in CONTENTS]
    if unknown:
        like = sorted({close for name in unknown for close in get_close_matches(name, CONTENTS, 2)}) or list(CONTENTS)
        raise ValueError(
            f"Expected `report` to name tables and figures that there are, but got {', '.join(unknown)}. Did you mean "
            f"{' or '.join(like)}? Leave `report` out for all."
        )


def make(frames: Frames, names: Sequence[str] | None = None) -> Made:
    """Make tables and figures.

    Args:
        frames: of the study.
        names: which; default: all that can be made.

    Raises:
        ValueError: a name is unknown.
    """
    check_names(names or [])
    made = Made([], [], {})
    for name in names or CONTENTS:
        try:
            item = CONTENTS[name](frames)
        except Missing as reason:
            made.missing[name] = str(reason)
            continue
        if isinstance(item, Table):
            made.tables.append(item)
        else:
            made.figures.append(item)
    return made
