"""Which rows of the states that cells read are kept in the store of their study."""

import json
from collections.abc import Sequence
from dataclasses import replace

from aligners.cli.cells.options import CellOptions
from aligners.studies.cells import KINDS, Cell, merged
from datamodules.rows.policies import policy_of


def with_kept_rows(cells: Sequence[Cell], options: CellOptions) -> list[Cell]:
    """Have cells keep one row a text, where no other cell of a store reads more of the same texts.

    A store of tokens serves all cells, and is the smallest that does where some read tokens or words. No id changes.
    `data.store_rows` of the study file comes first.

    Args:
        cells: of a study.
        options: what the commands say of their options.
    """
    by_id, of_texts, tokens = {cell.id: cell for cell in cells}, dict[str, str](), set[str]()
    for cell in cells:
        fit = by_id[cell.needs[-1]] if cell.options.get("checkpoints") else cell  # whose data options it has
        read = options.resolve(fit.kind, KINDS[fit.kind].unnamed(fit.options))
        # A store has neither attention weights nor states beside them.
        stored = cell.kind != "attention" and not read.get("data.attention")
        if stored and options.accepts(cell.kind, "data.store_rows"):
            of_texts[cell.id] = json.dumps([read[name] for name in sorted(read) if name.startswith("data.text.")])
            if policy_of(read.get("data.rows", "tokens")).types is not None:
                tokens.add(of_texts[cell.id])
    kept = {"data": {"store_rows": "texts"}}
    return [
        cell if of_texts.get(cell.id) in {None, *tokens} else replace(cell, options=merged(kept, cell.options))
        for cell in cells
    ]
