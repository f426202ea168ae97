"""Files of a report: each written whole or not at all, and where they were made."""

from __future__ import annotations

import csv
import io
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from matplotlib.figure import Figure

__all__ = ["environment", "save_figure", "table_csv", "table_markdown", "write_text"]

PACKAGES = ("torch", "lightning", "transformers", "torchmetrics", "numpy")


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8."""
    half = path.with_name(path.name + ".part")
    half.write_text(text, encoding="utf-8")
    half.replace(path)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a PNG."""
    half = path.with_suffix(".part.png")
    figure.savefig(half, dpi=130)
    half.replace(path)


def table_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Rows of equal keys as CSV, with a header."""
    lines = io.StringIO()
    writer = csv.DictWriter(lines, fieldnames=list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return lines.getvalue()


def table_markdown(rows: Sequence[dict[str, Any]], columns: Mapping[str, str]) -> str:
    """Some columns of rows as a Markdown table, to four digits.

    Args:
        rows: with `site_x` and `site_y`, which stand in one column, `1→2` where they differ.
        columns: key -> heading.
    """
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        shown = dict(row)
        if row["site_x"] != row["site_y"]:
            shown["site_x"] = f"{row['site_x']}→{row['site_y']}"
        cells = [shown[key] for key in columns]
        lines.append(
            "| " + " | ".join("" if c is None else f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells) + " |"
        )
    return "\n".join(lines) + "\n"


def environment(trainer: pl.Trainer) -> dict[str, Any]:
    """Versions, device and number of ranks of a run."""
    device = trainer.strategy.root_device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "versions": {
            "python": platform.python_version(),
            **{package: version(package) for package in PACKAGES},
        },
        "device": f"{device.type} ({name})",
        "ranks": trainer.world_size,
    }
