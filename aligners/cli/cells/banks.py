"""How many pairs of models share a bank: as many as a study's memory holds, whatever the machine has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aligners.cli.cells.costs import Costs
from aligners.cli.cells.options import CellOptions
from aligners.fitting.parts import pairs_within
from aligners.studies.cells import Cell, expand
from aligners.studies.plan import amount
from aligners.studies.sizes import Size
from aligners.studies.spec import Study

__all__ = ["choose_banks"]


def choose_banks(study: Study, options: CellOptions, sizes: Mapping[str, Size]) -> tuple[Study, list[str]]:
    """Choose `fit.pairs_at_once` where a study file leaves it out.

    It follows from widths, sites, maps and `fit.memory` alone, so that cells have the same ids on any machine.

    Args:
        study: the study.
        options: what the commands say of their options.
        sizes: of the models.

    Returns:
        The study with the number, and how it was chosen, in words.
    """
    if study.fit is None or study.fit.pairs_at_once is not None:
        return study, []
    single = replace(study, fit=replace(study.fit, pairs_at_once=1))
    costs = Costs(single, options, sizes)
    fits: dict[object, Cell] = {}
    for cell in expand(single, options):
        if cell.kind == "fit":
            fits.setdefault((cell.task, *costs.size(cell)), cell)
    if len({size.width for cell in fits.values() for size in costs.size(cell)}) != 1:
        return single, ["Each pair of models is fitted by itself, as widths differ."] if fits else []
    limit = study.fit.memory * 1e9
    each = [costs.pair(cell) for cell in fits.values()]
    most = max(1, min(pairs_within(limit, *pair) for pair in each))
    sites, a_site, model = max(each, key=lambda pair: pair[0] * pair[1])
    said = (
        f"A bank holds {most} pair{'s' if most > 1 else ''} of models within {amount(limit)} (`fit.memory`): {sites} "
        f"sites of {amount(a_site)}, and two models of {amount(model)}. `fit.pairs_at_once` sets another number."
    )
    return replace(study, fit=replace(study.fit, pairs_at_once=most)), [said]
