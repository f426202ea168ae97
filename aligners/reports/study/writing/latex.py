"""Tables of a study as LaTeX, with the lines of `booktabs`."""

from __future__ import annotations

import re

from aligners.reports.study.contents import Table
from aligners.reports.study.writing.cells import Written, written

__all__ = ["latex"]

SPECIAL = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "×": r"$\times$", "−": "$-$", "→": r"$\to$",
    "–": "--", "…": r"\dots{}", "√": r"$\surd$", "Σ": r"$\Sigma$", "²": r"$^2$", "‖": r"$\Vert$", "Δ": r"$\Delta$",
    "[": "{[}", "]": "{]}",  # which end the optional argument of a new line
    "ρ": r"$\rho$", "δ": r"$\delta$", "§": r"\S{}",
}  # fmt: skip
ANY = re.compile("|".join(map(re.escape, SPECIAL)))


def latex(table: Table) -> str:
    r"""Write a table that `\input` takes in; its label is `tab:NAME`. It needs the packages `booktabs` and `graphicx`.

    Intervals stand below their means, and a table wider than the text is made smaller.
    """
    sides = "".join("l" if _words(table, column.key) else "r" for column in table.columns)
    head = " & ".join(_escaped(column.heading) for column in table.columns)
    body = [
        " & ".join(_cell(written(row.get(column.key), column)) for column in table.columns) + r" \\"
        for row in table.rows
    ]
    caption = " ".join([f"{table.title}.", table.caption, *table.notes])
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\caption{{{_escaped(caption)}}}",
            rf"\label{{tab:{table.name}}}",
            r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{{sides}}}",
            r"\toprule",
            head + r" \\",
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}}",
            r"\end{table}",
            "",
        ]
    )


def _words(table: Table, key: str) -> bool:
    return all(isinstance(row.get(key), str | None) for row in table.rows)


def _cell(cell: Written) -> str:
    value = _escaped(" ".join(part for part in cell[:2] if part))
    below = _escaped(" ".join(part for part in cell[2:4] if part))
    return rf"\shortstack[r]{{{value}\\\scriptsize {below}}}" if below else value


def _escaped(text: str) -> str:
    return ANY.sub(lambda found: SPECIAL[found[0]], text)
