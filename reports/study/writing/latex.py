"""Tables of a study as LaTeX, with the lines of `booktabs`."""

from __future__ import annotations

import re

from reports.study.contents import Table
from reports.study.writing.cells import plain_rows

__all__ = ["latex"]

SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "×": r"$\times$", "−": "$-$", "→": r"$\to$",
    "–": "--", "…": r"\dots{}", "√": r"$\surd$", "Σ": r"$\Sigma$", "²": r"$^2$", "‖": r"$\Vert$", "Δ": r"$\Delta$",
    "ρ": r"$\rho$", "δ": r"$\delta$", "§": r"\S{}",
}  # fmt: skip
ANY = re.compile("|".join(map(re.escape, SPECIAL)))


def latex(table: Table) -> str:
    r"""Write a table that `\input` takes in; its label is `tab:NAME`, and it needs the package `booktabs`."""
    sides = "".join("l" if _words(table, column.key) else "r" for column in table.columns)
    head = " & ".join(_escaped(column.heading) for column in table.columns)
    body = [" & ".join(map(_escaped, row)) + r" \\" for row in plain_rows(table)]
    caption = " ".join([f"{table.title}.", table.caption, *table.notes])
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_escaped(caption)}}}",
            rf"\label{{tab:{table.name}}}",
            rf"\begin{{tabular}}{{{sides}}}",
            r"\toprule",
            head + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
            "",
        ]
    )


def _words(table: Table, key: str) -> bool:
    return all(isinstance(row.get(key), str | None) for row in table.rows)


def _escaped(text: str) -> str:
    return ANY.sub(lambda found: SPECIAL[found[0]], text)
