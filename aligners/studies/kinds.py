"""The kinds of cells: which command each calls, on what, and what it leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Kind:
    """A kind of cell.

    Attributes:
        script: `train` or `evaluate`.
        command: of that script.
        unit: what a cell is about.
        names: data options of the command that say which models, and which pairs of them.
        report: file with the rows in the command's folder; None: the command leaves a model and no rows.
        table: name of the table that the rows go into; None: none.
        leaves: what other cells need of it, below its folder.
        apart: further options that name models or cells.
    """

    script: Literal["train", "evaluate"]
    command: str
    unit: Literal["model", "pair", "models"]
    names: tuple[str, ...] = ("models",)
    report: str | None = None
    table: str | None = None
    leaves: str = "run"
    apart: tuple[str, ...] = ()

    def unnamed(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a cell that name neither models nor cells."""
        found = {name: value for name, value in options.items() if name not in self.apart}
        data = {name: value for name, value in options.get("data", {}).items() if name not in self.names}
        return {**found, "data": data}


PAIR = ("model_x", "model_y")
KINDS = {
    "untrained": Kind("train", "untrained", "model", leaves="run/model"),
    "finetune": Kind("train", "finetune", "model", report="finetuning.json", table="finetune"),
    "fit": Kind("train", "fit", "pair", PAIR, "summary.json", "fit", leaves="run/aligners.ckpt"),
    "fit_pairs": Kind("train", "fit_pairs", "models", ("models", "pairs"), "summary.json", "fit", leaves="run/pairs"),
    "attention": Kind("train", "fit_attention", "pair", PAIR, "attention.json", "attention"),
    "inject": Kind("evaluate", "inject", "pair", PAIR, "report.json", "inject", apart=("checkpoints",)),
    "similarity": Kind("evaluate", "similarity", "models", report="similarity.json", table="similarity"),
    "stitch": Kind("train", "stitch", "pair", report="stitching.json", table="stitching"),
    "identity": Kind("evaluate", "stitch", "models", report="stitching.json", table="stitching", apart=("groups",)),
    "surgery": Kind("evaluate", "surgery", "models", ("models", "bases"), "surgery.json", "surgery"),
    "probe": Kind("train", "probe", "model", report="probing.json", table="probing"),
    "recover": Kind("train", "recover", "model", ("model",), "recover.json", "recover"),
}
